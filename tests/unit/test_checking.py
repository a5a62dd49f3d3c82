"""What `check` says of configurations that people wrote: wrong only where the framework refuses, priced only where
everything that decides the price is known, one finding for one mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from planner.service.checking import CheckRequest, check
from planner.service.requests import ClusterInput
from planner.specs.check import CheckReport

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


def checked(folder: Path, gpus: int = 8, model: str | None = "llama-3-8b", **files: str) -> CheckReport:
    """The report on ``files``, whose dots are written as two underscores."""
    paths = []
    for name, text in files.items():
        paths.append(folder / name.replace("__", "."))
        paths[-1].write_text(text, encoding="utf-8")
    asked = CheckRequest(paths=tuple(paths), model=model, cluster=ClusterInput(gpu="h200", gpus=gpus), advise=False)
    return check(asked)


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
    report = checked(tmp_path, gpus=gpus, model=None, **{name: text})
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
