"""Memory of ranks without devices: the estimate of a large plan term by term, and the same figures as a real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.errors import InputError
from planner.service import ClusterInput, JobInput, StrategyInput, estimate
from planner.specs.plan import PlanDocument
from planner.specs.strategy import Strategy
from planner.units import MIB
from planner_validate.runs import memory_only, running
from planner_validate.runs.launching import Folder, launch, torchrun
from planner_validate.runs.memory_only import enough_micro_batches, observed_ranks
from planner_validate.runs.options import Options
from planner_validate.runs.plans import prepared

pytest.importorskip("torch", reason="ranks are traced with torch's fake tensors")
pytestmark = pytest.mark.torch

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}
SMALL = LLAMA | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
}
"""Five million parameters."""
WIDE = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
"""Llama-3-70B with a tenth of its layers."""


def plan(folder: Path, config: dict[str, object], gpus: int, strategy: StrategyInput, **job: object) -> PlanDocument:
    """A plan of the runner for GPUs or, with ``gpu``, for processors."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    gpu = str(job.pop("gpu", "h100"))
    given = {"seq_len": 8192, "global_batch": 4 * gpus} | job
    return estimate(str(path), ClusterInput(gpu=gpu, gpus=gpus), JobInput(**given), strategy, backend="pytorch")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "ranks"),
    [
        ({"dp": 8}, (0,)),
        ({"tp": 4, "pp": 2, "dp": 2}, (0, 8)),
        ({"tp": 4, "pp": 4, "dp": 8}, (0, 64, 96)),
    ],
)
def test_ranks_of_the_ends_and_the_middle(fields: dict[str, int], ranks: tuple[int, ...]) -> None:
    """Rank 0 of the first, a middle and the last stage, each once."""
    assert observed_ranks(Strategy(global_batch=1, seq_len=1, **fields)) == ranks  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"grad_accum": 1}, 1),
        ({"grad_accum": 64}, 2),
        ({"pp": 4, "pipeline_schedule": "1f1b", "grad_accum": 64}, 5),
        ({"pp": 4, "pipeline_schedule": "1f1b", "grad_accum": 4}, 4),
        ({"pp": 4, "vpp": 2, "pipeline_schedule": "interleaved", "grad_accum": 64}, 8),
        ({"pp": 4, "pipeline_schedule": "gpipe", "grad_accum": 64}, 64),
    ],
)
def test_micro_batches_until_the_peak(fields: dict[str, object], count: int) -> None:
    """The schedule is full once and gradients are there; a schedule that keeps everything is traced whole."""
    assert enough_micro_batches(Strategy(global_batch=64, seq_len=1, **fields)) == count  # type: ignore[arg-type]


def test_a_large_plan_term_by_term() -> None:
    """Llama-3-70B on 128 GPUs with tensor, pipeline and sharded data parallelism: every term of every traced stage is
    within 5 % of the estimate, or 0.2 % of the rank's memory."""
    document = estimate(
        "llama-3-70b",
        ClusterInput(gpu="h100", gpus=128),
        JobInput(seq_len=8192, global_batch=512),
        StrategyInput(tp=4, pp=4, zero_stage=3),
        backend="pytorch",
    )
    told: list[str] = []
    made = memory_only.run(document, Options(), told.append)
    assert made.failures == ()
    assert made.verdict == "within"
    assert made.mode == "memory-only"
    assert made.peak_memory is not None
    assert made.peak_memory.error == pytest.approx(0.0, abs=0.05)
    assert [rank.rank for rank in made.ranks] == [0, 64, 96]
    assert len(made.memory_terms) == 3 * 5
    # What a stage receives is not estimated: some 0.1 % of a rank's memory, but more than 5 % of its buffers.
    little = 0.002 * made.peak_memory.predicted
    off = {
        term.name: term.error
        for term in made.memory_terms
        if abs(term.predicted - (term.measured or 0.0)) > max(0.05 * (term.measured or 0.0), little)
    }
    assert off == {}
    for rank in made.ranks:
        assert sum(rank.memory.values()) == rank.peak_allocated_bytes
    assert any("nothing was allocated" in note for note in made.notes)
    assert any("5 of 64 micro-batches" in note for note in made.notes)
    assert "observed step" in told


@pytest.mark.parametrize(
    "strategy",
    [StrategyInput(zero_stage=3), StrategyInput(pp=2, zero_stage=0), StrategyInput(tp=2, zero_stage=0)],
    ids=["sharded", "pipeline", "tensor"],
)
def test_traced_like_a_real_run(strategy: StrategyInput, tmp_path: Path) -> None:
    """Two real processes hold what the traced ones do, in sum and in every term."""
    document = plan(tmp_path, SMALL, 2, strategy, gpu="cpu", seq_len=128, precision="fp32")
    traced = memory_only.run(document, Options(), None)
    real = running.run(document, Options(check_gradients=False), None)
    assert (traced.failures, real.failures) == ((), ())
    held = {rank.rank: rank for rank in real.ranks}
    for rank in traced.ranks:
        assert rank.peak_allocated_bytes == pytest.approx(held[rank.rank].peak_allocated_bytes, rel=0.02)
        for term, size in rank.memory.items():
            assert size == pytest.approx(held[rank.rank].memory[term], rel=0.05, abs=1 << 20), term


LARGE_VOCABULARY = SMALL | {"num_hidden_layers": 2, "vocab_size": 32000}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("config", [SMALL, LARGE_VOCABULARY], ids=["deep", "large vocabulary"])
def test_schedules_hold_what_is_estimated(schedule: str, config: dict[str, object], tmp_path: Path) -> None:
    """GPipe keeps the logits of all micro-batches and what the loss saves of them; under ZB-H1 micro-batches and the
    gradients of their layers' outputs wait for the weight gradients."""
    strategy = StrategyInput(pp=2, zero_stage=0, schedule=schedule)
    document = plan(tmp_path, config, 2, strategy, gpu="cpu", seq_len=256, precision="fp32", global_batch=8)
    made = memory_only.run(document, Options(), None)
    assert made.failures == ()
    assert made.peak_memory is not None
    assert made.peak_memory.error == pytest.approx(0.0, abs=0.06)


def test_many_micro_batches_of_zero_bubble(tmp_path: Path) -> None:
    """Observing keeps no graph alive: four times the micro-batches cost their inputs and no activations."""
    strategy = StrategyInput(pp=2, zero_stage=0, schedule="zb-h1")
    document = plan(tmp_path, SMALL, 2, strategy, gpu="cpu", seq_len=256, precision="fp32", global_batch=16)
    config = memory_only.traced(prepared(document, Options()))
    peaks = {}
    for count in (4, 16):
        batch = {"global_batch": count}
        several = config.strategy.model_copy(update={"grad_accum": count, **batch})
        longer = config.model_copy(update={"strategy": several, "job": config.job.model_copy(update=batch)})
        made = launch(longer, 2, None, command=last_rank)
        assert made.failures == ()
        peaks[count] = made.results[1].peak_allocated_bytes or 0
    assert peaks[4] <= peaks[16] <= 1.07 * peaks[4]


def last_rank(folder: Folder, processes: int) -> list[str]:
    """Both ranks of two stages."""
    return torchrun(folder, processes, ("-m", "planner_validate.trainer.fake_rank", "--ranks", "0,1"))


def test_libraries_are_not_traced(tmp_path: Path) -> None:
    """Matrix libraries take 64 MiB of an H100, as much as the tensors of a small model; tensors are compared with
    tensors."""
    document = plan(tmp_path, SMALL, 2, StrategyInput(zero_stage=2), seq_len=256)
    made = memory_only.run(document, Options(), None)
    assert made.failures == ()
    assert made.peak_memory is not None
    assert made.peak_memory.error == pytest.approx(0.0, abs=0.08)
    assert made.estimate.peak_memory_bytes > made.peak_memory.predicted + 64 * MIB


def test_zero_bubble_recomputes_nothing(tmp_path: Path) -> None:
    """Torch fails in the second of the two passes over a recomputed layer, so no such plan is made."""
    with pytest.raises(InputError, match="zero-bubble-recompute"):
        plan(tmp_path, SMALL, 2, StrategyInput(pp=2, zero_stage=0, schedule="zb-h1", recompute="selective"))


def test_zero_bubble_runs_whole_rounds(tmp_path: Path) -> None:
    """Five micro-batches on two stages are two rounds and a rest, which torch refuses; six are three rounds."""
    strategy = StrategyInput(pp=2, zero_stage=0, schedule="zb-h1")
    with pytest.raises(InputError, match="zero-bubble-rounds"):
        plan(tmp_path, SMALL, 2, strategy, global_batch=5)
    assert plan(tmp_path, SMALL, 2, strategy, global_batch=6).best.strategy.grad_accum == 6


def test_what_cannot_be_traced(tmp_path: Path) -> None:
    """Offload needs a GPU: the answer names the other ways."""
    document = plan(tmp_path, WIDE, 8, StrategyInput(offload="cpu+parameters", zero_stage=3))
    with pytest.raises(InputError, match="cannot be traced") as caught:
        memory_only.run(document, Options(), None)
    assert "--proxy" in str(caught.value.hint)
