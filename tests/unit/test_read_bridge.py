"""Megatron-Bridge's overrides: what is rendered is read back, and what people write is understood or named."""

from __future__ import annotations

import random
import runpy
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from planner.backends import get_backend
from planner.backends.base import RuleContext
from planner.cost.params import total_params
from planner.errors import InputError
from planner.reading import Configuration, read_configuration
from planner.render import render_plan
from planner.specs.model import ModelSpec
from planner.specs.strategy import Recompute
from tests.golden.plans import CASES
from tests.helpers import h100_cluster, llama8b, make_batch, make_job
from tests.random_plans import configuration_files, corner_plans, random_plans

LAUNCH = """export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nnodes 2 --nproc-per-node 8 pretrain_bridge.py overrides.txt
"""
BASE = """model.num_layers=32
model.hidden_size=4096
model.ffn_hidden_size=14336
model.num_attention_heads=32
model.num_query_groups=8
model.seq_length=4096
model.position_embedding_type=rope
model.normalization=RMSNorm
model.activation_func=silu
model.gated_linear_unit=True
model.add_bias_linear=False
model.attention_dropout=0
model.hidden_dropout=0
model.share_embeddings_and_output_weights=False
model.vocab_size=128256
train.micro_batch_size=1
train.global_batch_size=64
ddp.use_distributed_optimizer=True
optimizer.use_distributed_optimizer=True
ddp.overlap_grad_reduce=True
ddp.overlap_param_gather=True
"""


def read(more: str = "", *, launch: str = LAUNCH) -> Configuration:
    return read_configuration({"launch.sh": launch, "overrides.txt": BASE + more})


def ids(configuration: Configuration) -> set[str]:
    return {finding.id for finding in configuration.findings}


def test_round_trip() -> None:
    """Plan, files, the same strategy and the same model."""
    plans = [*random_plans("megatron-bridge", 120, seed=6), *islice(corner_plans("megatron-bridge"), 0, None, 9)]
    for index, document in enumerate(plans):
        configuration = read_configuration(configuration_files(document, ("torchrun", "slurm")[index % 2]))
        strategy, model = document.best.strategy, document.request.model
        assert configuration.backend == "megatron-bridge"
        for field in fields(configuration.strategy):
            assert getattr(configuration.strategy, field.name) == getattr(strategy, field.name), (field.name, strategy)
        assert (configuration.gpus, configuration.seq_len) == (strategy.gpus, strategy.seq_len)
        assert (configuration.global_batch, configuration.precision) == (strategy.global_batch, strategy.precision)
        assert configuration.model is not None
        assert total_params(configuration.model) == total_params(model)
        assert configuration.model.layer_kinds() == model.layer_kinds()
        assert not [finding for finding in configuration.findings if finding.severity == "error"]
        assert configuration.unread == ()


def test_clean_overrides_have_no_findings() -> None:
    """The recipe's own defaults count: bf16, fused loss, no attention mask."""
    configuration = read()
    assert ids(configuration) == set()
    assert (configuration.gpus, configuration.precision, configuration.loss) == (16, "bf16", "fused")
    assert configuration.strategy.dp == 16


@pytest.mark.parametrize(
    ("more", "finding"),
    [
        ("model.zero_stage=3", "field-unknown"),
        ("model.tensor_model_paralel_size=2", "field-unknown"),
        ("model.tensor_model_parallel_size=2", "sequence-parallel-off"),
        (
            "model.pipeline_model_parallel_size=4\nmodel.virtual_pipeline_model_parallel_size=3",
            "layers-over-virtual-stages",
        ),
        ("modle.num_layers=3", "field-unknown"),
        ("model.pipeline_model_parallel_size=3", "world-size"),
        ("model.recompute_granularity=full", "recompute-needs-method"),
        ("optimizer.use_distributed_optimizer=False", "sharding-contradicts-itself"),
        (
            "ddp.use_distributed_optimizer=False\noptimizer.use_distributed_optimizer=False",
            "param-gather-needs-distributed-optimizer",
        ),
        ("model.cross_entropy_fusion_impl=te", "te-loss-refused"),
        ("mixed_precision=None\nmodel.bf16=False", "fp32-training"),
        ("train.global_batch_size=60", "batch-divisible"),
        ("model.num_layers=many", "value-of-wrong-form"),
    ],
)
def test_findings(more: str, finding: str) -> None:
    """Found with the fields' own names, never with arguments of Megatron-LM."""
    found = [f for f in read(more).findings if f.id == finding]
    assert found
    assert "--" not in found[0].message + found[0].hint + found[0].where


@pytest.mark.parametrize(
    ("more", "values"),
    [
        ("mixed_precision=fp16_mixed", {"precision": "fp16"}),
        ("mixed_precision=bf16_with_mxfp8_mixed", {"precision": "fp8"}),
        ("mixed_precision=bf16_mixed\nmixed_precision.fp8=hybrid", {"precision": "fp8"}),
        ("mixed_precision=bf16_with_nvfp4_mixed", {"precision": "nvfp4"}),
        ("mixed_precision=None\nmodel.bf16=False", {"precision": "fp32"}),
        ("mixed_precision=ours", {"precision": None}),
        ("model.cross_entropy_loss_fusion=False", {"loss": "eager"}),
        ("model.attention_backend=unfused", {"flash_attention": False}),
    ],
)
def test_formats(more: str, values: dict[str, Any]) -> None:
    """Named recipes of number formats, and fields on top of them."""
    configuration = read(more)
    assert {name: getattr(configuration, name) for name in values} == values


def test_command_line() -> None:
    """Overrides as words of a command, with Hydra's plus signs, after those of a file; variables stay unknown."""
    words = "model.pipeline_model_parallel_size=2 +model.sequence_parallel=true ++train.micro_batch_size=$MBS"
    script = f"torchrun --nnodes 2 --nproc-per-node 8 run_recipe.py --recipe vanilla_gpt_pretrain_config {words}\n"
    configuration = read(launch=script)
    assert configuration.strategy.pp == 2
    assert configuration.strategy.micro_batch is None
    assert any("micro_batch_size" in item for item in configuration.unread)


def test_recipe_of_its_own() -> None:
    """What another recipe sets is not known, and its classes may have fields that the GPT configuration has not."""
    script = """
CONFIGS=("4,2,8,True" "2,4,8,True")
for CONFIG in "${CONFIGS[@]}"; do
    IFS=',' read -r TP PP EP SP <<< "$CONFIG"
    OVERRIDES=" \\
        train.micro_batch_size=1 train.global_batch_size=512 model.freeze_vision_model=True \\
        model.tensor_model_parallel_size=$TP model.pipeline_model_parallel_size=$PP \\
        model.expert_model_parallel_size=$EP model.sequence_parallel=$SP model.tensor_model_paralel_size=2"
    python convert.py --to megatron
    srun --nodes 8 --ntasks-per-node 8 bash -c "uv run python run_recipe.py --recipe big_moe_pretrain_config $OVERRIDES"
done
"""
    configuration = read_configuration({"job.sh": script})
    stated = configuration.strategy
    assert (stated.tp, stated.pp, stated.ep, stated.sequence_parallel, stated.cp) == (4, 2, 8, True, None)
    assert (configuration.gpus, configuration.global_batch, stated.micro_batch) == (64, 512, 1)
    assert (configuration.precision, stated.recompute, configuration.habits) == (None, None, {})
    severities = {f.message.split()[5]: f.severity for f in configuration.findings if f.id == "field-unknown"}
    assert severities == {"model.freeze_vision_model": "note", "model.tensor_model_paralel_size": "warning"}
    assert not [f for f in configuration.findings if f.severity == "error"]
    assert "max-connections" not in ids(configuration)
    assert configuration.unread[0].startswith("recipe big_moe_pretrain_config")


def test_yaml_overrides() -> None:
    """Sections of a YAML file change a recipe that is not known; what is off there is known to be off."""
    text = """
model:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 1
  sequence_parallel: false
  teacher: {tensor_model_parallel_size: 2}
train: {global_batch_size: 8, micro_batch_size: 1}
ddp: {overlap_grad_reduce: null}
mixed_precision: fp16_mixed
"""
    configuration = read_configuration({"override.yaml": text})
    stated = configuration.strategy
    assert (configuration.backend, configuration.global_batch) == ("megatron-bridge", 8)
    assert configuration.precision == "fp16"
    assert (stated.tp, stated.pp, stated.cp, stated.sequence_parallel) == (2, 1, None, False)
    assert "sequence-parallel-off" in ids(configuration)
    assert {finding.where for finding in configuration.findings} == {"override.yaml:5"}
    script = "torchrun --nproc-per-node 4 finetune.py --config-file override.yaml model.tensor_model_parallel_size=4\n"
    assert read_configuration({"override.yaml": text, "run.sh": script}).strategy.tp == 4


def test_older_yaml_is_another_format() -> None:
    """A trainer, and the batch inside of the model: not these sections."""
    text = "trainer: {devices: 8}\nmodel:\n  micro_batch_size: 1\n  tensor_model_parallel_size: 2\n  num_layers: 4\n"
    with pytest.raises(InputError, match="no training configuration"):
        read_configuration({"megatron_gpt_config.yaml": text})


def test_configuration_of_a_run() -> None:
    """run_config.yaml: classes by name, functions that are only named."""
    text = """
_target_: megatron.bridge.training.config.ConfigContainer
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 14336
  num_attention_heads: 32
  num_query_groups: 8
  kv_channels: 128
  vocab_size: 128256
  share_embeddings_and_output_weights: false
  add_bias_linear: false
  gated_linear_unit: true
  activation_func: {_target_: torch.nn.functional.silu, _call_: false}
  normalization: RMSNorm
  position_embedding_type: rope
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  context_parallel_size: 1
  recompute_granularity: null
train: {_target_: x.TrainingConfig, micro_batch_size: 1, global_batch_size: 64}
"""
    configuration = read_configuration({"run_config.yaml": text})
    assert configuration.model is not None
    assert total_params(configuration.model) == total_params(llama8b())
    assert (configuration.strategy.tp, configuration.strategy.pp, configuration.strategy.cp) == (4, 2, 1)
    assert configuration.strategy.recompute == Recompute()
    assert not [finding for finding in configuration.findings if finding.severity == "error"]


@pytest.mark.parametrize(("field", "found"), [("use_megatron_fsdp", True), ("use_distributed_optimizer", False)])
def test_connections(field: str, found: bool) -> None:
    """One connection is refused with FSDP only, none asked for without."""
    for value in ("1", "32"):
        script = f"export CUDA_DEVICE_MAX_CONNECTIONS={value}\ntorchrun --nproc-per-node 8 pretrain_bridge.py "
        script += f"model.tensor_model_parallel_size=2 train.micro_batch_size=1 ddp.{field}=True\n"
        assert ("max-connections" in ids(read_configuration({"run.sh": script}))) == (found and value == "1")


def test_words_of_yaml() -> None:
    """Booleans in any case, and null for nothing."""
    more = "model.tensor_model_parallel_size=2\nmodel.sequence_parallel=true\nmodel.num_moe_experts=null"
    assert read(more).strategy.sequence_parallel is True
    assert read("ddp.overlap_grad_reduce=false\nddp.overlap_param_gather=false").habits["overlapped_stages"] == ()


def test_sections_that_are_not_read() -> None:
    """Listed, not called unknown."""
    configuration = read("comm_overlap.tp_comm_overlap=True")
    assert "comm_overlap.tp_comm_overlap=True" in configuration.unread
    assert "field-unknown" not in ids(configuration)


def test_recomputation_and_lists() -> None:
    """Lists as the files write them."""
    stated = read("model.recompute_granularity=selective\nmodel.recompute_modules=[mlp, layernorm]").strategy
    assert stated.recompute == Recompute(mode="selective", modules=("mlp", "layernorm"))
    quoted = read("model.recompute_granularity=selective\nmodel.recompute_modules=['mlp']").strategy
    assert quoted.recompute == Recompute(mode="selective", modules=("mlp",))


def test_rules_of_its_own() -> None:
    """A learned table of another length than the sequence, and fine-tuning, cannot be rendered here."""
    backend = get_backend("megatron-bridge")

    def broken(model: ModelSpec, **job: Any) -> set[str]:
        made = make_job(**job)
        kinds = backend.recompute_kinds(model, made)
        context = RuleContext(model, h100_cluster(16), made, make_batch(tp=[1], dp=[16], stage_layers=[32]), kinds)
        return {rule.id for rule, mask in backend.broken_rules(context) if mask[0]}

    learned = llama8b().model_copy(update={"position": "learned", "learned_positions": 8192})
    assert "learned-table" in broken(learned, seq_len=4096)
    assert "learned-table" not in broken(learned, seq_len=8192)
    assert "pretraining-only" in broken(llama8b(), task="sft")
    assert not broken(llama8b()) & {"learned-table", "pretraining-only"}


def test_the_rendered_script_reads_values(tmp_path: Path) -> None:
    """Numbers, switches, lists, layer lists and files of overrides, as the script itself reads them."""
    files = render_plan(CASES["megatron-bridge-moe"].document)
    (tmp_path / "pretrain_bridge.py").write_text(files["pretrain_bridge.py"])
    (tmp_path / "overrides.txt").write_text(files["bridge_overrides.txt"])
    script = runpy.run_path(str(tmp_path / "pretrain_bridge.py"))
    values = dict(script["stated"]([str(tmp_path / "overrides.txt"), "train.train_iters=3"]))
    assert values["train.train_iters"] == "3"
    assert script["parsed"]("model.num_layers", "61") == 61
    assert script["parsed"]("model.sequence_parallel", "True") is True
    assert script["parsed"]("model.recompute_modules", "[moe_act,mla_up_proj]") == ["moe_act", "mla_up_proj"]
    assert script["parsed"]("model.window_size", "[128,0]") == [128, 0]
    assert script["parsed"]("model.moe_layer_freq", "([0]*3+[1]*58)") == [0] * 3 + [1] * 58
    (tmp_path / "bad.txt").write_text("nonsense\n")
    with pytest.raises(SystemExit, match=r"section\.field=value"):
        list(script["stated"]([str(tmp_path / "bad.txt")]))


def test_any_text() -> None:
    """Broken overrides end in a configuration or in InputError."""
    chooser = random.Random(8)
    pieces = ["", "\x00", "$", '"', "[", "9" * 30, "é", "\n"]
    for _ in range(400):
        text = list(BASE)
        for _ in range(chooser.randint(1, 10)):
            place = chooser.randrange(len(text))
            text[place : place + chooser.randint(0, 9)] = chooser.choice(pieces)
        try:
            read_configuration({"overrides.txt": "".join(text)}, reader="megatron-bridge-overrides")
        except InputError as problem:
            assert problem.where  # noqa: PT017
