"""What every backend promises: well-formed rules, recompute choices, layouts, and memory that shrinks with sharding."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from planner.backends import BACKENDS, get_backend
from planner.backends.base import Backend, BufferContext, RuleContext, StateBytes
from planner.backends.deepspeed import bucket_elements, live_elements, prefetch_elements, sub_group_elements
from planner.errors import InputError
from planner.specs.batch import DEVICES
from planner.specs.job import Precision
from planner.specs.model import ModelSpec
from tests.helpers import (
    deepseek_v3,
    delta_net,
    gpt13b,
    h100_cluster,
    llama8b,
    llama70b,
    make_batch,
    make_job,
    mamba_hybrid,
    mixtral,
)

MODELS = [llama70b(), gpt13b(), mixtral(), deepseek_v3(), mamba_hybrid(), delta_net()]
CPU, NVME = DEVICES.index("cpu"), DEVICES.index("nvme")


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


def states(backend: Backend, precision: Precision = "bf16", **columns: object) -> StateBytes:
    batch = make_batch(**columns)
    return backend.state_bytes(make_job(precision=precision), batch, batch.shard_degree)


def total(backend: Backend, precision: Precision = "bf16", **columns: object) -> list[float]:
    """Resident bytes per parameter of every row."""
    result = states(backend, precision, **columns)
    return [float(value) for value in result.weights + result.gradients + result.optimizer]


def test_backends_are_found_by_name() -> None:
    """Order, spelling and near names."""
    assert list(BACKENDS)[:3] == ["megatron", "deepspeed", "fsdp"]
    assert get_backend(" Megatron ") is BACKENDS["megatron"]
    with pytest.raises(InputError, match="unknown backend") as caught:
        get_backend("deepsped")
    assert caught.value.hint == "did you mean deepspeed?"
    with pytest.raises(InputError) as caught:
        get_backend("jax")
    assert "planner backends" in str(caught.value)


def test_rules_are_well_formed(backend: Backend) -> None:
    """Ids are unique kebab-case words, reasons are one sentence, sources are named."""
    ids = [rule.id for rule in backend.rules]
    assert len(ids) == len(set(ids))
    for rule in backend.rules:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.id)
        assert rule.reason.endswith(".")
        assert rule.reason[0].isupper() or rule.reason.startswith(("fp8", "hpZ", "fully_shard", "--"))
        assert rule.source


def test_rules_answer_for_every_row(backend: Backend) -> None:
    """A rule over three candidates returns three booleans and mixes legal and illegal ones."""
    model, job = llama8b(), make_job()
    batch = make_batch(tp=[1, 3, 8], dp=[16, 5, 2], stage_layers=[32])
    context = RuleContext(model, h100_cluster(16), job, batch, backend.recompute_kinds(model, job))
    masks = {rule.id: mask for rule, mask in backend.broken_rules(context)}
    assert all(mask.shape == (3,) and mask.dtype == np.bool_ for mask in masks.values())
    assert masks["world-size"].tolist() == [False, True, False]
    assert masks["heads-over-tp"].tolist() == [False, True, False]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("flash", [True, False])
def test_recompute_kinds(backend: Backend, model: ModelSpec, flash: bool) -> None:
    """The kind "none" comes first, there are at most eight, and each saves something for some work."""
    kinds = backend.recompute_kinds(model, make_job(flash_attention=flash))
    assert kinds[0].id == kinds[0].mode == "none"
    assert len({kind.id for kind in kinds}) == len(kinds) <= 8
    assert any(kind.mode == "full" for kind in kinds)
    for kind in kinds[1:]:
        assert kind.drops
        assert kind.repeats
        assert 0 <= kind.keeps < 1


def test_megatron_recomputes_what_the_model_has() -> None:
    """Modules follow the model: norms fused by Transformer Engine are not offered, experts and latent attention are."""
    megatron, job = BACKENDS["megatron"], make_job()
    assert [kind.id for kind in megatron.recompute_kinds(llama70b(), job)] == ["none", "mlp", "full"]
    assert [kind.id for kind in megatron.recompute_kinds(mixtral(), job)] == [
        "none",
        "layernorm",
        "moe_act",
        "moe",
        "full",
    ]
    latent = {kind.id: kind for kind in megatron.recompute_kinds(deepseek_v3(), job)}
    assert "mla_up_proj" in latent
    assert latent["layernorm+moe_act+mla_up_proj"].modules == ("layernorm", "moe_act", "mla_up_proj")
    without_flash = megatron.recompute_kinds(llama70b(), make_job(flash_attention=False))
    assert without_flash[1].drops == {"attention_scores"}


def test_selective_share_of_fsdp_matches_the_measured_one() -> None:
    """Llama-3-8B keeps 45 % of a layer (31 of 68 GiB of torchtitan's run): 39 % of what the policy may drop."""
    kinds = {kind.id: kind for kind in BACKENDS["fsdp"].recompute_kinds(llama8b(), make_job())}
    assert kinds["selective"].keeps == pytest.approx(0.39, abs=0.005)


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (4, 1), (5, 1), (4, 2), (8, 3), (96, 1)])
def test_default_layout_holds_all_layers(backend: Backend, pp: int, vpp: int) -> None:
    """A default split is even within one layer, complete and nowhere empty; an impossible one is None."""
    layout = backend.default_layout(llama70b(), pp, vpp)
    if layout is None:
        assert pp * vpp > 80 or backend.name != "megatron"
        return
    assert len(layout) == pp * vpp
    assert sum(layout) == 80
    assert min(layout) >= 1
    assert max(layout) - min(layout) <= 1


def test_megatron_leaves_room_for_prediction_blocks() -> None:
    """NVIDIA lays DeepSeek-V3 over 16 stages with four layers each and one beside the prediction block and loss."""
    layout = BACKENDS["megatron"].default_layout
    assert layout(deepseek_v3(), 16, 1) == layout(deepseek_v3(), 4, 4) == (*[4] * 15, 1)
    chunks = layout(deepseek_v3(), 8, 4)
    assert chunks is not None
    assert (sum(chunks), max(chunks), chunks[-1]) == (61, 2, 1)


def test_megatron_gives_the_ends_fewer_layers() -> None:
    """Embedding and head make first and last stage heavier, so a remainder goes to the middle."""
    plain = deepseek_v3().model_copy(update={"mtp_layers": 0})
    assert BACKENDS["megatron"].default_layout(plain, 4, 1) == (15, 16, 15, 15)
    assert BACKENDS["megatron"].default_layout(llama70b(layers=126), 16, 1) == (7, *[8] * 14, 7)


def test_shard_degrees(backend: Backend) -> None:
    """The whole group first; a second choice stays on the fast links; stage 0 shards nothing."""
    cluster = h100_cluster(128)
    assert backend.shard_degrees(cluster, 1, 1, 128, 0) == (1,)
    for stage in backend.zero_stages[1:]:
        degrees = backend.shard_degrees(cluster, 2, 2, 32, stage)
        assert degrees[0] == 64
        assert all(64 % degree == 0 for degree in degrees)
        assert all(2 * degree <= cluster.domain_gpus for degree in degrees[1:])
    assert backend.shard_degrees(cluster, 8, 1, 16, backend.zero_stages[-1]) == (16,)


def test_secondary_shard_is_a_node() -> None:
    """HpZ exists at stage 3 when the group is larger than a node."""
    cluster, deepspeed = h100_cluster(128), BACKENDS["deepspeed"]
    assert deepspeed.secondary_shard_degrees(cluster, 128, 3) == (0, 8)
    assert deepspeed.secondary_shard_degrees(cluster, 8, 3) == (0,)
    assert deepspeed.secondary_shard_degrees(cluster, 128, 2) == (0,)
    assert BACKENDS["fsdp"].secondary_shard_degrees(cluster, 128, 3) == (0,)


@pytest.mark.parametrize(
    ("name", "precision", "columns", "expected"),
    [
        ("megatron", "bf16", {"zero_stage": 0}, 18),
        ("megatron", "bf16", {"zero_stage": 1, "shard_degree": 8}, 6 + 12 / 8),
        ("megatron", "fp16", {"zero_stage": 0}, 16),
        ("megatron", "fp16", {"zero_stage": 1, "shard_degree": 8}, 4 + 12 / 8),
        ("megatron", "fp32", {"zero_stage": 0}, 16),
        ("megatron", "fp32", {"zero_stage": 1, "shard_degree": 8}, 8 + 8 / 8),
        ("megatron", "fp8", {"zero_stage": 1, "shard_degree": 8}, 8 + 12 / 8),
        ("deepspeed", "bf16", {"zero_stage": 0}, 16),
        ("deepspeed", "bf16", {"zero_stage": 1, "shard_degree": 8}, 8 + 12 / 8),
        ("deepspeed", "fp16", {"zero_stage": 1, "shard_degree": 8}, 4 + 16 / 8),
        ("deepspeed", "bf16", {"zero_stage": 2, "shard_degree": 8}, 2 + 18 / 8),
        ("deepspeed", "fp16", {"zero_stage": 2, "shard_degree": 8}, 2 + 18 / 8),
        ("deepspeed", "bf16", {"zero_stage": 3, "shard_degree": 8}, 18 / 8),
        ("deepspeed", "bf16", {"zero_stage": 3, "shard_degree": 64, "secondary_shard_degree": 8}, 18 / 64 + 2 / 8),
        ("deepspeed", "fp32", {"zero_stage": 0}, 16),
        ("fsdp", "bf16", {"zero_stage": 3, "shard_degree": 8}, 16 / 8),
        ("fsdp", "bf16", {"zero_stage": 2, "shard_degree": 8}, 2 + 16 / 8),
        ("fsdp", "bf16", {"zero_stage": 0}, 18),
        ("fsdp", "fp32", {"zero_stage": 3, "shard_degree": 8}, 16 / 8),
        ("fsdp", "fp32", {"zero_stage": 2, "shard_degree": 8}, 4 + 16 / 8),
    ],
)
def test_bytes_per_parameter(name: str, precision: Precision, columns: dict[str, int], expected: float) -> None:
    """The tables of the frameworks' own estimators and documents."""
    assert total(BACKENDS[name], precision, **columns) == [pytest.approx(expected)]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_sharding_more_never_costs_memory(backend: Backend, precision: Precision) -> None:
    """Bytes fall with the shard degree at every stage and with the stage at a fixed degree."""
    degrees = [2, 4, 8, 64, 512]
    for stage in backend.zero_stages[1:]:
        column = total(backend, precision, zero_stage=stage, shard_degree=degrees)
        assert column == sorted(column, reverse=True)
        assert column[0] > column[-1]
    for degree in (4, 64):
        by_stage = [
            total(backend, precision, zero_stage=s, shard_degree=degree if s else 1)[0] for s in backend.zero_stages
        ]
        assert by_stage == sorted(by_stage, reverse=True)


def test_shard_argument_decides_not_the_column(backend: Backend) -> None:
    """Experts are sharded over a smaller group than dense weights: the argument counts."""
    stage = backend.zero_stages[-1]
    batch = make_batch(zero_stage=stage, shard_degree=64)
    wide = backend.state_bytes(make_job(), batch, np.array([64]))
    narrow = backend.state_bytes(make_job(), batch, np.array([4]))
    assert narrow.optimizer[0] == pytest.approx(16 * wide.optimizer[0])


def test_offload_moves_what_was_there(backend: Backend) -> None:
    """What leaves the GPU was on it, is held by the host at least as wide, and every choice names legal stages."""
    for choice in backend.offloads:
        assert choice.steps >= 1
        for stage in choice.zero_stages:
            assert stage in backend.zero_stages
            result = states(
                backend,
                zero_stage=stage,
                shard_degree=8,
                offload_optimizer=1.0,
                offload_device=DEVICES.index(choice.device),
                offload_parameters=DEVICES.index(choice.parameters),
            )
            resident = (result.weights + result.gradients + result.optimizer)[0]
            assert result.optimizer[0] <= result.offloadable[0] <= resident
            assert result.host[0] > 0
            if choice.device == "cpu":
                assert result.host[0] >= result.offloadable[0]


def test_offload_bytes() -> None:
    """Megatron keeps weights and gradients, DeepSpeed drops 16 of 18 or everything, FSDP everything but kept copies."""
    on: dict[str, Any] = {"shard_degree": 8, "offload_optimizer": 1.0, "offload_device": CPU}
    megatron = states(BACKENDS["megatron"], zero_stage=1, **on)
    assert megatron.offloadable[0] == pytest.approx(12 / 8)
    stage2 = states(BACKENDS["deepspeed"], zero_stage=2, **on)
    assert stage2.offloadable[0] == pytest.approx(16 / 8)
    assert stage2.host[0] == pytest.approx(16 * 1.5 / 8)
    stage3 = states(BACKENDS["deepspeed"], zero_stage=3, offload_parameters=CPU, **on)
    assert stage3.offloadable[0] == pytest.approx(18 / 8)
    assert stage3.host[0] == pytest.approx(18 * 1.5 / 8)
    swapped = states(BACKENDS["deepspeed"], zero_stage=3, **{**on, "offload_device": NVME})
    assert swapped.host[0] < stage3.host[0] / 3
    kept = states(BACKENDS["fsdp"], zero_stage=2, offload_parameters=CPU, **on)
    assert (kept.weights + kept.gradients + kept.optimizer - kept.offloadable)[0] == pytest.approx(2)


def test_step_temporaries() -> None:
    """torch's foreach Adam needs one more fp32 tensor, DeepSpeed's stage 0 flat gradients, Megatron an fp32 copy of
    gradients that are not fp32."""
    assert states(BACKENDS["fsdp"], zero_stage=3, shard_degree=8).step_temporary[0] == pytest.approx(4 / 8)
    assert states(BACKENDS["deepspeed"], zero_stage=0).step_temporary[0] == pytest.approx(4)
    assert states(BACKENDS["megatron"], zero_stage=1, shard_degree=8).step_temporary[0] == 0
    assert states(BACKENDS["megatron"], "fp16", zero_stage=1, shard_degree=8).step_temporary[0] == pytest.approx(4 / 8)


def buffers(backend: Backend, precision: Precision = "bf16", **columns: object) -> dict[str, float]:
    one = np.array([1e9])
    context = BufferContext(
        model=llama70b(),
        job=make_job(precision=precision),
        batch=make_batch(**columns),
        rank_params=8 * one,
        layer_params=one,
        root_params=2.1 * one,
        distinct_weight_params=1.5 * one,
    )
    return {name: float(value[0]) for name, value in backend.buffer_bytes(context).items()}


def test_buffers() -> None:
    """Dummy gradients of Megatron, buckets and live parameters of DeepSpeed, gathered groups of FSDP."""
    assert buffers(BACKENDS["megatron"]) == {"dummy weight gradients": 3e9}
    assert buffers(BACKENDS["megatron"], "fp32") == {"dummy weight gradients": 6e9}
    third = buffers(BACKENDS["deepspeed"], zero_stage=3, shard_degree=8)
    assert third == {
        "reduce bucket": 2.0 * 8192 * 8192,
        "all-gather bucket": 0.0,
        "gathered parameters": pytest.approx(2.1e9),
        "unsharded gradients": 2e9,
    }
    assert buffers(BACKENDS["deepspeed"], zero_stage=1, shard_degree=8, pp=2)["reduce bucket"] == 0
    freed = buffers(BACKENDS["fsdp"], zero_stage=3, shard_degree=8)
    assert freed == {
        "gathered embedding and head": 4.2e9,
        "gathered blocks": 4e9,
        "unsharded gradients": 8e9,
    }
    kept = buffers(BACKENDS["fsdp"], zero_stage=2, shard_degree=8)
    assert kept["gathered blocks"] == kept["gathered embedding and head"] == 0


def test_deepspeed_sizes_follow_the_model() -> None:
    """The numbers that are written are those that are budgeted, within DeepSpeed's defaults."""
    assert bucket_elements(8192) == 67_108_864
    assert prefetch_elements(8192) == 60_397_977
    assert bucket_elements(768) == 50_000_000
    assert bucket_elements(65536) == 500_000_000
    assert live_elements(856e6) == 1_000_000_000
    assert live_elements(2e8) == 400_000_000
    assert sub_group_elements(1e8) == 5_000_000
    assert sub_group_elements(3) == 1


def test_habits_are_within_reason(backend: Backend) -> None:
    """Shares are shares and factors are factors; every field is set for every precision."""
    habits = backend.habits
    assert {field.name for field in fields(habits)} >= {"loss_bytes_per_logit", "kernels_per_layer"}
    assert isinstance(habits.tensor_parallel_overlap, bool)
    assert 1 <= habits.activation_overhead < 2
    assert 1 <= habits.allocator_factor < 1.2
    assert habits.kernels_per_layer > 10
    for precision in ("bf16", "fp16", "fp32", "fp8"):
        job = make_job(precision=precision)
        assert habits.gradient_reduce_bytes(job) in (2, 4)
        assert 4 <= habits.loss_bytes_per_logit(job) <= 16
