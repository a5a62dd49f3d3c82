"""Single decisions of the renderers that whole-file comparison would not explain."""

from __future__ import annotations

import json
import re

import pytest

from planner.backends import BACKENDS
from planner.backends import deepspeed as deepspeed_backend
from planner.backends.megatron_rules import FROM_BLACKWELL
from planner.catalog import load_accelerator
from planner.render import render_plan
from planner.render.megatron import layout_string
from planner.render.megatron_model import _runs
from planner.render.topology import Axis, Topology, node_table
from planner.specs.strategy import Recompute, Strategy
from tests.golden.plans import CASES, LLAMA_8B, accelerator, document
from tests.random_plans import plan_document
from tests.strategies import machines, question

ONE_JOB = {"seq_len": 2048, "global_batch": 8}
ONE_NODE = {"dp": 4, "zero_stage": 1, "shard_degree": 4}
HOPPER, BLACKWELL, CDNA = ("h100", "hopper"), ("b200", "blackwell"), ("mi300x", "cdna3", "amd")


@pytest.mark.parametrize(
    ("layers", "mtp", "text"),
    [((2, 1), 0, "Et*2|tL"), ((1, 0), 1, "Et|mL"), ((0, 3, 1), 2, "E|t*3|tm*2L"), ((5,), 0, "Et*5L")],
    ids=["two-stages", "empty-last-stage-with-mtp", "empty-first-stage", "one-stage"],
)
def test_layout_string(layers: tuple[int, ...], mtp: int, text: str) -> None:
    """Embedding first, then layers, prediction blocks before the loss."""
    assert layout_string(layers, mtp) == text


@pytest.mark.parametrize(
    ("bits", "text"),
    [([0, 0, 0, 1, 1], "([0]*3+[1]*2)"), ([0, 1] * 3, "([0]+[1])*3"), ([1, 0, 0], "([1]+[0]*2)")],
    ids=["dense-first", "alternating", "once"],
)
def test_layer_patterns_evaluate_to_themselves(bits: list[int], text: str) -> None:
    """The list expression is short and means the same list."""
    assert _runs(bits) == text
    assert eval(_runs(bits)) == bits


@pytest.mark.parametrize(
    ("degrees", "device", "wanted"),
    [
        ({"tp": 2, "sequence_parallel": True}, HOPPER, True),
        ({"cp": 2}, HOPPER, True),
        ({}, HOPPER, False),
        ({"tp": 2, "sequence_parallel": True}, BLACKWELL, False),
        ({"tp": 2, "sequence_parallel": True}, CDNA, True),
    ],
    ids=["tensor", "context", "data-only", "blackwell", "amd"],
)
def test_one_hardware_queue_only_where_megatron_wants_it(
    degrees: dict[str, int], device: tuple[str, ...], wanted: bool
) -> None:
    """CUDA_DEVICE_MAX_CONNECTIONS is 1 for tensor or context parallelism before Blackwell, and absent otherwise."""
    files = render_plan(document("megatron", {**ONE_NODE, **degrees}, model=LLAMA_8B, device=accelerator(*device)))
    assert ("export CUDA_DEVICE_MAX_CONNECTIONS=1" in files["launch.sh"]) == wanted


@pytest.mark.parametrize(
    ("device", "recipe"), [(HOPPER, "tensorwise"), (BLACKWELL, "mxfp8")], ids=["hopper", "blackwell"]
)
def test_fp8_recipe_follows_the_architecture(device: tuple[str, ...], recipe: str) -> None:
    """Current scaling on Hopper, block scaling on Blackwell."""
    files = render_plan(
        document("megatron", ONE_NODE | {"precision": "fp8"}, model=LLAMA_8B, device=accelerator(*device))
    )
    assert f"--fp8-recipe {recipe}" in files["megatron_args.sh"]


def test_optimizer_instances_follow_the_shard_degree() -> None:
    """A shard group smaller than the data-parallel group means several optimizer instances."""
    files = render_plan(document("megatron", {"dp": 16, "zero_stage": 1, "shard_degree": 8}, model=LLAMA_8B))
    assert "--num-distributed-optimizer-instances 2" in files["megatron_args.sh"]


def test_full_recompute_of_all_layers_is_uniform() -> None:
    """All layers need no count that would have to match the stages."""
    files = render_plan(document("megatron", ONE_NODE, model=LLAMA_8B, recompute=Recompute(mode="full")))
    assert "--recompute-method uniform\n  --recompute-num-layers 1" in files["megatron_args.sh"]


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("deepspeed")])
def test_deepspeed_configuration_matches_the_estimate(name: str) -> None:
    """The batch is micro-batch and accumulation only, and buckets are those that the memory estimate counts."""
    case = CASES[name].document
    config, strategy = json.loads(render_plan(case)["ds_config.json"]), case.best.strategy
    assert "train_batch_size" not in config
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * strategy.dp == 512
    zero = config["zero_optimization"]
    assert zero["reduce_bucket_size"] == deepspeed_backend.bucket_elements(case.request.model.hidden)
    assert ("tensor_parallel" in config) == (strategy.tp > 1)
    assert ("offload_optimizer" in zero) == (strategy.offload.device != "none")


@pytest.mark.parametrize(("stage", "dtype"), [(0, None), (1, "fp32"), (3, "fp32")], ids=["zero0", "zero1", "zero3"])
def test_gradients_accumulate_as_the_estimate_assumes(stage: int, dtype: str | None) -> None:
    """bf16 gradients accumulate in fp32 from stage 1 on; at stage 0 DeepSpeed has no such thing."""
    shard = 4 if stage else 1
    files = render_plan(document("deepspeed", {"dp": 4, "zero_stage": stage, "shard_degree": shard}, model=LLAMA_8B))
    assert json.loads(files["ds_config.json"]).get("data_types", {}).get("grad_accum_dtype") == dtype


def test_topology_counts_the_first_axis_fastest() -> None:
    """Neighbouring ranks differ in the first axis; groups of the last one are far apart."""
    grid = Topology((Axis("tp", 4, ""), Axis("dp", 2, ""), Axis("pp", 3, "")), 8)
    assert grid.kind("tp").ranks(5) == [4, 5, 6, 7]
    assert grid.kind("dp").ranks(5) == [1, 5]
    assert grid.kind("pp").ranks(5) == [5, 13, 21]
    assert [grid.kind(name).coordinate(13) for name in ("tp", "dp", "pp")] == [1, 1, 1]


def test_long_node_tables_are_cut_in_the_middle() -> None:
    """A thousand GPUs do not make a README of a hundred rows; the last node is always there."""
    text = node_table(Topology((Axis("tp", 8, ""), Axis("dp", 128, "")), 8))
    assert len(text.splitlines()) < 25
    assert "1016-1023" in text
    assert "| ..." in text


def test_readme_says_when_the_plan_does_not_fit() -> None:
    """Rendering a strategy that is over the limit is possible, and the guide says what will happen."""
    case = CASES["fsdp-full"].document
    over = case.best.estimate.model_copy(update={"peak_memory_bytes": 2 * case.best.estimate.memory_limit_bytes})
    files = render_plan(case, plan=case.best.model_copy(update={"estimate": over}))
    assert "above the limit" in files["README.md"]


def test_amd_machines_are_told_their_own_commands() -> None:
    """The guide for AMD GPUs names no NVIDIA tool."""
    text = render_plan(document("fsdp", {**ONE_NODE, "zero_stage": 3}, model=LLAMA_8B, device=accelerator(*CDNA)))
    assert "rocm-smi" in text["README.md"]
    assert "nvidia" not in text["README.md"].lower()


def test_catalogue_architectures_are_spelt_as_the_renderer_expects() -> None:
    """The catalogue's Blackwell entries are the ones that need no hardware-queue limit."""
    assert load_accelerator("b200").architecture in FROM_BLACKWELL
    assert load_accelerator("h100").architecture not in FROM_BLACKWELL


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_gpu_is_said_as_one(backend: str) -> None:
    """No file of a job on one GPU speaks of "1 GPUs" or "1 ranks"."""
    batch = {"micro_batch": 1, "grad_accum": 8, "global_batch": 8, "seq_len": 2048}
    one = Strategy.model_validate({**batch, "layers_per_stage": (16,), "pipeline_schedule": "none"})
    files = render_plan(plan_document(question("llama-3.2-1b", machines("h100", 1), backend, **ONE_JOB), one))
    for name, text in files.items():
        assert name == "plan.json" or not re.search(r"\b1 (GPUs|ranks|nodes|processes)\b", text), name
