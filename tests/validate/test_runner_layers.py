"""What one block saves for its backward pass, what a step keeps in memory, and how experts are dealt to tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.specs.model import MlaSpec, ModelSpec, MoeSpec

torch = pytest.importorskip("torch", reason="needs torch (the validate extra)")
pytestmark = pytest.mark.torch

from planner_validate.trainer.context import positions  # noqa: E402
from planner_validate.trainer.experts import dealt, routes  # noqa: E402
from planner_validate.trainer.gradients import reference_gradients, shrink  # noqa: E402
from planner_validate.trainer.layers import Core  # noqa: E402
from planner_validate.trainer.model import Stage, initialise  # noqa: E402
from tests.validate.launch import torchrun  # noqa: E402
from tests.validate.runner_cases import CASES, DENSE, LATENT, MIXTURE, ODD, configuration  # noqa: E402

ROWS, TOKENS = 2, 96


def saved_bytes(model: ModelSpec, *, sample: int | None = None) -> int:
    """Bytes that the middle one of three blocks saves: storages, each once, parameters left out."""
    stage = Stage(model, range(3), first=False, last=False, core=Core(sample=sample))
    initialise(stage, 0)
    x = torch.randn(ROWS, TOKENS, model.hidden, requires_grad=True)
    before = stage.layers["1"](stage.layers["0"](x))
    own = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    storages = {}

    def keep(tensor: Any) -> Any:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        after = stage.layers["2"](before)
    assert after.shape == before.shape
    return sum(size for pointer, size in storages.items() if pointer not in own)


def expected_bytes(model: ModelSpec) -> int:
    """The cost model's list: stream and normalised stream in front of mixer and MLP, the mixer's tensors, the MLP's."""
    mla, moe = model.mla, model.moe
    elements = 4 * model.hidden
    if mla is None:
        elements += 2 * model.heads * model.head_dim + 2 * model.kv_heads * model.head_dim
    else:
        qk = mla.qk_nope + mla.qk_rope
        elements += 2 * (mla.q_lora + mla.kv_lora) + mla.qk_rope + model.heads * (2 * qk + 2 * mla.v_head)
    elements += model.heads  # log-sum-exp
    if moe is None:
        elements += 3 * model.ffn
    else:
        elements += moe.top_k * (3 * moe.expert_ffn + model.hidden) + 3 * moe.shared_ffn + moe.experts
    return 4 * ROWS * TOKENS * elements


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(DENSE, id="grouped-query"),
        pytest.param(DENSE.model_copy(update={"kv_heads": 4}), id="multi-head"),
        pytest.param(LATENT, id="latent"),
        pytest.param(MIXTURE.model_copy(update={"moe": MoeSpec(experts=8, top_k=2, expert_ffn=96)}), id="experts"),
    ],
)
def test_saved_tensors(model: ModelSpec) -> None:
    """A block saves the cost model's tensors; reciprocals of the norms, position tables and routes are a few per cent
    more at this width."""
    expected = expected_bytes(model)
    assert expected <= saved_bytes(model) <= 1.06 * expected


def test_saved_tensors_of_packed_samples() -> None:
    """Attention within samples copies nothing."""
    assert saved_bytes(DENSE, sample=TOKENS // 3) == saved_bytes(DENSE)


def test_packed_samples_do_not_see_each_other() -> None:
    """The second sample of a sequence gives the same output whatever the first one is, but for its positions."""
    stage = Stage(DENSE.model_copy(update={"position": "none"}), range(2), first=True, last=False, core=Core(sample=8))
    initialise(stage, 0)
    tokens = torch.arange(16).reshape(1, 16)
    other = torch.cat([tokens[:, :8] + 40, tokens[:, 8:]], 1)
    with torch.no_grad():
        assert torch.equal(stage(tokens)[:, 8:], stage(other)[:, 8:])
        assert not torch.equal(stage(tokens)[:, :8], stage(other)[:, :8])


@pytest.mark.parametrize(("experts", "top_k", "size"), [(8, 2, 2), (8, 3, 4), (6, 5, 3), (4, 4, 1)])
def test_routes(experts: int, top_k: int, size: int) -> None:
    """Every slot arrives where its expert is, no token meets an expert twice, and experts get equal shares."""
    moe = MoeSpec(experts=experts, top_k=top_k, expert_ffn=8)
    offsets = tuple(8 * rank for rank in range(size))
    plans = [routes(moe, 3, 8, offsets, rank) for rank in range(size)]
    local = experts // size
    for rank, plan in enumerate(plans):
        assert plan.received == tuple(other.sent[rank] for other in plans)
        assert sum(plan.sizes) == sum(plan.received)
        assert all(len(set(token)) == top_k for token in plan.experts)
        starts = [sum(other.sent[:rank]) for other in plans]
        arrived = np.concatenate(
            [
                other.experts.reshape(-1)[other.order][start : start + other.sent[rank]]
                for other, start in zip(plans, starts, strict=True)
            ]
        )
        assert np.array_equal(np.sort(arrived), arrived[plan.grouping])
        assert set(arrived) <= set(range(rank * local, (rank + 1) * local))
    counts = np.bincount(np.concatenate([plan.experts.reshape(-1) for plan in plans]), minlength=experts)
    assert counts.max() - counts.min() <= 3
    whole = dealt(moe, 3, 8 * size, 0).reshape(3, 8 * size, top_k)
    assert np.array_equal(whole[:, :8].reshape(-1, top_k), plans[0].experts)


def test_a_wrong_gradient_is_seen() -> None:
    """The reference depends on every part of the model: another seed or a missing layer gives other gradients."""
    config = shrink(configuration("fsdp"))
    right = reference_gradients(config, torch.device("cpu"))
    wrong = reference_gradients(config.model_copy(update={"seed": 1}), torch.device("cpu"))
    assert right.keys() == wrong.keys()
    assert all(not torch.allclose(right[name], wrong[name], rtol=1e-2) for name in right)


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("alone")])
def test_tiny_copies_keep_the_plan(case: str) -> None:
    """A tiny copy has the plan's degrees and every kind of layer, and is far smaller than the model."""
    config = configuration(case)
    tiny = shrink(config)
    for degree in ("tp", "cp", "pp", "vpp", "ep", "dp", "zero_stage", "shard_degree", "pipeline_schedule"):
        assert getattr(tiny.strategy, degree) == getattr(config.strategy, degree)
    assert tiny.strategy.precision == "fp32"
    assert sum(tiny.strategy.layers_per_stage) == tiny.model.layers
    assert set(tiny.model.layer_kinds()) == set(config.model.layer_kinds())
    assert tiny.model.hidden <= 64
    assert tiny.strategy.grad_accum >= 2


def test_tiny_copy_of_a_large_model() -> None:
    """Widths of a released model shrink with its proportions; the degrees still divide them."""
    large = LATENT.model_copy(
        update={
            "layers": 61,
            "hidden": 7168,
            "heads": 128,
            "kv_heads": 128,
            "vocab": 129280,
            "mla": MlaSpec(q_lora=1536, kv_lora=512, qk_nope=128, qk_rope=64, v_head=128),
            "moe": MoeSpec(experts=256, top_k=8, expert_ffn=2048, shared_ffn=2048, dense_first=3),
        }
    )
    config = configuration("mla")
    strategy = config.strategy.model_copy(update={"ep": 4, "layers_per_stage": (61,)})
    tiny = shrink(config.model_copy(update={"model": large, "strategy": strategy})).model
    assert tiny.moe is not None
    assert tiny.moe.experts % 4 == 0
    assert set(tiny.layer_kinds()) == set(large.layer_kinds())
    assert tiny.hidden * tiny.vocab < 10_000


def test_observed_peak_is_the_allocators(tmp_path: Path) -> None:
    """Of a replicated step on one process, where no library keeps buffers of its own, PyTorch's allocator reports the
    same rise."""
    program = Path(__file__).with_name("observed_and_allocated.py")
    cases = ("alone", "alone moe", "alone latent", "alone odd")
    ended = torchrun(1, str(program), str(tmp_path), *cases)
    assert ended.returncode == 0, ended.stdout[-3000:]
    for case, found in json.loads((tmp_path / "rise.json").read_text("utf-8")).items():
        assert found["observed"] == pytest.approx(found["allocated"], rel=0.02), case


@pytest.mark.parametrize(("tokens", "size"), [(33, 1), (32, 2), (48, 3)])
def test_positions_cover_a_sequence(tokens: int, size: int) -> None:
    """Each token belongs to one rank, and causal attention is the same work on all of them."""
    parts = [positions(tokens, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(tokens))
    assert len({int((part + 1).sum()) for part in parts}) == 1


def test_initial_values_do_not_depend_on_the_split() -> None:
    """A slice of the model starts from the whole model's values."""
    whole, part = Stage(ODD, range(4)), Stage(ODD, range(2, 4), first=False)
    initialise(whole, 7)
    initialise(part, 7)
    values = dict(whole.named_parameters())
    for name, parameter in part.named_parameters():
        if name != "head.weight":  # tied to the embedding where one stage has both
            assert torch.equal(parameter, values[name]), name
