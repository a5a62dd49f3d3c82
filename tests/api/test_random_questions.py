"""Questions drawn at random, most of which make sense: every one is answered, or refused with a place and a hint."""

from __future__ import annotations

from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.backends import BACKENDS
from tests.api.questions import problem_of
from tests.api.test_wording import COMMANDS

MODELS = ("1b", "8b", "70b", "405b", "mixtral-8x7b", "deepseek-v3", "nemotron-h-8b", "gpt2-124m", "qwen3-next-80b-a3b")
GPUS = ("h100", "a100-40gb", "v100", "b200", "mi300x", "l4", "cpu", "tpu-v5p", "gaudi3", "gb200-nvl72")
DEGREES = st.sampled_from((1, 2, 3, 4, 8, 16, 64, 999_983))


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any of the fields."""
    return st.fixed_dictionaries({}, optional=fields)


STRATEGIES = some(
    **dict.fromkeys(("tp", "pp", "vpp", "cp", "ep", "etp", "shard_degree", "micro_batch"), DEGREES),
    zero_stage=st.integers(0, 3),
    sequence_parallel=st.booleans(),
    schedule=st.sampled_from(("1f1b", "gpipe", "interleaved", "zero-bubble", "dualpipe")),
    recompute=st.sampled_from(("none", "selective", "full", "full:1", "selective:mlp", "full:999")),
    offload=st.sampled_from(("none", "cpu", "nvme", "cpu:0.5", "cpu+parameters")),
    layers_per_stage=st.lists(st.integers(0, 100), max_size=8),
)
SITUATIONS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(MODELS),
        "cluster": st.fixed_dictionaries(
            {"gpu": st.sampled_from(GPUS), "gpus": st.sampled_from((1, 2, 8, 64, 72, 1024, 16_384, 1_000_000))},
            optional={
                "nic_gbps": st.sampled_from((0.001, 100, 100_000)),
                "memory_gib_per_gpu": st.sampled_from((0.001, 80, 100_000)),
                "domain_gpus": st.sampled_from((1, 3, 72, 100_000)),
                "oversubscription": st.sampled_from((1, 1000)),
            },
        ),
    },
    optional={
        "backend": st.sampled_from((*BACKENDS, "auto")),
        "job": some(
            seq_len=st.sampled_from((1, 7, 4096, 131_072, 100_000_000)),
            global_batch=st.sampled_from((1, 7, 512, 100_000_000, "4M", "4Mi", "1k")),
            precision=st.sampled_from(("bf16", "fp16", "fp32", "fp8", "nvfp4")),
            loss=st.sampled_from(("auto", "eager", "fused", "chunked")),
            flash_attention=st.booleans(),
            memory_margin=st.sampled_from((0.0, 0.5, 0.95)),
        ),
    },
)


@settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(SITUATIONS, STRATEGIES)
def test_every_estimate_is_answered(api: httpx.Client, situation: dict[str, Any], strategy: dict[str, Any]) -> None:
    answer = api.post("/v1/estimates", json={**situation, "strategy": strategy})
    if answer.status_code == 200:
        told = answer.json()["best"]["estimate"]
        assert told["step_time_s"] > 0
        assert told["peak_memory_bytes"] > 0
        return
    told = problem_of(answer, 422)
    assert told["errors"], told
    assert told["hint"], told
    assert not COMMANDS.search(str(told)), told
