"""ds_config.json in the planner's words: plans come back as they were, and everything doubtful is a finding."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.backends.deepspeed import DeepSpeed
from planner.backends.deepspeed_rules import balanced
from planner.errors import InputError
from planner.reading import Configuration, StatedStrategy, read_configuration
from planner.reading.deepspeed.reader import DeepSpeedReader, read_deepspeed
from planner.render import render_plan
from planner.specs.finding import Finding
from planner.specs.job import Job
from planner.specs.plan import PlanDocument
from planner.specs.strategy import Offload, Recompute
from tests.golden.plans import CASES, case_names
from tests.random_plans import corner_plans, random_plans

SMALL = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}}
HOSTFILE = "worker-0 slots=8\nworker-1 slots=8\n"


def read(config: object, **others: str) -> Configuration:
    """The configuration of one JSON value (or text), with other files by name: ``hostfile=...``, ``setup=...``."""
    files = {"ds_config.json": config if isinstance(config, str) else json.dumps(config, indent=2)}
    files |= {"parallel_setup.py" if name == "setup" else name: text for name, text in others.items()}
    return read_configuration(files, reader="deepspeed-json")


def found(configuration: Configuration, id: str) -> Finding:  # noqa: A002
    """The first finding of that id."""
    matching = [finding for finding in configuration.findings if finding.id == id]
    assert matching, [finding.id for finding in configuration.findings]
    return matching[0]


# --- Round trip


def assert_comes_back(document: PlanDocument, launcher: str = "torchrun") -> None:
    strategy, job = document.best.strategy, document.request.job
    files = render_plan(document, launcher=launcher)
    del files["plan.json"], files["README.md"]
    assert DeepSpeedReader().recognises(files)
    configuration = read_configuration(files)
    stated = configuration.strategy
    wanted = {field.name: getattr(strategy, field.name) for field in fields(StatedStrategy)}
    # Follows from model and stages (PipelineModule), and no key says that there is no second copy.
    assert strategy.layers_per_stage in ((), balanced(document.request.model.layers, strategy.pp))
    wanted["layers_per_stage"] = None
    assert {name: getattr(stated, name) for name in wanted} == wanted
    assert (configuration.gpus, configuration.gpus_per_node) == (strategy.gpus, document.request.cluster.local_gpus)
    assert (configuration.global_batch, configuration.precision) == (strategy.global_batch, strategy.precision)
    assert configuration.seq_len in (None, job.seq_len)
    assert configuration.flash_attention in (None, job.flash_attention)
    # Sizes of buffers are stated, and priced as a plan's (tests/property/test_round_trip.py).
    assert set(configuration.habits) <= {"reduce_bucket", "gathered_parameters"}
    assert configuration.findings == ()
    assert configuration.backend == "deepspeed"


def test_random_plans_come_back() -> None:
    """Every field of 150 plans over the whole space, without a finding."""
    for document in random_plans("deepspeed", 150, seed=2):
        assert_comes_back(document)


def test_corner_plans_come_back() -> None:
    """The corners of every question."""
    documents = list(corner_plans("deepspeed"))[::3]
    assert len(documents) > 100
    for document in documents:
        assert_comes_back(document, "slurm")


@pytest.mark.parametrize("name", case_names("deepspeed"))
def test_golden_plans_come_back(name: str) -> None:
    """The plans whose files are compared byte by byte."""
    assert_comes_back(CASES[name].document)


# --- Batch sizes


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ({"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2}, (2, 8, 16, 256)),
        ({"train_batch_size": 256, "gradient_accumulation_steps": 4}, (4, 4, 16, 256)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, (2, 4, 16, 128)),
        ({"train_micro_batch_size_per_gpu": 2}, (2, 1, 16, 32)),
        ({"train_batch_size": 256}, (16, 1, 16, 256)),
        ({"train_batch_size": 256.0, "train_micro_batch_size_per_gpu": 2}, (2, 8, 16, 256)),
    ],
)
def test_any_two_sizes_give_the_third(sizes: dict[str, Any], wanted: tuple[int, ...]) -> None:
    """As DeepSpeed completes them, for 16 GPUs of a hostfile."""
    configuration = read(sizes | {"zero_optimization": {"stage": 2}}, hostfile=HOSTFILE)
    s = configuration.strategy
    assert (s.micro_batch, s.grad_accum, s.dp, configuration.global_batch) == wanted


def test_three_sizes_give_the_gpus() -> None:
    """Without a hostfile the replicas follow; tensor-parallel ranks of AutoTP count as replicas."""
    three = SMALL | {"train_batch_size": 64}
    assert (read(three).gpus, read(three).strategy.dp) == (8, 8)
    tensor = read(three | {"tensor_parallel": {"autotp_size": 4}, "zero_optimization": {"stage": 1}})
    assert (tensor.gpus, tensor.strategy.dp, tensor.global_batch) == (8, 2, 16)
    found(tensor, "autotp-batch")


def test_seven_replicas_do_not_divide_the_batch() -> None:
    """OpenRLHF#346: 256 != 2 * 18 * 7, after one of eight GPUs went to the rollout engine."""
    config = {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 18}
    finding = found(read(config, hostfile="a slots=7\n"), "batch-mismatch")
    assert finding.severity == "error"
    assert "256" in finding.message
    assert "252" in finding.message
    assert "252 or 504" in finding.allowed
    assert finding.where == "ds_config.json:2: train_batch_size"


def test_a_pipeline_of_one_stage_still_refuses_zero_3() -> None:
    """Megatron-DeepSpeed#474: a PipelineModule is built all the same."""
    configuration = read(SMALL | {"zero_optimization": {"stage": 3}}, setup="PIPELINE_STAGES = 1\n")
    finding = found(configuration, "pipeline-zero-stage")
    assert finding.severity == "error"
    assert "without PipelineModule" in finding.hint


# --- Files as people write them

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
    },
}


def test_auto_names_the_arguments_that_it_needs() -> None:
    """Nothing is guessed: sizes and format stay open, and each key says which argument fills it."""
    configuration = read(AUTO)
    s = configuration.strategy
    assert (s.zero_stage, s.offload) == (3, Offload(optimizer=1.0, device="cpu", parameters="cpu"))
    assert (s.micro_batch, s.grad_accum, configuration.global_batch, configuration.precision) == (None,) * 4
    needs = {f.where.split(": ")[1]: f.allowed for f in configuration.findings if f.id == "auto-needs-arguments"}
    assert needs["train_micro_batch_size_per_gpu"] == "filled in from per_device_train_batch_size"
    assert needs["bf16.enabled"] == "filled in from bf16"
    assert "hidden size" in needs["zero_optimization.reduce_bucket_size"]
    assert len(needs) == 8
    assert "train_batch_size = auto" in configuration.unread


def test_auto_with_arguments() -> None:
    """TrainingArguments fill it in, with their defaults where they are silent; bucket sizes follow the model."""
    arguments = {"per_device_train_batch_size": 4, "bf16": True, "gradient_checkpointing": True}
    configuration = read_deepspeed(AUTO, arguments=arguments, where="ds.json", gpus=16)
    s = configuration.strategy
    assert (s.micro_batch, s.grad_accum, s.dp, s.pp, configuration.global_batch) == (4, 1, 16, 1, 64)
    assert (configuration.precision, s.recompute) == ("bf16", Recompute(mode="full"))
    assert [f.id for f in configuration.findings if f.severity != "note"] == []
    assert any("reduce_bucket_size = auto: follows the model" in entry for entry in configuration.unread)


def test_values_that_differ_from_the_arguments() -> None:
    """Trainer stops where the file and its own argument disagree, defaults included."""
    config = SMALL | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "eps": "auto"}}}
    configuration = read_deepspeed(config, arguments={"per_device_train_batch_size": 2}, where="ds.json", gpus=8)
    mismatched = {f.where for f in configuration.findings if f.id == "arguments-mismatch"}
    assert mismatched == {
        "ds.json: gradient_accumulation_steps",
        "ds.json: bf16.enabled",
        "ds.json: optimizer.params.lr",
    }


OLD = """{
  # sizes of last year
  "train_batch_size": 100, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 7,
  "zero_optimization": {
    "stage": 2,
    "cpu_offload": true,
    "reduce_bucket_size": 2e8,
    "allgather_bucket_size": "200000000",
  },
  "optimizer": {"type": "AdamW", "params": {"lr": "3e-4"}},
  "pipeline": {"stages": 2},
  "wall_clock_breakdown": "false"
}
"""


def test_an_old_file_with_many_slips() -> None:
    """Each slip has its finding with its line, and what was meant is read all the same."""
    configuration = read(OLD)
    s = configuration.strategy
    assert (s.zero_stage, s.pp, s.micro_batch, s.grad_accum) == (2, 2, 3, 7)
    assert s.offload == Offload(optimizer=1.0, device="cpu")
    assert {(f.id, f.severity, int(f.where.split(":")[1])) for f in configuration.findings if f.severity != "note"} == {
        ("json-comment", "warning", 2),
        ("json-trailing-comma", "warning", 8),
        ("batch-mismatch", "error", 3),
        ("legacy-key", "warning", 6),
        ("wrong-type", "warning", 8),
        ("wrong-type", "error", 10),
        ("pipeline-stages-ignored", "error", 11),
        ("pipeline-zero-stage", "error", 5),
        ("wrong-type", "error", 12),
    }
    assert "zero_optimization.allgather_bucket_size = 200000000" in configuration.unread


@pytest.mark.parametrize(
    ("patch", "id", "hint"),
    [
        ({"zero_optimisation": {"stage": 2}}, "ignored-key", "zero_optimization"),
        ({"gradient_acumulation_steps": 4}, "ignored-key", "gradient_accumulation_steps"),
        ({"zero_optimization": {"stage3_prefetch_bucket": 5}}, "unknown-key", "stage3_prefetch_bucket_size"),
        ({"zero_optimization": {"cpu_offload_params": True}}, "unknown-key", "offload_param"),
        ({"elasticity": {}}, "removed-key", "batch sizes"),
        ({"zero_optimization": {"mics_shard_size": 8}}, "removed-key", "zero_hpz_partition_size"),
        ({"bfloat16": {"enabled": True}}, "legacy-key", "bf16"),
        ({"zero_optimization": True}, "legacy-key", '"stage": 1'),
        ({"optimizer": {"params": {"max_grad_norm": 1}}}, "max-grad-norm", "gradient_clipping"),
        ({"data_types": {"grad_accum_dtyp": "fp32"}}, "ignored-key", "grad_accum_dtype"),
    ],
)
def test_keys_that_are_gone_or_misspelt(patch: dict[str, Any], id: str, hint: str) -> None:  # noqa: A002
    """The hint says what to write instead; a remark is no slip."""
    assert not {"ignored-key"} & {finding.id for finding in read(SMALL | {"_comment": "a", "comment": "b"}).findings}
    assert hint in found(read(SMALL | patch), id).hint


@pytest.mark.parametrize(
    ("zero", "wanted", "id"),
    [
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}, Offload(optimizer=0.3, device="cpu"), ""),
        (
            {
                "stage": 3,
                "offload_optimizer": {"device": "nvme"},
                "offload_param": {"device": "nvme", "nvme_path": "/n"},
            },
            Offload(optimizer=1.0, device="nvme", parameters="nvme"),
            "nvme-path",
        ),
        (
            {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}},
            Offload(optimizer=1.0, device="cpu"),
            "offload-partial",
        ),
        (
            {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}},
            Offload(optimizer=1.0, device="cpu"),
            "offload-nvme",
        ),
        ({"stage": 1, "offload_param": {"device": "cpu"}}, Offload(), "offload-parameters"),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, Offload(), "offload-needs-zero"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0}}, Offload(), ""),
        ({"stage": 3, "offload_optimizer": {"device": "gpu"}}, None, "offload-device"),
        ({"stage": 3, "offload_optimizer": None}, Offload(), ""),
    ],
)
def test_offload_is_what_really_leaves_the_gpu(zero: dict[str, Any], wanted: Offload | None, id: str) -> None:  # noqa: A002
    """Settings without effect are no offload, but a finding with the id of the rule."""
    configuration = read(SMALL | {"zero_optimization": zero})
    assert configuration.strategy.offload == wanted
    errors = {finding.id for finding in configuration.findings if finding.severity == "error"}
    assert errors == ({id} if id else set())


def test_habits_that_differ_from_a_plan() -> None:
    """Overlap and the format of the reduction can be put in the place of the backend's habits."""
    zero = {"stage": 2, "overlap_comm": True}
    configuration = read(SMALL | {"zero_optimization": zero, "communication_data_type": "fp32"})
    habits = replace(DeepSpeed.habits, **configuration.habits)
    assert habits.overlapped_stages == (2, 3)
    assert habits.gradient_reduce_bytes(Job(seq_len=1, global_batch=1)) == 4.0
    off = read(SMALL | {"zero_optimization": {"stage": 3, "overlap_comm": False}})
    sizes = {"reduce_bucket": 500_000_000.0, "gathered_parameters": 1_000_000_000.0}
    assert off.habits == {"overlapped_stages": (), "accumulates_in_fp32": False} | sizes


def test_a_pipeline_overlaps_nothing() -> None:
    """DeepSpeed switches overlap_comm off, and no bucket is held; stage 0 in bf16 is stage 1 in truth."""
    zero = {"stage": 1, "overlap_comm": True}
    configuration = read(SMALL | {"zero_optimization": zero}, setup="PIPELINE_STAGES = 4\n")
    assert set(configuration.habits) == {"optimizer_temporary", "accumulates_in_fp32"}
    found(configuration, "overlap-with-pipeline")
    bare = read(SMALL, setup="PIPELINE_STAGES = 4\n")
    assert found(bare, "pipeline-zero-stage").severity == "warning"


def test_formats() -> None:
    """One format, none (fp32), both (open), autocast over fp32 weights (open and listed)."""
    sizes = {"train_micro_batch_size_per_gpu": 1}
    on = {"enabled": True}
    assert read(sizes | {"fp16": on}).precision == "fp16"
    assert read(sizes | {"bfloat16": on}).precision == "bf16"
    assert read(sizes).precision == "fp32"
    assert read(sizes | {"fp16": on, "bf16": on}).precision is None
    autocast = read(sizes | {"torch_autocast": on | {"dtype": "bfloat16"}})
    assert autocast.precision is None
    assert "torch_autocast = {...}" in autocast.unread


def test_autoep_is_read_with_what_it_excludes() -> None:
    """Expert ranks are read; whether plans use them is for the rules."""
    experts = {"enabled": True, "autoep_size": 4, "expert_tensor_parallel_size": 2}
    configuration = read(SMALL | {"expert_parallel": experts, "zero_optimization": {"stage": 3}})
    assert (configuration.strategy.ep, configuration.strategy.etp) == (4, 2)
    assert "must be 1" in found(configuration, "autoep").message


def test_python_is_never_run_and_computed_constants_stay_open() -> None:
    """Only literals are taken; a program with an effect has none."""
    setup = 'import os\nos.abort()\nPIPELINE_STAGES = 2 + 2\nRECOMPUTE: str = "full"\nSEQUENCE_RANKS = 4\n'
    configuration = read(SMALL, setup=setup)
    assert configuration.strategy.recompute == Recompute(mode="full")
    assert configuration.strategy.cp == 4
    assert "parallel_setup.py:3: PIPELINE_STAGES is computed" in configuration.unread


@pytest.mark.parametrize(
    ("hostfile", "gpus", "per_node", "id"),
    [
        ("# nodes\na slots=4\nb slots=4\n", 8, 4, None),
        ("a slots=4\nb slots=8\n", 12, None, "uneven-slots"),
        ("a slots=4\na slots=4\n", 4, 4, "hostfile"),
        ("a\n", None, None, "hostfile"),
        ("", None, None, None),
    ],
)
def test_hostfile(hostfile: str, gpus: int | None, per_node: int | None, id: str | None) -> None:  # noqa: A002
    """Slots are counted as the launcher counts them; what it refuses is a finding."""
    configuration = read(SMALL, hostfile=hostfile)
    assert (configuration.gpus, configuration.gpus_per_node) == (gpus, per_node)
    if id:
        found(configuration, id)


def test_degrees_that_do_not_fill_the_gpus() -> None:
    """Stages, ranks and hosts that contradict each other."""
    config = SMALL | {"tensor_parallel": {"autotp_size": 3}}
    assert "16 GPUs" in found(read(config, hostfile=HOSTFILE), "gpus-not-divisible").message
    found(read(config, setup="TENSOR_RANKS = 2\n"), "tensor-ranks-contradict")
    found(read(SMALL, setup="MICRO_BATCH = 1\n"), "micro-batch-contradicts")


@pytest.mark.parametrize(
    "text",
    [
        '{"per_device_train_batch_size": 1, "bf16": true, "output_dir": "x"}',
        '{"hidden_size": 4096, "num_hidden_layers": 32}',
        "[1, 2]",
        "{}",
        "not JSON",
    ],
)
def test_other_files_are_not_taken(text: str) -> None:
    """Training arguments, a model's config.json, anything else."""
    assert not DeepSpeedReader().recognises({"config.json": text})


def test_a_misspelt_section_is_still_recognised() -> None:
    """The sizes and formats remain."""
    assert DeepSpeedReader().recognises({"x.json": json.dumps(SMALL | {"zero_optimisation": {}})})
    assert DeepSpeedReader().recognises({"x.json": '{"zero_optimization": {"stage": 1'})


def test_a_script_that_writes_a_configuration_is_none() -> None:
    """Launch scripts of Megatron-DeepSpeed hold one in a here-document."""
    script = '#!/bin/bash\ncat > ds.json <<EOF\n{\n  "zero_optimization": {"stage": 1}\n}\nEOF\n'
    assert not DeepSpeedReader().recognises({"launch": script})


# --- Anything at all

ODD: st.SearchStrategy[object] = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        3,
        7,
        0.5,
        1e9,
        1e300,
        10**400,
        "",
        "auto",
        "2",
        "true",
        "cpu",
        "\ud800",
        [],
        {},
        [1],
    ]
)
NAMES = st.sampled_from(
    [
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization",
        "stage", "fp16", "bf16", "bfloat16",
        "enabled", "optimizer", "params", "lr",
        "type", "offload_optimizer", "offload_param", "device",
        "ratio", "tensor_parallel", "autotp_size", "expert_parallel",
        "autoep_size", "expert_tensor_parallel_size", "pipeline", "stages",
        "activation_checkpoint_interval", "data_types", "grad_accum_dtype", "cpu_offload",
        "cpu_offload_param", "communication_data_type", "overlap_comm", "zero_hpz_partition_size",
        "sequence_parallel_size", "elasticity", "activation_checkpointing", "gradient_allreduce_op",
        "compute_grad_norm",
    ]
)  # fmt: skip
TREES = st.recursive(ODD, lambda inner: st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=6), max_leaves=25)
SETUPS = st.text(max_size=60) | st.lists(
    st.tuples(
        st.sampled_from(
            ["PIPELINE_STAGES", "TENSOR_RANKS", "SEQUENCE_RANKS", "RECOMPUTE", "ATTENTION", "DATA_PARALLEL"]
        ),
        st.sampled_from(["0", "1", "4", "-2", "10**9", '"full"', "'x'", "None", "1.5", "f()", "("]),
    ).map(" = ".join),
    max_size=4,
).map("\n".join)


def printable(configuration: Configuration) -> None:
    """Every text can be written to a terminal or a file."""
    for finding in configuration.findings:
        f"{finding.message}{finding.where}{finding.allowed}{finding.hint}".encode()
    "".join(configuration.unread).encode()


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(NAMES, TREES, max_size=8), SETUPS, st.text(max_size=40) | st.just(HOSTFILE))
def test_any_values_give_a_configuration_or_an_error(config: dict[str, Any], setup: str, hostfile: str) -> None:
    """Known keys with any values, any Python and any hosts beside them."""
    with suppress(InputError):
        printable(read(config, setup=setup, hostfile=hostfile))
    printable(read_deepspeed(config, arguments=None, where="x"))
    printable(read_deepspeed(config, arguments={"bf16": "auto", "gradient_accumulation_steps": []}, where="x", gpus=8))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_file_gives_a_configuration_or_an_error(data: st.DataObject) -> None:
    """A good file with a stretch of it cut, doubled or overwritten."""
    text = json.dumps(AUTO | SMALL, indent=1)
    start, end = sorted(data.draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
    middle = data.draw(
        st.sampled_from(["", text[start:end] * 2, '"', "}", ",", "\n#", "1e99", "\x00"]) | st.text(max_size=5)
    )
    damaged = {"ds_config.json": text[:start] + middle + text[end:]}
    DeepSpeedReader().recognises(damaged)
    with suppress(InputError):
        printable(read_configuration(damaged, reader="deepspeed-json"))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["ds_config.json", "a.py", "hostfile", "run.sh", "x"]), st.text(), max_size=4))
def test_any_files_give_a_configuration_or_an_error(files: dict[str, str]) -> None:
    """Whatever is handed over, recognised or named."""
    for reader in (None, "deepspeed-json"):
        with suppress(InputError):
            printable(read_configuration(files, reader=reader))
