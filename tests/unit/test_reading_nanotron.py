"""nanotron configurations read back: the round trip of rendered plans, what else a file can say, and broken files."""

from __future__ import annotations

import contextlib
from itertools import islice
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from planner.backends.base import StateFormat
from planner.errors import InputError
from planner.reading import Configuration, read_configuration
from planner.reading.texts.yaml_lines import load_yaml
from planner.render import render_plan
from planner.specs.convert import to_strategy
from planner.specs.model import BiasSpec, MoeSpec, WindowSpec
from planner.specs.plan import PlanDocument
from planner.specs.strategy import Recompute
from tests.golden.plans import CASES, LLAMA_8B
from tests.random_plans import configuration_files, corner_plans, plan_document, random_plans
from tests.strategies import legal, machines, question, strategy

FOLLOWING = {"layers_per_stage", "secondary_shard_degree"}
"""What the file does not say: the split follows from model and stages, the second shard does not exist."""


def read(document: PlanDocument) -> Configuration:
    """The configuration in the rendered files, without plan and guide."""
    return read_configuration(configuration_files(document))


def check_round_trip(document: PlanDocument) -> None:
    configuration, wanted = read(document), document.best.strategy
    stated = vars(configuration.strategy)
    assert {name for name, value in stated.items() if value is None} == FOLLOWING
    for name in stated.keys() - FOLLOWING:
        assert stated[name] == getattr(wanted, name), name
    assert configuration.backend == "nanotron"
    assert configuration.gpus == wanted.gpus
    assert configuration.gpus_per_node == document.request.cluster.local_gpus
    assert (configuration.seq_len, configuration.global_batch) == (wanted.seq_len, wanted.global_batch)
    assert configuration.precision == wanted.precision
    assert (configuration.findings, configuration.unread, dict(configuration.habits)) == ((), (), {})
    same = {"name", "max_seq", "attention"}
    model = document.request.model
    assert configuration.model is not None
    assert configuration.model.model_dump(exclude=same) == model.model_dump(exclude=same)


def test_round_trip_of_random_plans() -> None:
    """What is written is what is read, model included."""
    for document in random_plans("nanotron", 120, seed=2):
        check_round_trip(document)


def test_round_trip_of_corner_plans() -> None:
    """Every degree, stage, recomputation and micro-batch that legal plans have."""
    for document in islice(corner_plans("nanotron"), 0, None, 2):
        check_round_trip(document)


def test_round_trip_of_the_other_model_class() -> None:
    """Biases of query, key and value come back through the Qwen2 class."""
    context = question("qwen2.5-7b", machines("h100", 8), "nanotron", seq_len=4096, global_batch=64)
    row = strategy(context, tp=2, zero_stage=1, sequence_parallel=True)
    assert not legal(context, row)
    document = plan_document(context, to_strategy(row, 0, context.recompute_kinds, context.job))
    check_round_trip(document)
    assert "is_qwen2_config" in render_plan(document)["nanotron.yaml"]


def base(name: str = "nanotron-pipeline") -> dict[str, Any]:
    """A rendered configuration as plain values."""
    config: dict[str, Any] = yaml.safe_load(render_plan(CASES[name].document)["nanotron.yaml"])
    return config


def reread(config: dict[str, Any], **others: str) -> Configuration:
    return read_configuration({"c.yaml": yaml.safe_dump(config), **others})


def ids(configuration: Configuration) -> list[str]:
    return [finding.id for finding in configuration.findings]


def test_defaults_of_the_loader() -> None:
    """Without engine and mode nanotron runs afab and all-reduce, in bfloat16."""
    config = base()
    for key in ("pp_engine", "tp_mode", "tp_linear_async_communication", "recompute_layer", "context_parallel_size"):
        del config["parallelism"][key]
    del config["model"]["dtype"]
    configuration = reread(config)
    s = configuration.strategy
    assert (s.pipeline_schedule, s.sequence_parallel, s.cp, s.recompute) == ("gpipe", False, 1, Recompute())
    assert configuration.precision == "bf16"
    assert configuration.findings == ()


def test_zero_stage_three_means_one() -> None:
    """The finding says where, what it does and what to write."""
    config = base()
    config["optimizer"]["zero_stage"] = 3
    configuration = reread(config)
    (finding,) = configuration.findings
    assert (finding.id, finding.severity, finding.allowed, finding.hint) == ("zero-stage", "error", "0, 1", "write 1")
    assert finding.where.startswith("c.yaml:")
    assert (configuration.strategy.zero_stage, configuration.strategy.shard_degree) == (1, 4)


def test_batch_algebra() -> None:
    """Sequences of a step are micro-batch times accumulation times replicas."""
    config = base()
    config["tokens"].update(micro_batch_size=3, batch_accumulation_per_replica=5)
    assert reread(config).global_batch == 3 * 5 * 4
    config["tokens"]["micro_batch_size"] = 0
    configuration = reread(config)
    assert (configuration.global_batch, ids(configuration)) == (None, ["not-positive"])


def test_afab_without_stages_is_told() -> None:
    """The engine holds every micro-batch at once, which the estimate of a single stage does not count."""
    config = base("nanotron-context")
    config["parallelism"]["pp_engine"] = "afab"
    assert ids(reread(config)) == ["afab-without-stages"]


@pytest.mark.parametrize(
    ("path", "value", "field", "expected"),
    [
        (("model", "make_vocab_size_divisible_by"), 128, "vocab_multiple", 128),
        (("parallelism", "tp_linear_async_communication"), False, "tensor_parallel_overlap", False),
        (("optimizer", "accumulate_grad_in_fp32"), False, "state_format", StateFormat(2.0, 2.0, 4.0)),
        (("optimizer", "optimizer_factory"), {"name": "sgd"}, "state_format", StateFormat(2.0, 6.0, 4.0)),
    ],
    ids=["vocabulary", "synchronous", "16-bit-gradients", "sgd"],
)
def test_what_a_plan_would_set_differently_is_a_habit(
    path: tuple[str, str], value: Any, field: str, expected: Any
) -> None:
    config = base()
    config[path[0]][path[1]] = value
    assert reread(config).habits == {field: expected}


@pytest.mark.parametrize(
    ("path", "value", "unread"),
    [
        (("model", "ddp_bucket_cap_mb"), 200, "model.ddp_bucket_cap_mb"),
        (("parallelism", "tp_recompute_allgather"), False, "parallelism.tp_recompute_allgather"),
        (("profiler",), {"profiler_export_path": "x"}, "profiler"),
        (("model", "model_config", "z_loss_enabled"), True, "model.model_config.z_loss_enabled"),
        (("optimizer", "optimizer_factory", "torch_adam_is_fused"), False, "torch_adam_is_fused"),
    ],
)
def test_settings_that_are_not_modelled_are_listed(path: tuple[str, ...], value: Any, unread: str) -> None:
    config = base()
    place = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    configuration = reread(config)
    assert configuration.findings == ()
    assert [entry for entry in configuration.unread if unread in entry]


def test_models_of_the_qwen2_class() -> None:
    """Windows and experts are read; the backend's rules decide about them."""
    config = base("nanotron-context")
    config["parallelism"].update(context_parallel_size=1, dp=8)
    model = config["model"]["model_config"]
    for key in ("_attn_implementation", "ring_attn_heads_k_stride", "log_attn_probs"):
        del model[key]
    model.update(
        attention_bias=True,
        sliding_window_size=4096,
        moe_config={"num_experts": 16, "top_k": 4, "moe_intermediate_size": 512},
    )
    configuration = reread(config)
    assert configuration.model is not None
    assert configuration.model.bias == BiasSpec(qkv=True)
    assert configuration.model.window == WindowSpec(size=4096, global_every=0)
    assert configuration.model.moe == MoeSpec(experts=16, top_k=4, expert_ffn=512)
    assert configuration.unread == ("model.model_config.log_attn_probs (on by default)",)


def test_context_parallelism_asks_for_weights_data_and_attention() -> None:
    """The loader takes the file; the trainer stops, or each rank attends to its own part only."""
    config = base("nanotron-context")
    config["checkpoints"]["resume_checkpoint_path"] = None
    config["data_stages"][0]["data"]["dataset"] = None
    config["model"]["model_config"]["_attn_implementation"] = "flash_attention_2"
    assert ids(reread(config)) == [
        "context-parallel-attention",
        "context-parallel-weights",
        "context-parallel-data",
    ]


def test_finetuning_is_read_from_the_initial_weights() -> None:
    config = base()
    config["model"]["init_method"] = {"path": "/weights"}
    assert reread(config).task == "sft"


def test_other_models_are_named() -> None:
    """Starcoder2 is a class of nanotron without plans."""
    config = base()
    config["model"]["model_config"] = {"is_starcoder2_config": True}
    configuration = reread(config)
    assert (configuration.model, ids(configuration)) == (None, ["model-class"])


def test_biases_of_llama_are_ignored_and_told() -> None:
    config = base()
    config["model"]["model_config"]["attention_bias"] = True
    configuration = reread(config)
    assert ids(configuration) == ["attention-bias-ignored"]
    assert configuration.model is not None
    assert configuration.model.bias == BiasSpec()


def test_launch_scripts_are_looked_at() -> None:
    """Processes a node, the number of processes, and the variable that tensor parallelism asserts."""
    files = render_plan(CASES["nanotron-pipeline"].document)
    script = files["launch.sh"]
    good = {"c.yaml": files["nanotron.yaml"], "launch.sh": script}
    assert read_configuration(good).gpus_per_node == 8
    without = script.replace("export CUDA_DEVICE_MAX_CONNECTIONS=1", "")
    assert ids(read_configuration({**good, "launch.sh": without})) == ["one-hardware-queue"]
    fewer = script.replace("--nnodes 16", "--nnodes 8")
    (finding,) = read_configuration({**good, "launch.sh": fewer}).findings
    assert finding.id == "world-size"
    assert "= 128, but the launch script starts 64 processes" in finding.message


def test_near_names_are_offered() -> None:
    """A misspelt key names the right one; a key of another section names its home."""
    config = base()
    config["tokens"]["sequence_lenght"] = 1
    config["parallelism"]["zero_stage"] = 1
    hints = {finding.hint for finding in reread(config).findings}
    assert hints == {"did you mean sequence_length?", "zero_stage belongs under optimizer"}


def test_doubled_keys_are_told_with_their_line() -> None:
    """YAML keeps the last of two equal keys and says nothing."""
    text = render_plan(CASES["nanotron-pipeline"].document)["nanotron.yaml"].replace("  tp: 8", "  tp: 4\n  tp: 8", 1)
    configuration = read_configuration({"c.yaml": text})
    (finding,) = configuration.findings
    line = next(number for number, content in enumerate(text.splitlines(), 1) if content.startswith("  tp: 8"))
    assert (finding.id, finding.where) == ("doubled-key", f"c.yaml:{line}")
    assert configuration.strategy.tp == 8


BROKEN = {
    "tab": "parallelism:\n\tdp: 1\ngeneral: {}\n",
    "open-bracket": "parallelism: {dp: [1\n",
    "bad-date": "parallelism: {dp: 2020-99-99}\ntokens: {}\n",
    "nul": "parallelism: \x00\n",
    "unhashable": "? [a]\n: b\nparallelism: {}\n",
    "deep": "parallelism: " + "[" * 5000,
    "tag": "parallelism: !!python/object/apply:os.system [echo]\n",
    "list": "- parallelism\n",
    "empty": "",
    "digits": f"parallelism: {{dp: {'9' * 5000}}}\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_unreadable_files_are_one_error(name: str) -> None:
    """Named as nanotron or not, the answer is an InputError that says which file."""
    for reader in (None, "nanotron-yaml"):
        with pytest.raises(InputError) as caught:
            read_configuration({"c.yaml": BROKEN[name]}, reader=reader)
        assert "c.yaml" in str(caught.value)


def test_recursive_yaml_ends() -> None:
    """A mapping that contains itself is read like any other."""
    text = "parallelism: &p {dp: 1, pp: 1, tp: 1, self: *p}\ntokens: {batch_accumulation_per_replica: 1}\n"
    assert "unknown-key" in ids(read_configuration({"c.yaml": text}))
    bomb = "a: &a [x, x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(24)
    )
    assert load_yaml("b", bomb).lines[("a",)] == 1


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((*path, key), *_paths(value[key], (*path, key)))]


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**9),
    st.floats(allow_nan=True),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
)


@given(st.data())
def test_any_value_anywhere_is_read(data: st.DataObject) -> None:
    """Whatever stands at any key, the file is read: findings, never a traceback."""
    config = base(data.draw(st.sampled_from(["nanotron-pipeline", "nanotron-context"])))
    for path in data.draw(st.lists(st.sampled_from(_paths(config)), min_size=1, max_size=3)):
        place: Any = config
        try:
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = data.draw(ODD)
        except (KeyError, IndexError, TypeError):
            continue
    text = yaml.safe_dump(config)
    assert read_configuration({"c.yaml": text}, reader="nanotron-yaml").backend == "nanotron"


@given(st.data())
def test_cut_and_damaged_texts_are_read_or_refused(data: st.DataObject) -> None:
    """Bytes lost or changed: a configuration or an InputError."""
    text = render_plan(CASES["nanotron-pipeline"].document)["nanotron.yaml"]
    at = data.draw(st.integers(0, len(text)))
    damaged = text[:at] + data.draw(st.text(max_size=8)) + text[at + data.draw(st.integers(0, 200)) :]
    with contextlib.suppress(InputError):
        assert read_configuration({"c.yaml": damaged}, reader="nanotron-yaml").backend == "nanotron"


def test_other_formats_are_left_alone() -> None:
    """A YAML file with a section of this name belongs to nanotron only with its other sections."""
    for text in ("parallelism: {tp: 2}\n", "parallelism: 4\ndata_stages: []\n", "model: {model_config: {}}\n"):
        with pytest.raises(InputError, match="no training configuration"):
            read_configuration({"c.yaml": text})


def test_the_model_is_read_at_its_size() -> None:
    configuration = read(CASES["nanotron-all-forward"].document)
    assert configuration.model is not None
    assert (configuration.model.layers, configuration.model.vocab) == (LLAMA_8B.layers, LLAMA_8B.vocab)
