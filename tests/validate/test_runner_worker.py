"""The program of one process: what it leaves behind when it is done, and when it cannot go on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from planner.specs.strategy import Offload
from planner.specs.validation import RankFailure, RankResult
from tests.validate.launch import torchrun
from tests.validate.runner_cases import CASES, DENSE, configuration, strategy

torch = pytest.importorskip("torch", reason="needs torch (the validate extra)")
pytestmark = pytest.mark.torch

from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from planner_validate.trainer.job_log import group_lines  # noqa: E402
from planner_validate.trainer.layout import Layout, make_layout, unsupported  # noqa: E402
from planner_validate.trainer.worker import Post, kind_of, module_of, report  # noqa: E402


def start(folder: Path, case: str, processes: int) -> str:
    """Run the worker; results lie in ``folder``."""
    config = folder / "run.json"
    config.write_text(configuration(case).model_dump_json(), encoding="utf-8")
    out = str(folder / "results")
    return torchrun(processes, "-m", "planner_validate.trainer.worker", "--config", str(config), "--out", out).stdout


def printed(output: str) -> list[str]:
    """What rank 0 says, without measured figures."""
    lines = re.findall(r"^\[planner\] (.*)$", output, re.MULTILINE)
    return [
        re.sub(
            r": [0-9.]+ m?s, loss \d+\.\d{4}$", ": <time>, loss <number>", re.sub(r"by [0-9.e-]+", "by <number>", line)
        )
        for line in lines
    ]


def test_results_of_a_run(tmp_path: Path) -> None:
    """Every rank leaves its steps, memory, collectives with their times, and the same gradient check."""
    output = start(tmp_path, "fsdp", 4)
    results = tmp_path / "results"
    config = configuration("fsdp")
    assert printed(output) == [
        "4 ranks joined: dense",
        "groups dp_shard 4 (weights, gradients and optimizer states): [0, 1, 2, 3]",
        f"every rank writes its results to {results}",
        "gradient check passed: they differ from the unsharded model's by <number>, 1e-04 is allowed",
        f"warm-up step 1 of {config.warmup_steps}: <time>, loss <number>",
        *(
            f"step {step + 1} of {config.measured_steps}: <time>, loss <number>"
            for step in range(config.measured_steps)
        ),
        f"done: `planner validate plan.json --results {results}` compares with the plan",
    ], output[-3000:]
    names = {path.name for path in results.iterdir()}
    assert names >= {f"rank-{rank}.{kind}" for rank in range(4) for kind in ("json", "phase")}, output[-3000:]
    assert not any(name.endswith(("failure.json", ".part")) for name in names)
    for rank in range(4):
        found = RankResult.model_validate_json((results / f"rank-{rank}.json").read_text("utf-8"))
        assert (found.rank, found.world_size, found.coordinates["dp"]) == (rank, 4, rank)
        assert (len(found.warmup), len(found.steps)) == (1, configuration("fsdp").measured_steps)
        assert all(step.seconds == step.forward_backward_s + step.optimizer_s for step in found.steps)
        assert found.gradients is not None
        assert found.gradients.passed
        assert sum(found.memory.values()) == found.peak_allocated_bytes
        assert found.parameters == found.memory["weights"] // 4
        assert {use.operation for use in found.collectives} == {"all_gather", "all_reduce", "reduce_scatter"}
        assert all(use.seconds is not None and use.seconds > 0 for use in found.collectives)
        assert (results / f"rank-{rank}.phase").read_text("utf-8") == "leaving the process group\n"


def test_another_number_of_processes(tmp_path: Path) -> None:
    """A plan for four processes started on two says so and measures nothing; the launcher may end a rank before it can
    speak."""
    output = start(tmp_path, "fsdp", 2)
    results = tmp_path / "results"
    found = [RankFailure.model_validate_json(path.read_text("utf-8")) for path in results.glob("*.failure.json")]
    assert found, output[-3000:]
    for failure in found:
        assert (failure.kind, failure.phase) == ("mismatch", "start")
        assert "4 processes" in failure.message
        assert "2 were started" in failure.message
    assert not list(results.glob("rank-?.json"))


def formed(layout: Layout) -> dict[str, set[tuple[int, ...]]]:
    """The groups of the device meshes by axis, those of one rank left out."""
    found = {}
    for mesh in filter(None, (layout.weights, layout.experts, layout.sequences)):
        for index, (name, size) in enumerate(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)):
            rows = mesh.mesh.movedim(index, -1).reshape(-1, size).tolist()
            found[name] = {tuple(row) for row in rows} if size > 1 else set()
    return {name: groups for name, groups in found.items() if groups}


@pytest.mark.parametrize("case", CASES)
def test_the_groups_that_are_told(case: str) -> None:
    """Rank 0 prints the groups of which the meshes are made, in the words of the plan's README.md."""
    config = configuration(case)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=config.strategy.gpus)
    try:
        meshes = formed(make_layout(config))
    finally:
        torch.distributed.destroy_process_group()
    told = {
        line.partition(" (")[0].rpartition(" ")[0]: {
            tuple(json.loads(group)) for group in re.findall(r"\[[0-9, ]+\]", line)
        }
        for line in group_lines(config)
    }
    # The meshes have context and data ranks on one axis.
    beside = " x cp" if config.strategy.cp > 1 else ""
    sharded = config.strategy.zero_stage > 0
    same = [("tp", "tp"), ("cp", "cp"), ("pp", "pp"), ("ep", "ep")]
    same += [(f"dp_shard{beside if sharded else ''}", "shard"), (f"dp_replicate{'' if sharded else beside}", "replica")]
    assert set(told) <= {"edp", "dp_shard", "dp_replicate", *(mine for mine, _ in same)}
    for mine, theirs in same:
        assert told.get(mine) == meshes.get(theirs)


def test_many_groups_are_cut_short() -> None:
    """A log of thousands of ranks has a line an axis, not a rank."""
    config = configuration("ddp")
    large = config.model_copy(update={"strategy": config.strategy.model_copy(update={"dp": 512, "tp": 32})})
    tp, dp = (line.split("): ")[1] for line in sorted(group_lines(large), reverse=True))
    assert tp.startswith("[0, 1, 2, ..., 31] [32, 33, 34, ..., 63] ")
    assert tp.endswith(" and 496 more")
    assert dp.startswith("[0, 32, 64, ..., 16352] ")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "out-of-memory"),
        (MemoryError(), "out-of-memory"),
        (torch.OutOfMemoryError("CUDA out of memory."), "out-of-memory"),
        (RuntimeError("[gloo] Timed out waiting 1000ms for recv operation to complete"), "timeout"),
        (KeyboardInterrupt(), "interrupted"),
        (ValueError("a timeout of zero"), "error"),
    ],
)
def test_kinds_of_failures(error: BaseException, kind: str) -> None:
    """Exceptions are told apart by what happened."""
    assert kind_of(error) == kind


def test_a_failure_names_the_module(tmp_path: Path) -> None:
    """The innermost module whose forward pass raised is part of the phase."""
    broken = torch.nn.Identity()
    broken.forward = lambda _x: bytearray(1 << 62)
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Sequential(broken))
    post = Post(tmp_path, 3)
    post.phase("step 2")
    with pytest.raises(MemoryError) as raised:
        model(torch.ones(1))
    assert module_of(raised.value.__traceback__) == "1.0"
    report(post, 3, raised.value)
    failure = RankFailure.model_validate_json((tmp_path / "rank-3.failure.json").read_text("utf-8"))
    assert (failure.kind, failure.phase) == ("out-of-memory", "step 2, in 1.0")
    assert failure.message == "MemoryError()"


def test_a_failure_without_room_for_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that cannot be written leaves the cause on standard error."""
    report(Post(tmp_path / "absent", 1), 1, RuntimeError("the cause"))
    assert "the cause" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"zero_stage": 1, "shard_degree": 4}, "zero_stage(1)"),
        ({"pp": 2, "dp": 2, "layers_per_stage": (2, 2), "pipeline_schedule": "zb-h2"}, "zb-h2"),
        ({"tp": 4, "dp": 1, "sequence_parallel": True}, "kv_heads(2) % tp(4) = 2"),
        ({"ep": 4}, "experts(1) % ep(4) = 1"),
        ({"precision": "fp8"}, "precision fp8"),
        (
            {
                "pp": 4,
                "dp": 1,
                "layers_per_stage": (1, 1, 1, 1),
                "pipeline_schedule": "1f1b",
                "micro_batch": 4,
            },
            "micro-batches(2) of a step >= pp(4)",
        ),
        (
            {"pp": 2, "dp": 2, "vpp": 2, "layers_per_stage": (2, 0, 1, 1), "pipeline_schedule": "interleaved"},
            "layers_per_stage = [2, 0, 1, 1]",
        ),
        (
            {"pp": 2, "dp": 2, "vpp": 2, "layers_per_stage": (1, 1, 1, 1), "pipeline_schedule": "1f1b"},
            "schedule(1f1b) with pp(2) and vpp(2)",
        ),
        ({"cp": 2, "dp": 2, "seq_len": 34}, "seq_len(34) % (2 * cp(2)) = 2"),
        ({"offload": Offload(parameters="cpu")}, "optimizer share(0) on none, parameters on cpu"),
        ({"vpp": 2}, "pp(1) * vpp(2) = 2 entries"),
    ],
)
def test_refusals(changes: dict[str, object], words: str) -> None:
    """What cannot run is named before anything is allocated."""
    chosen, config = strategy(**{"dp": 4, **changes}), configuration("ddp")
    job = config.job.model_copy(update={"seq_len": chosen.seq_len, "precision": chosen.precision})
    config = config.model_copy(update={"strategy": chosen, "job": job})
    assert words in (unsupported(config) or "")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position": "alibi"}, "ALiBi"),
        ({"sinks": True}, "sinks"),
        ({"mtp_layers": 1}, "mtp_layers"),
        ({"norms_per_layer": 1}, "1 norms a layer"),
        ({"attention_gate": True}, "gate"),
    ],
)
def test_models_that_cannot_be_built(changes: dict[str, object], words: str) -> None:
    """Each part of a model that the runner does not know is named."""
    config = configuration("ddp").model_copy(update={"model": DENSE.model_copy(update=changes)})
    assert words in (unsupported(config) or "")


def test_a_batch_that_does_not_add_up() -> None:
    """A global batch that the micro-batches do not make up is refused."""
    config = configuration("ddp")
    wrong = config.strategy.model_copy(update={"global_batch": 9})
    assert "global_batch(9)" in (unsupported(config.model_copy(update={"strategy": wrong})) or "")


def test_all_cases_are_supported() -> None:
    """The tests' own plans are refused by nothing."""
    assert {case: unsupported(configuration(case)) for case in CASES} == dict.fromkeys(CASES)
