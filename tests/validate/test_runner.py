"""Plans on four real processes: gradients and losses of one device, memory and collectives that the plan implies."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from planner.cost.params import total_params
from tests.validate import runner_cases
from tests.validate.launch import torchrun
from tests.validate.runner_cases import CASES

pytest.importorskip("torch", reason="needs torch (the validate extra)")
pytestmark = pytest.mark.torch

Results = list[dict[str, Any]]
"""By rank."""

SCRIPT = runner_cases.__file__ or ""
_DATA = ("ddp", "fsdp", "fsdp kept", "hybrid", "full recompute", "selective recompute", "some recompute", "odd model")
_STAGES = ("pp 1f1b", "pp gpipe fsdp", "pp interleaved", "pp zb-h1", "pp interleaved fsdp", "mla")
_TENSORS = ("tp", "tp fsdp", "tp without sp", "pp tp", "mla tp", "mla cp")
_CONTEXT = ("cp", "cp tp", "cp pp")
_EXPERTS = ("moe ep2", "moe ep4 fsdp", "moe ep2 fsdp", "moe ep1", "moe pp ep2", "moe tp ep1", "moe tp ep2 fsdp")
_BOTH = ("moe cp ep2",)
_NARROW = ("bf16 fsdp", "bf16 replicated", "fp16")


def results(folder: Path, processes: int, cases: Iterable[str]) -> dict[str, Results]:
    """What every rank found, by case."""
    ended = torchrun(processes, SCRIPT, str(folder), *cases)
    assert ended.returncode == 0, ended.stdout[-4000:]
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text("utf-8")) for rank in range(processes)]
    return {case: [rank[case] for rank in ranks] for case in cases}


def alone(folder: Path, *cases: str) -> list[dict[str, Any]]:
    """The same models and data on one process."""
    (folder / "alone").mkdir()
    found = results(folder / "alone", 1, cases)
    return [found[case][0] for case in cases]


def assert_equal_to(reference: dict[str, Any], found: dict[str, Results], relative: float = 2e-5) -> None:
    """Gradients of the tiny copy within its tolerance; losses and gradient norms of the steps those of one process."""
    for case, ranks in found.items():
        check = ranks[0]["gradients"]
        assert check["largest_relative_error"] <= 1e-4, (case, check)
        assert check["gradient_norm"] == pytest.approx(check["reference_norm"], rel=1e-5), case
        for rank in ranks:
            assert rank["gradients"] == check, f"{case}: the ranks disagree about the check"
            assert rank["losses"] == pytest.approx(reference["losses"], rel=relative), case
            assert rank["norms"] == pytest.approx(reference["norms"], rel=100 * relative), case
            assert sum(rank["terms"].values()) == rank["peak"], case
    assert reference["losses"][-1] < reference["losses"][0] - 0.05


def sent(rank: dict[str, Any], operation: str, group: str) -> tuple[int, int]:
    """(calls, bytes) of one kind of collective."""
    uses = [u for u in rank["collectives"] if u["operation"] == operation and u["group"] == group]
    return sum(u["calls"] for u in uses), sum(u["sent_bytes"] for u in uses)


def test_data_parallelism(tmp_path: Path) -> None:
    """Replicated, sharded and hybrid data parallelism and recomputation change no gradient, and send and keep what they
    say."""
    plain = [case for case in _DATA if case != "odd model"]
    found = results(tmp_path, 4, _DATA)
    dense, odd = alone(tmp_path, "alone", "alone odd")
    assert_equal_to(dense, {case: found[case] for case in plain})
    assert_equal_to(odd, {"odd model": found["odd model"]})
    whole, micro_batches = 4 * total_params(CASES["ddp"][0]), 2
    replicated, sharded = found["ddp"][0], found["fsdp"][0]
    assert sent(replicated, "all_reduce", "dp")[1] == whole, "each gradient is summed once a step"
    assert replicated["terms"]["weights"] == replicated["terms"]["gradients"] == whole
    assert sharded["terms"]["weights"] == sharded["terms"]["gradients"] == whole // 4
    assert sharded["terms"]["optimizer"] == pytest.approx(2 * whole // 4, rel=0.01)
    assert sent(sharded, "reduce_scatter", "dp")[1] == micro_batches * whole
    # Every block is gathered forward and backward in every micro-batch, the rest of the model once.
    outside = 4 * (2 * 256 * 64 + 64)
    assert sent(sharded, "all_gather", "dp")[1] == micro_batches * (2 * (whole - outside) + outside) // 4
    assert sent(found["fsdp kept"][0], "all_gather", "dp")[1] == micro_batches * whole // 4
    activations = {case: found[case][0]["terms"]["activations"] for case in plain}
    assert activations["full recompute"] < activations["some recompute"] < activations["ddp"]
    assert activations["selective recompute"] < activations["ddp"]


def test_pipelines_and_latent_attention(tmp_path: Path) -> None:
    """Every schedule gives the losses of one device, and sends each micro-batch's stream across each cut."""
    found = results(tmp_path, 4, _STAGES)
    dense, latent = alone(tmp_path, "alone", "alone latent")
    assert_equal_to(latent, {"mla": found.pop("mla")})
    assert_equal_to(dense, found)
    stream = 4 * runner_cases.TOKENS * CASES["pp 1f1b"][0].hidden
    assert sent(found["pp 1f1b"][0], "send", "pp") == (4, 4 * stream)
    assert sent(found["pp 1f1b"][3], "recv", "pp") == (4, 4 * stream)
    assert sent(found["pp interleaved"][0], "send", "pp") == (12, 12 * stream)


def test_tensor_parallelism(tmp_path: Path) -> None:
    """Split matrices, split sequences and both with a pipeline or sharded weights."""
    found = results(tmp_path, 4, _TENSORS)
    dense, normed, latent = alone(tmp_path, "alone", "alone normed", "alone latent")
    assert_equal_to(latent, {case: found.pop(case) for case in ("mla tp", "mla cp")})
    assert_equal_to(normed, {"tp without sp": found.pop("tp without sp")})
    assert_equal_to(dense, found)
    micro_batches, layers = 1, 4
    shard = 4 * 4 * runner_cases.TOKENS // 2 * CASES["tp"][0].hidden
    # Two gathers a layer forward, two backward (of the outputs' gradients); one each for the embedding and the head.
    assert sent(found["tp"][0], "all_gather", "tp")[1] == micro_batches * (4 * layers + 2) * shard


def test_context_parallelism(tmp_path: Path) -> None:
    """Sequences cut over ranks, with sharded weights, split matrices and a pipeline; keys and values are gathered."""
    found = results(tmp_path, 4, _CONTEXT)
    (dense,) = alone(tmp_path, "alone")
    assert_equal_to(dense, found)
    micro_batches, layers, width = 2, 4, 2 * 16
    rows = 2 * runner_cases.TOKENS // 2
    assert sent(found["cp"][0], "all_gather", "cp") == (16, micro_batches * layers * 2 * 4 * rows * width)
    assert sent(found["cp"][0], "reduce_scatter", "cp") == (16, 2 * micro_batches * layers * 2 * 4 * rows * width)


def test_experts(tmp_path: Path) -> None:
    """Experts spread over data- and tensor-parallel ranks, with uneven shares (three of eight experts a token)."""
    found = results(tmp_path, 4, _EXPERTS + _BOTH)
    (mixture,) = alone(tmp_path, "alone moe")
    assert_equal_to(mixture, found)
    slots = 3 * runner_cases.TOKENS
    width, micro_batches, layers = CASES["moe ep2"][0].hidden, 2, 3
    # Tokens and their probabilities out, results back, and the gradients of all three the other way.
    expected = 4 * slots * (4 * width + 2) * micro_batches * layers
    assert sent(found["moe ep2"][0], "all_to_all", "ep")[1] == expected


def test_sixteen_bits(tmp_path: Path) -> None:
    """bf16 and fp16 follow fp32 as far as their digits go; the check itself is in fp32."""
    (dense,) = alone(tmp_path, "alone")
    assert_equal_to(dense, results(tmp_path, 4, _NARROW), relative=2e-3)
