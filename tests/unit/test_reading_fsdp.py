"""The FSDP2 module read back: the round trip of rendered plans, edited constants, and what cannot be read."""

from __future__ import annotations

import contextlib
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InputError
from planner.reading import Configuration, read_configuration
from planner.reading.fsdp.module import NAMES, read_constants
from planner.render import render_plan
from planner.specs.plan import PlanDocument
from planner.specs.strategy import Offload, Recompute
from tests.golden.plans import CASES
from tests.random_plans import configuration_files, corner_plans, random_plans


def read(document: PlanDocument) -> Configuration:
    """The configuration in the rendered files, without plan and guide."""
    return read_configuration(configuration_files(document))


def check_round_trip(document: PlanDocument) -> None:
    configuration, wanted = read(document), document.best.strategy
    stated = {name: value for name, value in vars(configuration.strategy).items() if value is not None}
    if wanted.zero_stage == 2 and wanted.shard_degree == 1 and wanted.offload.device == "none":
        # Weights kept by a group of one GPU are weights not sharded: the module is the same, text for text.
        wanted = wanted.model_copy(update={"zero_stage": 0})
    following = {"secondary_shard_degree"} | ({"layers_per_stage"} if configuration.model is None else set())
    assert vars(configuration.strategy).keys() - stated.keys() == following
    for name, value in stated.items():
        assert value == getattr(wanted, name), name
    assert configuration.backend == "fsdp"
    assert configuration.gpus == wanted.gpus
    assert configuration.gpus_per_node == document.request.cluster.local_gpus
    assert (configuration.seq_len, configuration.global_batch) == (wanted.seq_len, wanted.global_batch)
    assert configuration.precision == wanted.precision
    assert (configuration.findings, configuration.unread, dict(configuration.habits)) == ((), (), {})


def test_round_trip_of_random_plans() -> None:
    """What is written is what is read."""
    for document in random_plans("fsdp", 150, seed=4):
        check_round_trip(document)


def test_round_trip_of_corner_plans() -> None:
    """Every degree, stage, recomputation, offload and micro-batch that legal plans have."""
    for document in islice(corner_plans("fsdp"), 0, None, 2):
        check_round_trip(document)


def test_dimensions_come_from_the_example() -> None:
    """The script beside the module holds the model; without it, or with a model it cannot build, there is none."""
    files = render_plan(CASES["fsdp-tensor"].document)
    model = read_configuration(files).model
    assert model is not None
    assert (model.layers, model.kv_heads, model.vocab, model.tied) == (32, 8, 128256, False)
    assert read_configuration({"parallelize.py": files["parallelize.py"]}).model is None
    other = {**files, "example_train.py": 'DIMENSIONS = {"layers": "many"}\n'}
    assert read_configuration(other).unread == ("example_train.py: DIMENSIONS",)


def edited(*changes: tuple[str, str], name: str = "fsdp-hybrid") -> dict[str, str]:
    """The module of a golden case, with assignments replaced."""
    text = render_plan(CASES[name].document)["parallelize.py"]
    for constant, statement in changes:
        lines = text.splitlines()
        place = next(i for i, line in enumerate(lines) if line.startswith(f"{constant} = "))
        lines[place] = statement
        text = "\n".join(lines) + "\n"
    return {"parallelize.py": text}


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("MICRO_BATCH = 4", 4),
        ("MICRO_BATCH: int = 2 * 3", 6),
        ("MICRO_BATCH = 2**3 - 1", 7),
        ("MICRO_BATCH = (1 << 2)", None),
        ("MICRO_BATCH = 1_0 // 3", 3),
        ("MICRO_BATCH = TP + CP", 5),
        ('MICRO_BATCH = int(os.environ["MICRO"])', None),
        ("MICRO_BATCH = 2**60", None),
        ("MICRO_BATCH = 9 // 0", None),
    ],
)
def test_values_of_edited_constants(statement: str, expected: int | None) -> None:
    """Numbers, their arithmetic and other constants are read; anything else is listed, and nothing is executed."""
    configuration = read_configuration(edited(("MICRO_BATCH", statement)))
    assert configuration.strategy.micro_batch == expected
    assert configuration.unread == (("MICRO_BATCH",) if expected is None else ())
    assert (configuration.global_batch is None) == (expected is None)


@pytest.mark.parametrize(
    "statement",
    ["MICRO_BATCH = 1\nMICRO_BATCH *= 2", "if TP:\n    MICRO_BATCH = 3", "MICRO_BATCH, x = 1, 2", "del MICRO_BATCH"],
)
def test_constants_that_other_statements_change_are_unread(statement: str) -> None:
    configuration = read_configuration(edited(("MICRO_BATCH", statement)))
    assert (configuration.strategy.micro_batch, configuration.unread) == (None, ("MICRO_BATCH",))


def test_local_names_of_functions_are_no_constants() -> None:
    """A function's own variable leaves the constant alone; a global statement does not."""
    text = edited()["parallelize.py"]
    local = read_constants("p.py", text + "\n\ndef f():\n    TP = 3\n")
    assert local.values["TP"] == 1
    shared = read_constants("p.py", text + "\n\ndef f():\n    global TP\n    TP = 3\n")
    assert "TP" in shared.unread


def test_a_second_assignment_counts_and_is_told() -> None:
    configuration = read_configuration(edited(("CP", "CP = 2\nCP = 4")))
    assert configuration.strategy.cp == 4
    assert [finding.id for finding in configuration.findings] == ["assigned-twice"]


@pytest.mark.parametrize(
    ("constant", "statement", "finding"),
    [
        ("TP", "TP = 0", "wrong-type"),
        ("TP", "TP = True", "wrong-type"),
        ("TP", "TP = None", "wrong-type"),
        ("RESHARD_AFTER_FORWARD", "RESHARD_AFTER_FORWARD = 1", "wrong-type"),
        ("PRECISION", 'PRECISION = "float16"', "precision"),
        ("RECOMPUTE", "RECOMPUTE = None", "recompute-mode"),
        ("GRAD_ACCUM", "", "missing-constant"),
        ("SEQUENCE_PARALLEL", "SEQUENCE_PARALLEL = True", "sequence-parallel-needs-tp"),
        ("LOSS_PARALLEL", "LOSS_PARALLEL = True", "loss-parallel-needs-tp"),
    ],
)
def test_findings(constant: str, statement: str, finding: str) -> None:
    """Each with the line where it stands, unless the line is missing."""
    (found,) = read_configuration(edited((constant, statement))).findings
    assert found.id == finding
    assert found.where.startswith("parallelize.py" + (":" if statement else ""))


def test_a_whole_loss_is_a_habit() -> None:
    """With tensor parallelism a plan splits the logits; an edit that does not is priced as it is."""
    configuration = read_configuration(edited(("LOSS_PARALLEL", "LOSS_PARALLEL = False"), name="fsdp-tensor"))
    assert configuration.habits == {"loss_vocab_parallel": False}


def test_edits_of_the_strategy() -> None:
    """Every switch that the module has."""
    s = read_configuration(
        edited(
            ("RESHARD_AFTER_FORWARD", "RESHARD_AFTER_FORWARD = True"),
            ("CPU_OFFLOAD", "CPU_OFFLOAD = True"),
            ("RECOMPUTE", 'RECOMPUTE = "selective"'),
            ("RECOMPUTE_LAYERS", "RECOMPUTE_LAYERS = None"),
        )
    ).strategy
    assert s.zero_stage == 3
    assert s.offload == Offload(optimizer=1.0, parameters="cpu", device="cpu")
    assert s.recompute == Recompute(mode="selective", modules=("attention", "every-second-matmul"))


def test_selective_blocks_are_listed_as_not_modelled() -> None:
    configuration = read_configuration(edited(("RECOMPUTE", 'RECOMPUTE = "selective"')))
    assert configuration.unread == ("RECOMPUTE_LAYERS (selective recomputation is modelled for all blocks)",)


def test_a_script_that_starts_other_processes_is_told() -> None:
    """fsdp-hybrid has 16 GPUs."""
    script = {"launch.sh": "torchrun --standalone --nproc-per-node 8 example_train.py\n"}
    (found,) = read_configuration({**edited(), **script}).findings
    assert (found.id, found.allowed) == ("world-size", "degrees whose product is 8")


@pytest.mark.parametrize(
    "text", ["TP = = 1", "TP = 1\n\x00", "(" * 3000, "def f(:\n"], ids=["syntax", "nul", "deep", "def"]
)
def test_what_is_no_python_is_one_error(text: str) -> None:
    marks = "\n".join(f"{name} = 1" for name in NAMES) + "\nfully_shard\n"
    with pytest.raises(InputError, match="not Python") as caught:
        read_configuration({"parallelize.py": marks + text})
    assert caught.value.where is not None
    assert caught.value.where.startswith("parallelize.py")


def test_other_modules_are_refused_with_the_names() -> None:
    """A training script of one's own is not this module, whoever says so."""
    files = {"train.py": "import torch\n\nTENSOR = 2\n"}
    with pytest.raises(InputError, match="no training configuration"):
        read_configuration(files)
    with pytest.raises(InputError, match="none of the constants") as caught:
        read_configuration(files, reader="fsdp-module")
    assert "DP_REPLICATE" in str(caught.value.allowed)


@given(st.data())
def test_damaged_modules_are_read_or_refused(data: st.DataObject) -> None:
    """Text lost or changed anywhere: a configuration or an InputError, never a traceback."""
    text = edited()["parallelize.py"]
    at = data.draw(st.integers(0, min(len(text), 4000)))
    damaged = text[:at] + data.draw(st.text(max_size=8)) + text[at + data.draw(st.integers(0, 60)) :]
    with contextlib.suppress(InputError):
        assert read_configuration({"p.py": damaged}, reader="fsdp-module").backend == "fsdp"


@given(
    constant=st.sampled_from(NAMES), value=st.one_of(st.text(max_size=12), st.integers(), st.floats(), st.booleans())
)
def test_any_constant_may_hold_anything(constant: str, value: object) -> None:
    """Values of every type, and text that is not even an expression."""
    for written in (repr(value), str(value).replace("\n", " ")):
        with contextlib.suppress(InputError):
            assert read_configuration(edited((constant, f"{constant} = {written}"))).backend == "fsdp"
