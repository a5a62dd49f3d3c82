"""What `check` says of configurations that people wrote: wrong only where the framework refuses, priced only where
everything that decides the price is known, one finding for one mistake."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from planner.service.checked import CheckRequest
from planner.service.checking import check
from planner.service.requests import ClusterInput
from planner.specs.check import CheckReport
from planner.specs.plan import Breakdown

TITAN = """
[model]
name = "{name}"
flavor = "{flavor}"
converters = {converters}

[training]
local_batch_size = 1
seq_len = 4096

[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8

[activation_checkpoint]
mode = "full"
"""

NANOTRON = """
optimizer: {zero_stage: 0, accumulate_grad_in_fp32: true}
parallelism: {dp: 2, pp: 1, tp: 1, expert_parallel_size: 1}
tokens: {sequence_length: 2048, micro_batch_size: 1, batch_accumulation_per_replica: 1, train_steps: 10}
model:
  dtype: bfloat16
  model_config:
    is_qwen2_config: true
    hidden_size: 1024
    intermediate_size: 2816
    num_hidden_layers: 8
    num_attention_heads: 16
    num_key_value_heads: 16
    vocab_size: 32000
    max_position_embeddings: 2048
    moe_config: {num_experts: 8, top_k: 2, moe_intermediate_size: 1408, layers: [-1]}
"""


def checked(
    folder: Path, gpus: int = 8, model: str | None = "llama-3-8b", advise: bool = False, **files: str
) -> CheckReport:
    """The report on ``files``, whose dots are written as two underscores."""
    paths = []
    for name, text in files.items():
        paths.append(folder / name.replace("__", "."))
        paths[-1].write_text(text, encoding="utf-8")
    asked = CheckRequest(paths=tuple(paths), model=model, cluster=ClusterInput(gpu="h200", gpus=gpus), advise=advise)
    return check(asked)


def leaves(part: Breakdown) -> Iterator[Breakdown]:
    """What the worst of each place is made of."""
    if not part.children:
        yield part
    worst = max(part.children, key=lambda each: each.value, default=None)
    for child in [worst] if part.combine == "max" and worst is not None else part.children:
        yield from leaves(child)


def errors(report: CheckReport) -> list[str]:
    return [finding.id for finding in report.findings if finding.severity == "error"]


def accelerate(**keys: object) -> str:
    config = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "bf16", "num_machines": 1, **keys}
    return yaml.safe_dump(config)


def test_a_limit_of_the_written_files_is_no_mistake_of_others(tmp_path: Path) -> None:
    """torchtitan trains Llama 4 although no registry for it is written: legal, priced, with a warning."""
    text = TITAN.format(name="llama4", flavor="17bx16e", converters="[]")
    report = checked(tmp_path, gpus=64, model=None, train__toml=text)
    assert (report.legal, errors(report)) == (True, [])
    assert report.plan is not None
    told = {finding.id: finding for finding in report.findings}["model-family"]
    assert told.severity == "warning"
    assert "limit of the planner" in told.hint


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("nanotron__yaml", NANOTRON, "model-class"),
        (
            "train__toml",
            TITAN.format(name="deepseek_v3", flavor="16B", converters='["quantize.linear.float8"]').replace(
                "tensor_parallel_degree = 8", "tensor_parallel_degree = 1"
            ),
            "fp8-dense-only",
        ),
    ],
)
def test_what_no_estimate_covers_is_not_priced(tmp_path: Path, name: str, text: str, rule: str) -> None:
    """nanotron builds Qwen2 mixtures, torchtitan converts the dense matrices of one: legal, but not priced."""
    gpus = 2 if "nanotron" in name else 8
    report = checked(tmp_path, gpus=gpus, model=None, advise=False, **{name: text})
    assert rule in {finding.id for finding in report.findings if finding.severity == "warning"}
    assert rule not in errors(report)
    assert report.plan is None
    assert any("no estimate covers" in warning for warning in report.warnings)


def test_other_machines_than_the_files_are_one_finding(tmp_path: Path) -> None:
    """Two processes of context parallelism on eight GPUs: the mesh is wrong, not the sharding inside it."""
    text = accelerate(
        distributed_type="FSDP",
        num_processes=2,
        fsdp_config={"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        parallelism_config={"parallelism_config_cp_size": 2},
    )
    report = checked(tmp_path, a__yaml=text)
    assert errors(report) == ["world-size"]
    assert report.plan is None
    assert checked(tmp_path, gpus=2, a__yaml=text).legal


def test_processes_count_without_the_deepspeed_file(tmp_path: Path) -> None:
    """The stage stands in a file that is not given: no price, but the number of processes is compared."""
    text = accelerate(
        distributed_type="DEEPSPEED", num_processes=4, deepspeed_config={"deepspeed_config_file": "ds.json"}
    ).replace("mixed_precision: bf16\n", "")
    report = checked(tmp_path, gpus=4, a__yaml=text)
    assert (report.legal, report.fits, report.plan) == (True, None, None)
    assert any("sharded" in warning for warning in report.warnings)
    assert errors(checked(tmp_path, gpus=8, a__yaml=text)) == ["world-size"]


def test_a_stated_accumulation_leaves_no_batch_to_assume(tmp_path: Path) -> None:
    """One sequence a micro-batch, one micro-batch a step: 8 sequences on 8 GPUs, and no other number is claimed."""
    text = accelerate(
        distributed_type="DEEPSPEED",
        num_processes=8,
        deepspeed_config={"zero_stage": 3, "gradient_accumulation_steps": 1},
    )
    report = checked(tmp_path, a__yaml=text)
    assert report.plan is not None
    assert report.plan.strategy.global_batch == 8
    assert "job.global_batch" not in {assumption.field for assumption in report.assumptions}


def test_the_loss_of_liger_holds_no_whole_logits(tmp_path: Path) -> None:
    """One flag decides whether 32,768 tokens of 128,256 logits at 14 bytes (55 GiB) exist at once."""
    launcher = accelerate(distributed_type="DEEPSPEED", num_processes=8, deepspeed_config={"zero_stage": 3})
    script = (
        "per_device_train_batch_size: 1\nbf16: true\nmax_length: 32768\ngradient_checkpointing: true\noutput_dir: o\n"
    )
    peaks = {}
    for name, more in (("plain", ""), ("liger", "use_liger_kernel: true\n")):
        report = checked(tmp_path, a__yaml=launcher, sft__yaml=script + more)
        assert report.plan is not None
        peaks[name] = report.plan.estimate.peak_memory_bytes
    logits = 32768 * 128256 * 14
    assert peaks["plain"] - peaks["liger"] > 0.8 * logits


def test_what_is_not_so_on_these_accelerators_is_not_said(tmp_path: Path) -> None:
    """Tensor parallelism without CUDA_DEVICE_MAX_CONNECTIONS=1: refused before Blackwell, fine from there on."""
    script = (
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
        "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 8 --bf16 "
        "--vocab-size 32000 --tensor-model-parallel-size 8 --sequence-parallel --use-distributed-optimizer\n"
    )
    path = tmp_path / "run.sh"
    path.write_text(script, encoding="utf-8")
    said = {}
    for gpu in ("h200", "b200"):
        asked = CheckRequest(paths=(path,), cluster=ClusterInput(gpu=gpu, gpus=8), advise=False)
        said[gpu] = "max-connections" in {finding.id for finding in check(asked).findings}
    assert said == {"h200": True, "b200": False}


@pytest.mark.parametrize(
    ("sections", "stage", "per_parameter"),
    [
        # zero/stage_1_and_2.py: use_grad_accum_attribute is off, so .grad of every parameter is all there is until the
        # step makes an fp32 copy of the rank's partition (single_grad_partition).
        ({"bf16": {"enabled": True}}, 1, 2 + 4 / 8),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}, 1, 2 + 4 / 8),
        ({"fp16": {"enabled": True}}, 1, 2 + 4 / 8),
        # bf16_optimizer.py: fp32_groups_gradients_flat holds the whole group beside .grad.
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, 1, 2 + 4),
        # zero/stage_1_and_2.py: param.grad_accum of every parameter, in fp32.
        ({"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, 1, 2 + 4),
        # zero/stage_1_and_2.py: the rank's partition (all_grad_tensors) and its fp32 copy.
        ({"bf16": {"enabled": True}}, 2, (2 + 4) / 8),
    ],
)  # fmt: skip
def test_gradients_in_the_format_that_deepspeed_sums_them_in(
    tmp_path: Path, sections: dict[str, object], stage: int, per_parameter: float
) -> None:
    """deepspeed 0.19.8, runtime/engine.py, get_data_types: without data_types.grad_accum_dtype gradients are summed in
    the format of the weights, so ZeRO-1 holds 2 bytes of every parameter, not 2 and 4."""
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, **sections}
    report = checked(tmp_path, ds_config__json=json.dumps(config))
    assert report.plan is not None
    held = {part.name: part.value for part in leaves(report.plan.estimate.memory)}["gradients"]
    assert held == pytest.approx(per_parameter * 8_030_261_248, rel=0.01)
    summed = "bf16" in sections and "data_types" not in sections
    assert (not summed) or "bf16-accumulation" in [finding.id for finding in report.findings]


def test_a_step_in_bf16_is_priced_for_what_trains_in_fp32(tmp_path: Path) -> None:
    """The same strategy in the other format, in the words of each framework's file."""
    layout = "--tensor-model-parallel-size 8 --sequence-parallel --micro-batch-size 1 --global-batch-size 64"
    model = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --swiglu --vocab-size 32000"
    script = f"torchrun --nproc_per_node 8 pretrain_gpt.py {model} {layout} --max-position-embeddings 4096"
    report = checked(tmp_path, model=None, advise=True, pretrain__sh=script)
    first = report.improvements[0]
    assert first.change == ("precision bf16 instead of fp32",)
    assert first.settings == ("--bf16",)
    assert first.step_time_change is not None
    assert first.step_time_change < -0.5
    assert report.plan is not None
    assert first.plan.estimate.peak_memory_bytes < report.plan.estimate.peak_memory_bytes
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    report = checked(tmp_path, advise=True, ds_config__json=json.dumps(config))
    told = {change.change: change.settings for change in report.improvements}
    assert "bf16.enabled: true" in told["precision bf16 instead of fp32",]


@pytest.mark.parametrize(("nodes", "each", "size"), [(1, 4, 8), (2, 4, 4), (4, 2, 2), (1, 16, 16)])
def test_processes_of_one_node_are_not_its_size(tmp_path: Path, nodes: int, each: int, size: int) -> None:
    """A job inside one node is priced on the reference's whole node, as ``suggest`` prices it: the same host memory."""
    model = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --swiglu --vocab-size 32000"
    script = f"torchrun --nnodes {nodes} --nproc_per_node {each} pretrain_gpt.py {model} --bf16 --micro-batch-size 1"
    (tmp_path / "pretrain.sh").write_text(script + " --global-batch-size 64", encoding="utf-8")
    report = check(CheckRequest(paths=(tmp_path / "pretrain.sh",), cluster=ClusterInput(gpu="h200"), advise=False))
    assert report.request is not None
    assert report.request.cluster.gpus == nodes * each
    assert report.request.cluster.gpus_per_node == size


GPT = "--hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000"


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        # megatron/training/arguments.py, validate_args: assert not args.bf16, under if args.fp16.
        ("--num-layers 32 --bf16 --fp16 --micro-batch-size 1 --global-batch-size 64", ["two-formats"]),
        # The same: required_args.
        ("--bf16 --micro-batch-size 1 --global-batch-size 64", ["argument-missing"]),
        ("--num-layers 32 --bf16 --micro-batch-size 5 --global-batch-size 64", ["batch-divisible"]),
        ("--num-layers 32 --bf16 --tensor-model-parallel-size 3 --micro-batch-size 1", ["world-size"]),
        ("--num-layers 32 --bf16 --micro-batch-size 1 --global-batch-size 64", []),
    ],
)
def test_one_mistake_of_a_script_is_one_error(tmp_path: Path, flags: str, found: list[str]) -> None:
    """What Megatron-LM refuses is refused, and once."""
    script = f"torchrun --nproc_per_node 8 pretrain_gpt.py {GPT} {flags}"
    wrong = errors(checked(tmp_path, model=None, pretrain__sh=script))
    assert [each for each in wrong if each != "gpu-memory"] == found


def test_gpus_that_fill_no_nodes_are_a_finding_of_the_file(tmp_path: Path) -> None:
    """Degrees of nine ranks, six of which are started: the file is wrong, not an option; and --gpus 8 is eight GPUs of
    one node, whatever was started on it before."""
    script = f"torchrun --nproc_per_node 6 pretrain_gpt.py --num-layers 32 {GPT} --bf16 --micro-batch-size 1"
    (tmp_path / "pretrain.sh").write_text(script + " --global-batch-size 48", encoding="utf-8")
    asked = CheckRequest(paths=(tmp_path / "pretrain.sh",), cluster=ClusterInput(gpu="h200", gpus=8), advise=False)
    report = check(asked)
    assert report.request is not None
    assert (report.request.cluster.gpus, report.request.cluster.gpus_per_node) == (8, 8)
