"""torchtitan configurations are read: flags of 0.3, registry modules, TOML of 0.1 and 0.2, and what people break."""

from __future__ import annotations

import random

import pytest

from planner.errors import InputError
from planner.reading import Configuration
from planner.reading.torchtitan.reader import TorchtitanReader
from planner.specs.strategy import Offload, Recompute
from tests.random_plans import configuration_files, random_plans

READER = TorchtitanReader()
SELECTIVE = Recompute(mode="selective", modules=("attention", "every-second-matmul"))


def read(text: str, name: str = "run.sh", **more: str) -> Configuration:
    files = {name: text, **{key.replace("__", "."): value for key, value in more.items()}}
    assert READER.recognises(files)
    return READER.read(files)


def ids(configuration: Configuration, severity: str = "error") -> list[str]:
    return [finding.id for finding in configuration.findings if finding.severity == severity]


TOML = """
[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 2
global_batch_size = 64
seq_len = 4096
mixed_precision_param = "bfloat16"

[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1   # the rest
tensor_parallel_degree = 4
enable_async_tensor_parallel = true

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[compile]
enable = true
"""


def test_toml_of_earlier_versions() -> None:
    """Names, defaults and the flavor; -1 waits for the number of GPUs."""
    found = read(TOML, "train.toml")
    s = found.strategy
    assert (found.backend, found.model_name, found.seq_len, found.global_batch) == (
        "torchtitan",
        "llama-3.1-8b",
        4096,
        64,
    )
    assert (s.tp, s.cp, s.pp, s.vpp, s.ep, s.dp, s.zero_stage) == (4, 1, 1, 1, 1, None, 3)
    assert (s.micro_batch, s.recompute, found.loss) == (2, SELECTIVE, "eager")
    assert found.habits == {"tensor_parallel_overlap": True}
    assert any("data_parallel_shard_degree = -1" in text for text in found.unread)
    assert ids(found) == []


def test_the_float8_switch_of_old_files() -> None:
    """Before 0.1 a switch, now a converter: read as fp8 and named with what to write; switched off it is nothing."""
    old = TOML + "[float8]\nenable_float8_linear = {}\n"
    found = read(old.format("true"), "train.toml")
    assert found.precision == "fp8"
    assert [f.hint for f in found.findings if f.id == "renamed-field"] == ['write model.converters = ["float8"]']
    assert read(old.format("false"), "train.toml").precision == "bf16"


def test_settings_of_converters_count_with_the_converter_only() -> None:
    """Stock files carry tables for float8 whose converter is commented out."""
    tables = '[quantize.grouped_mm.float8]\nfqns = ["experts"]\n'
    plain = read(TOML + tables, "train.toml")
    assert plain.precision == "bf16"
    assert not any("quantize" in text for text in plain.unread)
    experts = TOML.replace('flavor = "8B"', 'flavor = "8B"\nconverters = ["quantize.grouped_mm.float8"]') + tables
    converted = read(experts, "train.toml")
    assert converted.precision == "bf16"
    assert any("quantize.grouped_mm.float8" in text for text in converted.unread)


def test_toml_behind_the_script_that_starts_it() -> None:
    """GPUs come from the script, flags win over the file, and -1 becomes what is left."""
    found = read('NGPU=16 CONFIG_FILE="./train.toml" ./run_train.sh --training.local-batch-size 4', train__toml=TOML)
    s = found.strategy
    assert (found.gpus, s.dp, s.shard_degree, s.micro_batch, s.grad_accum) == (16, 4, 2, 4, None)


def test_flags_over_a_stock_function() -> None:
    """llama3_70b sets tp 8, batch 8 and full recomputation; flags and the subcommand win."""
    script = (
        "torchrun --nnodes 16 --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_70b \\\n"
        "  --parallelism.pipeline_parallel_degree=4 --training.global_batch_size 512 \\\n"
        "  --training.disable-cuda-graphs activation-checkpoint:selective\n"
    )
    found = read(script)
    s = found.strategy
    assert (found.gpus, found.gpus_per_node, found.model_name) == (128, 8, "llama-3.1-70b")
    assert (s.tp, s.sequence_parallel, s.pp, s.vpp, s.pipeline_schedule) == (8, True, 4, 1, "1f1b")
    assert (s.dp, s.zero_stage, s.shard_degree, s.micro_batch, s.recompute) == (4, 3, 4, 1, SELECTIVE)
    assert (found.global_batch, found.loss, found.precision) == (512, "chunked", "bf16")
    assert set(found.habits) == {"fused_kernels", "activation_overhead", "kernels_per_layer"}
    assert ids(found) == []


def test_deepseek_flavors_have_no_prediction_block() -> None:
    """The catalogue's DeepSeek-V3 has one; torchtitan's flavor builds none."""
    found = read("python -m torchtitan.train --module deepseek_v3 --config deepseek_v3_671b")
    assert found.model is not None
    assert (found.model.layers, found.model.mtp_layers) == (61, 0)
    assert (found.strategy.ep, found.strategy.etp) == (2, 1)
    assert ids(found) == []


def test_cuda_graphs_are_on_unless_switched_off() -> None:
    """Priced where they are allowed, an error with pipelines and with the standard expert dispatch."""
    plain = read("python -m torchtitan.train --module llama3 --config llama3_8b --compile.enable")
    assert plain.habits == {"cuda_graphs": "full"}
    for flag in ("--parallelism.pipeline_parallel_degree 2", "--parallelism.expert_parallel_degree 8"):
        found = read(f"python -m torchtitan.train --module qwen3 --config qwen3_30b_a3b {flag}")
        assert ids(found) == ["cuda-graphs"]
    hybrid = read("python -m torchtitan.train --module deepseek_v3 --config deepseek_v3_16b_hybridep")
    assert ids(hybrid) == []


def test_a_registry_module_of_the_users_own() -> None:
    """Literals of section classes and assignments, over the stock function that it starts from."""
    module = """
def mine():
    config = llama3_8b()
    config.parallelism = ParallelismConfig(
        tensor_parallel_degree=2, pipeline_parallel_degree=4, pipeline_parallel_schedule="Interleaved1F1B",
        module_fqns_per_model_part=FROM_ELSEWHERE,
    )
    config.training.disable_cuda_graphs = True
    config.activation_checkpoint = FullAC.Config()
    return config
"""
    found = read(
        "torchrun --nproc-per-node 8 -m torchtitan.train --module recipes --config mine --training.local_batch_size 8",
        recipes__py=module,
    )
    s = found.strategy
    assert (found.model_name, s.tp, s.pp, s.vpp, s.pipeline_schedule) == ("llama-3.1-8b", 2, 4, 2, "interleaved")
    assert (s.micro_batch, s.grad_accum, s.recompute) == (1, 8, Recompute(mode="full"))
    assert any("module_fqns_per_model_part" in text for text in found.unread)
    other = read("python -m torchtitan.train --module recipes --config absent", recipes__py=module)
    assert ids(other) == ["config-function"]


def test_unknown_functions_state_nothing() -> None:
    """What a function sets that nobody has is not guessed; flags still count."""
    found = read("python -m torchtitan.train --module llama3 --config my_70b --parallelism.tensor_parallel_degree 8")
    s = found.strategy
    assert (s.tp, s.pp, s.cp, s.dp, s.micro_batch, s.recompute) == (8, None, None, None, None, None)
    assert found.seq_len is None
    assert any("my_70b" in text for text in found.unread)


def test_variables_without_value_stay_open() -> None:
    """A degree that a script never sets is None and named."""
    found = read(
        "python -m torchtitan.train --module llama3 --config llama3_8b --parallelism.tensor_parallel_degree $TP "
        "--training.seq_len ${SEQ:-4096}"
    )
    assert found.strategy.tp is None
    assert found.strategy.dp is None
    assert found.seq_len == 4096
    assert any("TP" in text for text in found.unread)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("--parallelism.tensor_parallel_degre 8", "unknown-field"),
        ("--parallelism.expert_tensor_parallel_degree 2", "unknown-field"),
        ("--training.tensor_parallel_degree 2", "renamed-field"),
        ("--training.seq_len 8k", "value-type"),
        ("--training.seq_len 99999999999999999999999", "value-type"),
        ("--training.dtype float16", "value-type"),
        ("--parallelism.tensor_parallel_degree 0", "degree"),
        ("--parallelism.data_parallel_shard_degree 0", "degree"),
        ("--training.global_batch_size 7 --parallelism.data_parallel_shard_degree 2", "batch-divisible"),
        ("--compile.enable_async_tensor_parallel", "async-tensor-parallel"),
        ("--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule 1f2b", "pipeline-schedule"),
        (
            "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_microbatch_size 3",
            "local-batch",
        ),
        (
            "--parallelism.pipeline_parallel_degree 4 --parallelism.pipeline_parallel_layers_per_stage 20",
            "layer-split",
        ),
        ("activation-checkpoint:sometimes", "recompute-choice"),
    ],
)
def test_mistakes_become_findings(extra: str, expected: str) -> None:
    """Each with the place where it stands."""
    found = read(
        f"python -m torchtitan.train --module llama3 --config llama3_8b --training.disable_cuda_graphs "
        f"--training.local_batch_size 4 {extra}"
    )
    assert expected in ids(found)
    assert all(finding.where for finding in found.findings)


def test_uneven_stages() -> None:
    """Weights of the ends, layers of a stage, module lists and split points all become layers of stages."""
    start = "python -m torchtitan.train --module llama3 --config llama3_8b --training.disable_cuda_graphs "
    pipeline = start + "--parallelism.pipeline_parallel_degree 2 "
    weighted = read(pipeline + "--parallelism.pipeline_parallel_last_stage_less_layers 3")
    assert weighted.strategy.layers_per_stage == (17, 15)
    chunked = read(
        pipeline
        + "--parallelism.pipeline_parallel_schedule Interleaved1F1B --parallelism.pipeline_parallel_layers_per_stage 6"
    )
    assert (chunked.strategy.vpp, chunked.strategy.layers_per_stage) == (3, (5, 6, 6, 6, 5, 4))
    lists = "[['tok_embeddings','layers.0'],['layers.1','norm','lm_head']]"
    listed = read(pipeline + f'--parallelism.module_fqns_per_model_part "{lists}"')
    assert listed.strategy.layers_per_stage == (1, 1)
    points = read(
        '[model]\nname="llama3"\nflavor="8B"\n[parallelism]\npipeline_parallel_degree=2\n'
        'pipeline_parallel_split_points=["layers.12"]\n[training]\nlocal_batch_size=4',
        "old.toml",
    )
    assert points.strategy.layers_per_stage == (12, 20)


def test_reshard_policy_and_shard_group_make_the_stage() -> None:
    """never keeps weights (2, or 0 with nothing to shard over); a pipeline keeps them by default."""
    start = "python -m torchtitan.train --module llama3 --config llama3_8b --training.disable_cuda_graphs "
    never = "--parallelism.fsdp_reshard_after_forward never "
    single = "--parallelism.data_parallel_shard_degree 1 --parallelism.data_parallel_replicate_degree 8 "
    assert read(start + never).strategy.zero_stage == 2
    assert read(start + never + single).strategy.zero_stage == 0
    assert read(start + never + "--parallelism.pipeline_parallel_degree 2").strategy.zero_stage == 3
    replicated = read("[model]\nflavor='8B'\n[parallelism]\ndata_parallel_shard_degree=1\n[training]\n", "r.toml")
    assert (replicated.strategy.zero_stage, replicated.strategy.shard_degree) == (0, 1)


def test_offload_and_precision() -> None:
    """CPU offload moves everything; float8 comes from converters or from the stock function."""
    found = read(TOML.replace("seq_len", "enable_cpu_offload = true\nseq_len"), "t.toml")
    assert found.strategy.offload == Offload(optimizer=1.0, parameters="cpu", device="cpu")
    assert read(TOML.replace('"8B"', '"8B"\nconverters = ["float8"]'), "t.toml").precision == "fp8"
    assert read(TOML.replace('"bfloat16"', '"float32"'), "t.toml").precision == "fp32"
    assert read("python -m torchtitan.train --module llama3 --config llama3_405b").precision == "fp8"


@pytest.mark.parametrize("text", ["[training\nseq_len=", "[training]\nlocal_batch_size = 1\nseq_len = = 2"])
def test_files_that_cannot_be_read(text: str) -> None:
    """Named with the place, never a traceback."""
    with pytest.raises(InputError):
        READER.read({"train.toml": f'[model]\nflavor = "8B"\n[parallelism]\nlocal_batch_size = 1\n{text}'})
    with pytest.raises(InputError, match="not Python"):
        read("python -m torchtitan.train --module recipes --config mine", recipes__py="def mine(:")


def test_other_files_are_not_taken_for_torchtitan() -> None:
    """Megatron arguments, DeepSpeed JSON, a pyproject file and prose."""
    for name, text in (
        ("run.sh", "torchrun pretrain_gpt.py --tensor-model-parallel-size 8 --seq-length 4096"),
        ("ds_config.json", '{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}'),
        ("pyproject.toml", '[project]\nname = "x"\n[tool.training]\nseq_len = 1'),
        ("notes.txt", "we trained with --config something and a module"),
    ):
        assert not READER.recognises({name: text}), name
    for backend in ("megatron", "deepspeed", "fsdp"):
        for document in random_plans(backend, 3):
            files = configuration_files(document)
            assert not READER.recognises(files), backend


def test_damaged_files_end_in_findings_or_an_input_error() -> None:
    """Random cuts, doubled and changed characters: an answer or an InputError, whatever the bytes."""
    chooser = random.Random(7)
    kept = [configuration_files(document) for document in random_plans("torchtitan", 4, 3)]
    sources = [{"train.toml": TOML}, *kept]
    letters = "\"'[](){}=.,-\\\n\t #$0189abz\x00\ufffd\u2028"
    answered = refused = 0
    for _ in range(600):
        files = dict(chooser.choice(sources))
        name = chooser.choice(sorted(files))
        text = files[name]
        for _ in range(chooser.randint(1, 6)):
            at = chooser.randrange(len(text) + 1)
            text = (
                text[:at]
                + chooser.choice(["", chooser.choice(letters) * chooser.randint(1, 3)])
                + text[at + chooser.randint(0, 12) :]
            )
        files[name] = text
        try:
            READER.read(files)
            answered += 1
        except InputError:
            refused += 1
    assert answered > 100
    assert refused > 5


def test_a_missing_base_file_leaves_the_model_open() -> None:
    """run_train.sh names a TOML file that is not given: which model it trains is not guessed."""
    found = read("NGPU=8 CONFIG_FILE=./train.toml ./run_train.sh --parallelism.tensor_parallel_degree=4\n")
    assert found.model_name is None
    assert any("train.toml" in text for text in found.unread)
    assert not any("flavor" in text for text in found.unread)
