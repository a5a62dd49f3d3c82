"""Megatron-LM's arguments read back: from what we render, from scripts as people write them, and from logs."""

from __future__ import annotations

import random
from dataclasses import fields
from itertools import islice
from typing import Any

import pytest

from planner.backends.base import NONE, StateFormat
from planner.backends.megatron import stated_kind, te_loss_bytes
from planner.catalog import load_model
from planner.cost.params import total_params
from planner.errors import InputError
from planner.reading import Configuration, read_configuration
from planner.reading.megatron.layout import layout_stages
from planner.reading.megatron.model import list_expression
from planner.specs.convert import from_strategy
from planner.specs.plan import PlanDocument
from planner.specs.strategy import Offload, Recompute, Strategy
from tests.random_plans import configuration_files, corner_plans, random_plans

BASE = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 128256 "
    "--attention-dropout 0 --hidden-dropout 0 --bf16 --micro-batch-size 1 --global-batch-size 64 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--no-create-attention-mask-in-dataloader"
)


def read(
    arguments: str = "", *, gpus: int = 16, before: str = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
) -> Configuration:
    """BASE and more arguments, started by torchrun."""
    nodes, local = max(gpus // 8, 1), min(gpus, 8)
    line = f"torchrun --nnodes {nodes} --nproc-per-node {local} pretrain_gpt.py {BASE} {arguments}\n"
    return read_configuration({"run.sh": before + line})


def ids(configuration: Configuration) -> set[str]:
    return {finding.id for finding in configuration.findings}


def assert_same(document: PlanDocument, configuration: Configuration) -> None:
    strategy, model = document.best.strategy, document.request.model
    for field in fields(configuration.strategy):
        stated = getattr(configuration.strategy, field.name)
        assert stated == getattr(strategy, field.name), (field.name, model.name, strategy)
    assert (configuration.gpus, configuration.seq_len) == (strategy.gpus, strategy.seq_len)
    assert (configuration.global_batch, configuration.precision) == (strategy.global_batch, strategy.precision)
    assert configuration.model is not None
    assert total_params(configuration.model) == total_params(model)
    assert configuration.model.layer_kinds() == model.layer_kinds()
    same = {
        "layers",
        "hidden",
        "ffn",
        "heads",
        "kv_heads",
        "head_dim",
        "vocab",
        "tied",
        "bias",
        "norm",
        "mla",
        "position",
    }
    for name in same | {"gated_mlp", "activation", "qk_norm", "window", "mtp_layers", "sinks", "attention_gate"}:
        assert getattr(configuration.model, name) == getattr(model, name), (name, model.name)
    assert not [finding for finding in configuration.findings if finding.severity == "error"]
    assert configuration.unread == ()


def test_round_trip() -> None:
    """Plan, files, the same strategy and the same model: random plans and corners, both launchers."""
    plans = [*random_plans("megatron", 120, seed=2), *islice(corner_plans("megatron"), 0, None, 7)]
    for index, document in enumerate(plans):
        assert_same(document, read_configuration(configuration_files(document, ("torchrun", "slurm")[index % 2])))


def test_arguments_file_alone() -> None:
    """The arrays without the launch script: everything but the number of GPUs."""
    (document,) = random_plans("megatron", 1, seed=5)
    configuration = read_configuration({"megatron_args.sh": configuration_files(document)["megatron_args.sh"]})
    assert configuration.gpus is None
    assert configuration.strategy.dp is None
    assert configuration.strategy.layers_per_stage == document.best.strategy.layers_per_stage


def test_bare_command_line() -> None:
    """Flags alone, without a launcher: no finding about the environment that they do not show."""
    configuration = read_configuration({"flags": BASE + " --tensor-model-parallel-size 2 --sequence-parallel"})
    assert configuration.strategy.tp == 2
    assert configuration.gpus is None
    assert ids(configuration) == set()


def test_a_clean_script_has_no_findings() -> None:
    """Nothing is said of arguments that are right."""
    assert ids(read()) == set()
    assert read().habits == {}


@pytest.mark.parametrize(
    ("arguments", "vpp", "layers"),
    [
        ("", 1, (8,) * 4),
        ("--num-layers-per-virtual-pipeline-stage 2", 4, (2,) * 16),
        ("--num-virtual-stages-per-pipeline-rank 2", 2, (4,) * 8),
        ("--pipeline-model-parallel-layout 'Et*7|(t*9|)*2,t*7L'", 1, (7, 9, 9, 7)),
        ("--pipeline-model-parallel-layout 'E|t*8|t*8|t*8|t*8|||L'", 2, (0, 8, 8, 8, 8, 0, 0, 0)),
        ("--decoder-first-pipeline-num-layers 5", 1, (5, 9, 9, 9)),
        ("--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 5", 1, (7, 10, 10, 5)),
        (
            "--num-layers 30 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
            "--num-layers-per-virtual-pipeline-stage 4",
            2,
            (3, 4, 4, 4, 4, 4, 4, 3),
        ),
    ],
)
def test_layouts(arguments: str, vpp: int, layers: tuple[int, ...]) -> None:
    """Every spelling of the pipeline's split."""
    stated = read(f"--pipeline-model-parallel-size 4 {arguments}").strategy
    assert (stated.vpp, stated.layers_per_stage) == (vpp, layers)


@pytest.mark.parametrize(
    ("arguments", "finding"),
    [
        ("--num-virtual-stages-per-pipeline-rank 3", "layers-over-virtual-stages"),
        ("--num-layers-per-virtual-pipeline-stage 3", "layers-over-virtual-stages"),
        ("--num-layers 30", "layers-over-stages"),
        ("--decoder-first-pipeline-num-layers 6", "layers-over-stages"),
        ("--decoder-first-pipeline-num-layers 5 --account-for-loss-in-pipeline-split", "uneven-split-stated-twice"),
        ("--pipeline-model-parallel-layout 'Et*30|t|t|tL'", "layers-assigned"),
        ("--pipeline-model-parallel-layout 'Et*30|t|tL'", "layout-stages"),
        ("--pipeline-model-parallel-layout 'Et*99999999|L'", "value-of-wrong-form"),
        ("--pipeline-model-parallel-layout 'Eq|L'", "value-of-wrong-form"),
    ],
)
def test_layers_that_do_not_divide(arguments: str, finding: str) -> None:
    """Layers that would be lost or refused are named before the job starts."""
    configuration = read(f"--pipeline-model-parallel-size 4 {arguments}")
    assert finding in ids(configuration)
    assert configuration.strategy.layers_per_stage is None


def test_layout_strings() -> None:
    """Repetition of letters and groups, as Megatron unrolls them."""
    assert layout_stages("Ettt|(tt|)*3,m|L") == ["Ettt", "tt", "tt", "tt", "m", "L"]
    assert layout_stages("(t" * 30) is None


@pytest.mark.parametrize(
    ("arguments", "recompute"),
    [
        ("", Recompute()),
        ("--recompute-activations", Recompute(mode="selective", modules=("core_attn",))),
        ("--recompute-granularity selective", Recompute(mode="selective", modules=("core_attn",))),
        (
            "--recompute-granularity selective --recompute-modules mlp layernorm",
            Recompute(mode="selective", modules=("mlp", "layernorm")),
        ),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", Recompute(mode="full")),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            Recompute(mode="full", layers_per_stage=(3,)),
        ),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 99", Recompute(mode="full")),
    ],
)
def test_recomputation(arguments: str, recompute: Recompute) -> None:
    """Granularity, method, layers and modules."""
    assert read(arguments).strategy.recompute == recompute


def test_any_module_list_can_be_priced() -> None:
    """Combinations that plans do not offer become a kind of the stated names."""
    modules = ("moe", "moe_act", "layernorm")
    model = load_model("mixtral-8x7b").spec
    kind = stated_kind(modules, model)
    assert kind.modules == modules
    assert kind.drops >= {"expert_up", "norm_output"}
    strategy = Strategy(
        layers_per_stage=(32,), global_batch=8, seq_len=2048, recompute=Recompute(mode="selective", modules=modules)
    )
    assert from_strategy(strategy, (NONE, kind)).recompute_kind.tolist() == [1]


@pytest.mark.parametrize(
    ("arguments", "severity", "finding"),
    [
        ("--fp8-format hybrid --cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "error", "te-loss-refused"),
        ("--tensor-model-parallel-size 2", "warning", "sequence-parallel-off"),
        ("--sequence-parallel", "note", "sequence-parallel-needs-tp"),
        ("--tensor-model-parallel-size 2 --num-experts 8", "error", "moe-needs-sequence-parallel"),
        (
            "--recompute-activations --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "warning",
            "recompute-stated-twice",
        ),
        ("--recompute-granularity full", "error", "recompute-needs-method"),
        ("--recompute-granularity selective --recompute-num-layers 1", "error", "recompute-method-refused"),
        ("--recompute-method uniform", "warning", "recompute-without-granularity"),
        ("--recompute-granularity selective --recompute-modules attn", "error", "recompute-modules-unknown"),
        ("--recompute-modules mlp", "warning", "recompute-modules-ignored"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
            "note",
            "recompute-in-groups",
        ),
        ("--optimizer-cpu-offload", "error", "offload-needs-precision-aware"),
        ("--exp-avg-dtype bf16", "error", "state-format-needs-precision-aware"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --num-experts 8 --moe-grouped-gemm",
            "warning",
            "expert-tensor-parallel-default",
        ),
        ("--num-experts 8 --moe-grouped-gemm --expert-model-parallel-size 8", "warning", "allgather-dispatcher"),
        ("--num-experts 8", "warning", "experts-one-by-one"),
        ("--expert-model-parallel-size 2", "error", "expert-parallel-needs-experts"),
        ("--tp-comm-overlap", "error", "tp-overlap-needs-sequence-parallel"),
        ("--seq-length 8192", "error", "sequence-beyond-positions"),
        ("--num-virtual-stages-per-pipeline-rank 2", "error", "virtual-stages-need-pipeline"),
        ("--use-torch-fsdp2", "error", "torch-fsdp2-refuses"),
        ("--global-batch-size 60", "error", "batch-divisible"),
        ("--tensor-model-parallel-size 3", "error", "world-size"),
        ("--num-distributed-optimizer-instances 3", "error", "shard-degree-divides"),
        ("--batch-size 4", "error", "flag-moved"),
        ("--num-layers-in-first-pipeline-stage 4", "error", "flag-moved"),
        ("--tensor_model_parallel_size 1", "error", "flag-with-underscores"),
        ("--tensor-model-paralel-size 1", "error", "flag-unknown"),
        ("--use-rotary-position-embeddings", "note", "flag-deprecated"),
        ("--num-layers 16", "warning", "flag-given-twice"),
        ("--bf16 true", "error", "stray-word"),
        ("--lr", "error", "value-missing"),
        ("--micro-batch-size one", "error", "value-of-wrong-form"),
        (
            "--num-experts 4 --moe-router-topk 1 --moe-grouped-gemm --moe-layer-freq '[1]*3'",
            "error",
            "value-of-wrong-form",
        ),
        ("--window-size none", "error", "value-of-wrong-form"),
        ("--hybrid-layer-pattern M*M*", "warning", "model-described-elsewhere"),
        ("--num-experts 4 --moe-router-topk 8 --moe-grouped-gemm", "error", "model-contradicts-itself"),
        ("--num-layers 999999", "error", "model-contradicts-itself"),
        ("--pipeline-model-parallel-size 999999999", "error", "stages-within-layers"),
    ],
)
def test_findings(arguments: str, severity: str, finding: str) -> None:
    """Each is found, with its weight and its place, and a plain script has it not."""
    found = [f for f in read(arguments).findings if f.id == finding]
    assert [f.severity for f in found][:1] == [severity]
    assert found[0].where
    assert found[0].message


@pytest.mark.parametrize(
    ("left_out", "finding"),
    [
        ("--bf16", "fp32-training"),
        ("--use-distributed-optimizer", "param-gather-needs-distributed-optimizer"),
        ("--overlap-grad-reduce", "param-gather-needs-grad-reduce"),
        ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", "distributed-optimizer-off"),
        ("--overlap-grad-reduce --overlap-param-gather", "grad-reduce-not-overlapped"),
        ("--hidden-dropout 0", "dropout-by-default"),
        ("--no-create-attention-mask-in-dataloader", "attention-mask-in-dataloader"),
        ("--group-query-attention", "query-groups-ignored"),
        ("--disable-bias-linear --position-embedding-type rope", "model-unlike-release"),
        ("--micro-batch-size 1", "micro-batch-missing"),
    ],
)
def test_findings_of_what_is_left_out(left_out: str, finding: str) -> None:
    """Defaults that cost something, or that make the arguments contradict each other."""
    arguments = BASE
    for words in left_out.split(" --"):
        arguments = arguments.replace(words if words.startswith("--") else f"--{words}", "")
    assert finding in ids(
        read_configuration({"run.sh": f"torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py {arguments}"})
    )


def test_another_vocabulary_is_another_model() -> None:
    """InternLM/InternLM#22: 32 layers of width 4096 and 103,168 rows are no OLMo of 100,352; padding makes no
    difference."""
    old = "--vocab-size 128256"
    assert old in BASE
    names = {
        rows: read_configuration({"run.sh": f"torchrun pretrain_gpt.py {BASE.replace(old, f'--vocab-size {rows}')}"})
        for rows in (128256, 129024, 131072)
    }
    assert [names[rows].model.name for rows in (128256, 129024)] == [names[128256].model.name] * 2  # type: ignore[union-attr]
    assert names[131072].model.name != names[128256].model.name  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("before", "arguments", "expected"),
    [
        ("", "--tensor-model-parallel-size 2 --sequence-parallel", True),
        ("export CUDA_DEVICE_MAX_CONNECTIONS=8\n", "--context-parallel-size 2", True),
        ("export CUDA_DEVICE_MAX_CONNECTIONS=1\n", "--context-parallel-size 2", False),
        ("", "", False),
        ("export CUDA_DEVICE_MAX_CONNECTIONS=1\n", "--use-megatron-fsdp", True),
        ("", "--use-megatron-fsdp", False),
    ],
)
def test_launch_variable(before: str, arguments: str, expected: bool) -> None:
    """CUDA_DEVICE_MAX_CONNECTIONS: 1 for tp and cp, anything else for FSDP."""
    assert ("max-connections" in ids(read(arguments, before=before))) == expected


@pytest.mark.parametrize(
    ("arguments", "habits"),
    [
        ("--hidden-dropout 0.1", {"dropout": True}),
        ("--no-gradient-accumulation-fusion", {"fused_gradient_accumulation": False}),
        ("--transformer-impl local", {"transformer_engine": False}),
        ("--grad-reduce-in-bf16", {"state_format": StateFormat(2.0, 2.0, 12.0)}),
        (
            "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-grads-dtype bf16",
            {"state_format": StateFormat(2.0, 2.0, 8.0)},
        ),
        ("--fp8-format hybrid", {"narrow_recipe": "delayed"}),
        (
            "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather",
            {"narrow_recipe": "block", "state_format": StateFormat(2.0, 4.0, 12.0)},
        ),
        ("--make-vocab-size-divisible-by 64", {"vocab_multiple": 64}),
        ("--tensor-model-parallel-size 2 --sequence-parallel", {"tensor_parallel_overlap": False}),
        ("--cuda-graph-impl local", {"cuda_graphs": "partial"}),
        ("--cuda-graph-impl full_iteration", {"cuda_graphs": "full"}),
        ("--num-experts 8 --moe-grouped-gemm --moe-token-dispatcher-type flex", {"expert_dispatch": "flex"}),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", {"loss_bytes_per_logit": te_loss_bytes}),
        ("--microbatch-group-size-per-virtual-pipeline-stage 5", {"interleaving_group": 5}),
    ],
)
def test_habits(arguments: str, habits: dict[str, Any]) -> None:
    """What differs from the way a plan runs."""
    found = read(arguments).habits
    assert {name: found.get(name) for name in habits} == habits


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ("--fp16", {"precision": "bf16"}),
        ("--fp4-format e2m1", {"precision": "nvfp4"}),
        ("--cross-entropy-loss-fusion", {"loss": "fused"}),
        ("", {"loss": "eager", "flash_attention": True, "task": "pretrain"}),
        ("--attention-backend unfused", {"flash_attention": False}),
        ("--transformer-impl local", {"flash_attention": False}),
    ],
)
def test_job(arguments: str, values: dict[str, Any]) -> None:
    """Precision, loss and attention."""
    configuration = read(arguments)
    assert {name: getattr(configuration, name) for name in values} == values


def test_sharding_and_offload() -> None:
    """Instances of the optimizer, Megatron's FSDP, and the offloaded share."""
    assert read("--num-distributed-optimizer-instances 2").strategy.shard_degree == 8
    assert read("--use-megatron-fsdp").strategy.zero_stage == 3
    assert read("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads").strategy.zero_stage == 2
    offload = "--use-precision-aware-optimizer --optimizer-cpu-offload"
    assert read(offload).strategy.offload == Offload(optimizer=1.0, device="cpu")
    assert read(f"{offload} --optimizer-offload-fraction 0.25").strategy.offload == Offload(
        optimizer=0.25, device="cpu"
    )
    assert read(f"{offload} --optimizer-offload-fraction 1.5").strategy.offload is None


def test_experts() -> None:
    """Mixtures, their places, and the default of expert tensor parallelism."""
    moe = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-grouped-gemm"
    model = read(
        f"{moe} --moe-layer-freq ([0]*2+[1]*30) --moe-shared-expert-intermediate-size 1024".replace("(", "'(").replace(
            ") ", ")' "
        )
    ).model
    assert model is not None
    assert model.moe is not None
    assert [mlp for _, mlp in model.layer_kinds()].count("dense") == 2
    assert model.moe.shared_ffn == 1024
    assert read(f"{moe} --tensor-model-parallel-size 2 --sequence-parallel").strategy.etp == 2
    every = read(f"{moe} --moe-layer-freq 2").model
    assert every is not None
    assert [mlp for _, mlp in every.layer_kinds()][:3] == ["moe", "dense", "moe"]


def test_list_expressions() -> None:
    """What Megatron evaluates is parsed here, never evaluated."""
    assert list_expression("([0]*3+[1]*58)", 61) == [0] * 3 + [1] * 58
    assert list_expression("([0]+[1])*2", 4) == [0, 1, 0, 1]
    for text in ("[1]*10**9", "__import__('os')", "[1]*3", "[2]*4", "", "([0]*9999+[1])*9999"):
        assert list_expression(text, 4) is None


def test_vocabulary() -> None:
    """Stated, from the catalogue's model of the same dimensions, from a tokenizer of one size, or unknown."""
    without = BASE.replace("--vocab-size 128256", "")
    named = read_configuration(
        {"f": f"{without} --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta/Llama-3-8B"}
    )
    assert named.model is not None
    assert named.model.vocab == 128256
    assert "vocabulary-from-catalogue" in ids(named)
    fixed = read_configuration({"f": f"{without} --tokenizer-type Llama2Tokenizer"})
    assert fixed.model is not None
    assert fixed.model.vocab == 32000
    unknown = read_configuration({"f": f"{without} --hidden-size 4032 --num-attention-heads 32"})
    assert unknown.model is None
    assert "vocabulary-unknown" in ids(unknown)
    padded = read_configuration({"f": f"{without} --padded-vocab-size 129024"})
    assert padded.model is not None
    assert (padded.model.vocab, padded.habits["vocab_multiple"]) == (129024, 1)


def test_undefined_variables() -> None:
    """A value that nobody sets is None and listed; one that decides nothing is not."""
    configuration = read("--pipeline-model-parallel-size $PP $MORE --data-path $DATA")
    assert configuration.strategy.pp is None
    assert configuration.strategy.layers_per_stage is None
    assert set(configuration.unread) >= {"--pipeline-model-parallel-size $PP", "words of $MORE"}
    assert not any("data-path" in item for item in configuration.unread)


def test_not_modelled() -> None:
    """Arguments that bear on memory or speed and have no field are listed."""
    listed = " ".join(
        read("--cpu-offloading-num-layers 4 --cp-comm-type a2a --context-parallel-size 2 --optimizer sgd").unread
    )
    for name in ("cpu-offloading-num-layers", "cp-comm-type", "optimizer sgd"):
        assert name in listed


def test_other_scripts_may_have_flags_of_their_own() -> None:
    """An unknown flag stops pretrain_gpt.py, and may belong to another script."""
    text = f"torchrun --nnodes 1 --nproc-per-node 8 {{}} {BASE} --my-own-thing 3"
    severities = [
        next(f.severity for f in read_configuration({"run.sh": text.format(script)}).findings if f.id == "flag-unknown")
        for script in ("pretrain_gpt.py", "tools/train_ours.py")
    ]
    assert severities == ["error", "note"]
    listed = read_configuration({"args.sh": f"ARGS=({BASE} --my-own-thing 3 --recompute-granularty full)"})
    assert [f.severity for f in listed.findings if f.id == "flag-unknown"] == ["note", "error"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "--checkpoint-activations --checkpoint-num-layers 2",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        ),
        ("--model-parallel-size 2", "--tensor-model-parallel-size 2"),
        ("--fp8-hybrid", "--fp8-format hybrid"),
        (
            "--pipeline-model-parallel-size 4 --virtual-pipeline-model-parallel-size 2",
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers-in-first-pipeline-stage 15",
            "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 15",
        ),
    ],
)
def test_moved_flags_are_read_as_their_successors(old: str, new: str) -> None:
    """Refused, and yet read as they were meant."""
    was, now = read(old), read(new)
    assert "flag-moved" in ids(was)
    assert (was.strategy, was.precision) == (now.strategy, now.precision)


def test_flags_in_a_variable_that_may_be_set() -> None:
    """What a branch would add is not known, so nothing is said of what is absent."""
    few = BASE.replace("--bf16", "").replace("--use-distributed-optimizer", "").replace("--overlap-param-gather", "")
    script = (
        "PR=$1\nif [ $PR = bf16 ]; then prec='--bf16'; fi\n"
        "if [ $2 = true ]; then opt='--use-distributed-optimizer'; fi\n"
        f"torchrun --nproc-per-node 8 pretrain_gpt.py {few} $prec $opt $EXTRA\n"
    )
    configuration = read_configuration({"run.sh": script})
    assert configuration.precision is None
    assert configuration.strategy.zero_stage is None
    assert configuration.strategy.micro_batch == 1
    assert configuration.findings == ()
    assert {"words of $prec", "words of $opt", "words of $EXTRA"} <= set(configuration.unread)
    empty = read_configuration({"run.sh": script.replace("$prec $opt", "")})
    assert (empty.precision, empty.strategy.zero_stage) == ("fp32", 0)


def test_a_list_of_model_arguments_is_a_part() -> None:
    """A file that only holds a model's flags says nothing of precision, batch or sharding."""
    model = "MODEL_ARGS=(\n" + BASE.partition("--attention-dropout")[0] + ")\n"
    configuration = read_configuration({"model.sh": model})
    assert configuration.model is not None
    assert configuration.model.layers == 32
    assert (configuration.precision, configuration.strategy.zero_stage, configuration.strategy.tp) == (None,) * 3
    assert configuration.findings == ()


def test_no_position_embedding() -> None:
    """Refused without rotary positions, idle with them."""
    assert "flag-moved" not in ids(read("--no-position-embedding"))
    learned = read("--no-position-embedding --position-embedding-type learned_absolute")
    assert "flag-moved" in ids(learned)


def test_other_sharding_is_no_refusal() -> None:
    """Megatron-FSDP and PyTorch's FSDP are legal, whatever can be priced."""
    for flags in ("--use-megatron-fsdp", "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads"):
        found = [finding.severity for finding in read(flags).findings if finding.id == "zero-stage"]
        assert found == ["warning"]
    assert "zero-stage" not in ids(read("--use-megatron-fsdp --data-parallel-sharding-strategy optim"))


def test_scripts_of_other_models() -> None:
    """An encoder and a decoder are no decoder of the same flags."""
    configuration = read_configuration({"run.sh": f"torchrun --nproc-per-node 8 pretrain_t5.py {BASE}"})
    assert configuration.model is None
    assert "model-described-elsewhere" in ids(configuration)


def test_degree_in_a_variable() -> None:
    """Nothing is said of a degree that is not known."""
    assert "sequence-parallel-needs-tp" not in ids(read("--tensor-model-parallel-size $TP --sequence-parallel"))
    assert "sequence-parallel-needs-tp" in ids(read("--sequence-parallel"))


def test_the_training_script_has_a_tokenizer() -> None:
    """pretrain_gpt.py takes GPT-2's byte pairs unless it is told otherwise."""
    text = f"torchrun --nproc-per-node 8 {{}} {BASE.replace('--vocab-size 128256', '--hidden-size 4032')}"
    assert (model := read_configuration({"run.sh": text.format("pretrain_gpt.py")}).model) is not None
    assert model.vocab == 50257
    assert read_configuration({"run.sh": text.format("train_ours.py")}).model is None


FORK = """#!/bin/bash
#SBATCH --nodes=24
MASTER=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
NNODES=$SLURM_NNODES
STAGE=0
MODEL=" \\
    --pp-partition-method 'type:transformer|embedding' \\
    --num-layers 70 --hidden-size 14336 --num-attention-heads 112 \\
    --seq-length 2048 --max-position-embeddings 2048 \\
    --micro-batch-size 2 --rampup-batch-size 192 16 9_765_625 --global-batch-size 2048 \\
    --tokenizer-type PretrainedFromHF --pad-vocab-size-to 250880 --embed-layernorm --bf16 \\
    --position-embedding-type alibi --checkpoint-activations \\
    "
cat <<EOT > ds.json
{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": $STAGE}}
EOT
DS="--deepspeed --deepspeed_config ds.json --zero-stage ${STAGE} --deepspeed-activation-checkpointing"
START="python -u -m torch.distributed.run --nproc_per_node 8 --nnodes $NNODES \\
    --rdzv_endpoint $MASTER:6000 --rdzv_backend c10d --max_restarts 0 --tee 3"
CMD="pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 12 $MODEL $DS"
srun --jobid $SLURM_JOBID bash -c "$START --node_rank \\$SLURM_PROCID $CMD" 2>&1 | tee log
"""


def test_fork() -> None:
    """Megatron-DeepSpeed: its flags in the sense of Megatron-LM's, its ZeRO stage as sharding, no advice on flags."""
    configuration = read_configuration({"run.slurm": FORK})
    stated = configuration.strategy
    assert (configuration.gpus, configuration.gpus_per_node, configuration.precision) == (192, 8, "bf16")
    assert (stated.tp, stated.pp, stated.dp, stated.micro_batch, stated.grad_accum) == (4, 12, 4, 2, 256)
    assert stated.layers_per_stage == (5, *[6] * 10, 5)
    assert stated.recompute == Recompute(mode="full")
    assert (stated.zero_stage, stated.shard_degree) == (1, 4)
    assert configuration.model is not None
    assert (configuration.model.name, configuration.model.position) == ("bloom-176b", "none")
    assert ids(configuration) == {"fork", "dropout-by-default"}
    assert "alibi" in " ".join(configuration.unread)


def test_fork_sharding_and_experts() -> None:
    """fp16 without ZeRO is whole on every rank; stage 3 is another framework's; its experts have its own defaults."""

    def fork(arguments: str) -> Configuration:
        text = f"deepspeed --num_gpus 8 pretrain_gpt.py {BASE.replace('--bf16', '--fp16')} --deepspeed {arguments}"
        return read_configuration({"run.sh": text.replace("--use-distributed-optimizer", "")})

    assert fork("--zero-stage 0").strategy.zero_stage == 0
    assert fork("").strategy.zero_stage == 1
    assert "--zero-stage 2" in " ".join(fork("--zero-stage 2").unread)
    with pytest.raises(InputError, match="stage 3"):
        fork("--zero-stage 3 --no-pipeline-parallel")
    experts = fork("--num-experts 16 --moe-expert-parallel-size 8")
    assert experts.model is not None
    assert experts.model.moe is not None
    assert (experts.model.moe.experts, experts.model.moe.top_k, experts.model.moe.every) == (16, 1, 2)
    assert experts.strategy.ep == 8
    mixed = fork("--num-experts 32 32 64 --moe-expert-parallel-size 8")
    assert mixed.model is None
    assert "stray-word" not in ids(mixed)
    dense = fork("--num-experts 1 --moe-expert-parallel-size 1 --topk 1")
    assert dense.model is not None
    assert dense.model.moe is None


SCRIPT = """#!/bin/bash
# Two nodes of eight.
export CUDA_DEVICE_MAX_CONNECTIONS=1
PER_NODE=${PER_NODE:-8}
COUNT=${SLURM_NNODES:-"2"}
TP=4; PP=2   # both on one line
RUN="--nproc_per_node $PER_NODE --nnodes $COUNT --master_addr ${HEAD:-"localhost"} --master_port 6000"
MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 4096 --max-position-embeddings=4096     # with an equals sign
    --swiglu --normalization RMSNorm --padded_vocab_size 128256
)
TRAIN=(
    --micro-batch-size 1 --global-batch-size 64 --bf16
    --recompute-granularity selective
    # --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
SPLIT=(
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size $PP
    --num-layers-per-virtual-pipeline-stage 4
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
torchrun ${RUN} pretrain_gpt.py ${MODEL[@]} "${TRAIN[@]}" ${SPLIT[@]} \\
    --data-path $DATA $@
"""


def test_script_with_every_quirk() -> None:
    """Arrays, strings, defaults, comments, alternatives, both spellings of values, and layers of a virtual stage."""
    configuration = read_configuration({"run.sh": SCRIPT})
    stated = configuration.strategy
    assert (stated.tp, stated.pp, stated.vpp, stated.dp) == (4, 2, 4, 2)
    assert stated.layers_per_stage == (4,) * 8
    assert stated.recompute == Recompute(mode="selective", modules=("core_attn",))
    assert (configuration.gpus, configuration.gpus_per_node, configuration.global_batch) == (16, 8, 64)
    assert configuration.model is not None
    assert (configuration.model.layers, configuration.model.vocab) == (32, 128256)


DUMP = """12:00:01 rank 0: using world size: 16, data-parallel size: 1, context-parallel size: 1, tensor-model-parallel size: 8, pipeline-model-parallel size: 2
using torch.float32 for parameters ...
------------------------ arguments ------------------------
[rank0]:   bf16 ............................................ False
[rank0]:   ffn_hidden_size ................................. 28672
[rank0]:   global_batch_size ............................... 128
[rank0]:   micro_batch_size ................................ 1
[rank0]:   num_attention_heads ............................. 64
[rank0]:   num_experts ..................................... None
[rank0]:   num_layers ...................................... 80
[rank0]:   recompute_modules ............................... ['mlp', 'layernorm']
[rank0]:   recompute_granularity ........................... selective
[rank0]:   seq_length ...................................... 8192
[rank0]:   sequence_parallel ............................... False
[rank0]:   add_bias_linear ................................. False
[rank0]:   attention_backend ............................... AttnBackend.unfused
[rank0]:   use_distributed_optimizer ....................... False
-------------------- end of arguments ---------------------
"""  # noqa: E501


def test_dump() -> None:
    """Dotted lines with None, booleans, lists and enumerations; what the excerpt does not show stays unknown."""
    configuration = read_configuration({"log.txt": DUMP})
    stated = configuration.strategy
    assert (stated.tp, stated.pp, stated.cp, stated.dp, configuration.gpus) == (8, 2, 1, 1, 16)
    assert configuration.precision == "fp32"
    assert stated.sequence_parallel is False
    assert stated.recompute == Recompute(mode="selective", modules=("mlp", "layernorm"))
    assert configuration.flash_attention is False
    assert stated.offload is None
    assert configuration.model is None
    assert ids(configuration) == {"fp32-training", "sequence-parallel-off", "distributed-optimizer-off"}
    # One replica: there is nothing to shard the optimizer over.
    assert [f.severity for f in configuration.findings if f.id == "distributed-optimizer-off"] == ["note"]
    assert configuration.unread == ("arguments that the excerpt does not show",)


OLD_DUMP = """
 0: using world size: 64, data-parallel-size: 4, tensor-model-parallel size: 4, pipeline-model-parallel size: 4
 0: ------------------------ arguments ------------------------
 0:   checkpoint_activations .......................... True
 0:   checkpoint_num_layers ........................... 2
 0:   fp16 ............................................ True
 0:   global_batch_size ............................... 1024
 0:   micro_batch_size ................................ 4
 0:   num_layers ...................................... 40
 0:   num_layers_per_virtual_pipeline_stage ........... 5
 0:   virtual_pipeline_model_parallel_size ............ 2
 0: -------------------- end of arguments ---------------------
"""


def test_dump_of_an_old_release() -> None:
    """Arguments under the names they had, labels of srun, and a context-parallel size that was not there yet."""
    configuration = read_configuration({"log.txt": OLD_DUMP})
    stated = configuration.strategy
    assert (stated.tp, stated.cp, stated.pp, stated.vpp, stated.dp, configuration.gpus) == (4, 1, 4, 2, 4, 64)
    assert (stated.micro_batch, stated.grad_accum, configuration.precision) == (4, 64, "fp16")
    assert stated.recompute == Recompute(mode="full")
    assert "flag-moved" not in ids(configuration)
    off = OLD_DUMP.replace("checkpoint_activations .......................... True", "checkpoint_activations ... False")
    off = off.replace("checkpoint_num_layers ........................... 2", "")
    assert read_configuration({"log.txt": off}).strategy.recompute == Recompute()


def test_dump_of_the_fork() -> None:
    """Megatron-DeepSpeed's lines, whose stage 0 shards the bf16 optimizer all the same."""
    lines = {"deepspeed": "True", "zero_stage": "0", "bf16": "True", "num_experts": "[1]", "micro_batch_size": "2"}
    text = OLD_DUMP.replace("fp16 ......", "adam_beta1 ") + "".join(f"  {k} ..... {v}\n" for k, v in lines.items())
    configuration = read_configuration({"log.txt": text})
    assert (configuration.precision, configuration.strategy.zero_stage) == ("bf16", 1)
    assert "fork" in ids(configuration)


def test_dump_of_something_else() -> None:
    """A frame without arguments, and a log without either."""
    with pytest.raises(InputError, match="no argument"):
        read_configuration({"log": "----- arguments -----\n----- end of arguments -----"})
    with pytest.raises(InputError, match="no training configuration"):
        read_configuration({"log": "step 1 loss 2.0"})


def test_any_text() -> None:
    """Broken scripts and logs end in a configuration or in InputError."""
    chooser = random.Random(3)
    for source in (SCRIPT, DUMP):
        for _ in range(400):
            text = list(source)
            for _ in range(chooser.randint(1, 12)):
                place = chooser.randrange(len(text))
                text[place : place + chooser.randint(0, 9)] = chooser.choice(
                    ["", "\x00", "$", '"', "(", "9" * 30, "é", "\n"]
                )
            for reader in ("megatron-arguments", "megatron-dump"):
                try:
                    read_configuration({"f": "".join(text)}, reader=reader)
                except InputError as problem:
                    assert problem.where  # noqa: PT017
