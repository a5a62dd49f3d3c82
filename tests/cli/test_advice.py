"""What check and diagnose advise: one change at a time, in the framework's words, with the gain that following it has;
causes that explain the measured speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.search.engine import feasible
from planner.search.outcome import Outcome
from tests.cli.conftest import Cli

ZERO3: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}
SEVEN = ("--model", "llama-2-7b", "--gpu", "h100", "--gpus", "8", "--seq-len", "4096", "--recompute", "full")
MEGATRON = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nproc_per_node 8 --nnodes 16 pretrain_gpt.py \\
  --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 \\
  --group-query-attention --num-query-groups 8 --vocab-size 32000 --seq-length 4096 --max-position-embeddings 4096 \\
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \\
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --use-flash-attn --bf16 \\
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 512 \\
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \\
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
"""


@pytest.fixture
def zero3(tmp_path: Path) -> Callable[..., str]:
    """A ZeRO-3 file with changes to its sections."""

    def write(**changes: Any) -> str:
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps(ZERO3 | changes), encoding="utf-8")
        return str(path)

    return write


def megatron(tmp_path: Path, *changes: tuple[str, str]) -> str:
    text = MEGATRON
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "pretrain.sh"
    path.write_text(text, encoding="utf-8")
    return str(path)


def ids(found: Any) -> list[str]:
    return [each["id"] for each in found]


# --- Single changes


def test_a_change_changes_nothing_else(cli: Cli, tmp_path: Path) -> None:
    """Layers of the stages, recomputed layers and sharding groups stay, unless they are what is freed."""
    document = cli("check", megatron(tmp_path), "--gpu", "h100", "--json").document
    changes = {change["change"][0].split(" ", 1)[0]: change for change in document["improvements"]}
    assert changes["micro_batch"]["change"] == ["micro_batch 2 instead of 1"]
    assert changes["sequence_parallel"]["change"] == ["sequence_parallel on instead of off"]
    assert not any("None" in text for change in changes.values() for text in change["change"])


FOLLOWED = {
    "micro_batch": (("--micro-batch-size 1", "--micro-batch-size 2"),),
    "recompute": (("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \\", "\\"),),
    "tp": (("--tensor-model-parallel-size 8", "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap"),),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_following_a_change_brings_what_it_promises(cli: Cli, tmp_path: Path, name: str) -> None:
    """The settings that are told, written into the file, give the promised step time and memory."""
    document = cli("check", megatron(tmp_path), "--gpu", "h100", "--json").document
    change = next(each for each in document["improvements"] if each["change"][0].startswith(f"{name} "))
    written = " ".join(new for _, new in FOLLOWED[name])
    assert all(setting in written or setting.startswith("leave out") for setting in change["settings"])
    after = cli("check", megatron(tmp_path, *FOLLOWED[name]), "--gpu", "h100", "--json").document
    for figure in ("step_time_s", "peak_memory_bytes"):
        assert after["plan"]["estimate"][figure] == pytest.approx(change["plan"]["estimate"][figure], rel=1e-6)


def test_settings_to_leave_out(cli: Cli, tmp_path: Path) -> None:
    """What has to go is named when the file has it."""
    document = cli("check", megatron(tmp_path), "--gpu", "h100", "--json").document
    change = next(each for each in document["improvements"] if each["change"][0].startswith("recompute "))
    assert change["settings"] == [
        f"leave out --recompute-{name}" for name in ("granularity", "method", "num-layers")
    ]  # fmt: skip


def test_offload_of_weights_is_told(cli: Cli, zero3: Callable[..., str]) -> None:
    """A change that brings weights back from the host says so, in both vocabularies."""
    sections = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    path = zero3(zero_optimization={"stage": 3, **sections})
    asked = ("--model", "gpt3-1.3b", "--gpu", "3090", "--gpus", "1", "--seq-len", "1024")
    change = cli("check", path, *asked, "--json").document["improvements"][0]
    assert change["change"][0].endswith("instead of 100% of the optimizer to cpu and the weights to cpu")
    assert "leave out zero_optimization.offload_param.device" in change["settings"]


def test_no_setting_cures_an_illegal_strategy(cli: Cli, zero3: Callable[..., str]) -> None:
    """28 heads over 8 ranks: other degrees are advised, buffers are not."""
    path = zero3(zero_optimization={"stage": 1}, tensor_parallel={"autotp_size": 8})
    asked = ("--model", "qwen2.5-7b", "--gpu", "a100", "--gpus", "8", "--seq-len", "2048")
    result = cli("check", path, *asked, "--json")
    assert result.code == 3
    assert result.document["improvements"]
    assert all(change["change"][0].startswith("tp ") for change in result.document["improvements"])
    assert "legal and fits" in cli("check", path, *asked).out


def test_the_costliest_waste_is_named_first(cli: Cli, zero3: Callable[..., str]) -> None:
    """Recomputation costs a quarter of the step, ZeRO-3 inside a node a percent."""
    found = cli("check", zero3(), *SEVEN, "--json").document["findings"]
    assert [each for each in ids(found) if each.endswith("-not-needed")] == [
        "recompute-not-needed",
        "sharding-not-needed",
    ]


def test_suggested_plan_in_the_words_of_the_file(cli: Cli, tmp_path: Path) -> None:
    """The whole way from the file to the best plan, which is no worse than any single change."""
    document = cli("check", megatron(tmp_path), "--gpu", "h100", "--suggest", "--json").document
    best = document["suggested"]["estimate"]["step_time_s"]
    assert all(best <= change["plan"]["estimate"]["step_time_s"] for change in document["improvements"])
    assert "--sequence-parallel" in document["suggested_settings"]
    assert "leave out --recompute-granularity" in document["suggested_settings"]


# --- Exit codes


def test_not_priced_on_named_machines_is_no_success(cli: Cli, zero3: Callable[..., str]) -> None:
    """A pipeline that asks whether it fits must not pass because something was missing."""
    assert cli("check", zero3(), "--gpu", "h100").code == 2
    assert cli("check", zero3()).code == 0


# --- Measured speeds


def diagnosis(cli: Cli, path: str, *asked: str, measured: float) -> dict[str, Any]:
    result = cli("diagnose", path, *asked, "--measured-tokens-per-s", str(measured), "--json")
    assert result.code == 0
    told: dict[str, Any] = result.document["diagnosis"]
    return told


def test_mfu_says_of_what(cli: Cli, zero3: Callable[..., str]) -> None:
    """By hand: 6 FLOPs for each of 6.607e9 weights (all but the embedding) and causal attention, over 989.4
    TFLOP/s."""
    told = diagnosis(cli, zero3(), *SEVEN, measured=40_000)
    per_token = 6 * (6.738e9 - 32000 * 4096) + 6 * 32 * 4096 * 4096
    assert told["model_flops_per_s_per_gpu"] == pytest.approx(per_token * 40_000 / 8, rel=2e-3)
    assert told["peak_flops_per_s_per_gpu"] == pytest.approx(989.4e12, rel=1e-3)
    assert told["mfu"] == pytest.approx(per_token * 40_000 / 8 / 989.4e12, rel=2e-3)
    printed = cli("diagnose", zero3(), *SEVEN, "--measured-tokens-per-s", "40000").out
    assert "of 989.4 TFLOP/s a GPU (bf16, dense" in printed


def test_a_figure_of_one_gpu_need_not_match_exactly(cli: Cli, zero3: Callable[..., str]) -> None:
    """foundation-model-stack/fms-fsdp#89: 9,600 tokens/s of a GPU, faster than this file expects because nothing was
    computed again there; the machine is asked about after it."""
    told = diagnosis(cli, zero3(), *SEVEN, measured=9_600)
    assert ids(told["causes"])[0] == "figure-per-gpu"
    assert "slow-gpu" in ids(told["causes"])


def test_a_run_that_should_not_fit(cli: Cli, zero3: Callable[..., str]) -> None:
    """What was measured is not what the file says where the file does not fit."""
    asked = ("--model", "llama-2-70b", "--gpu", "a100", "--gpus", "8", "--seq-len", "2048")
    told = diagnosis(cli, zero3(), *asked, measured=3_000)
    assert ids(told["causes"])[0] == "should-not-have-run"


def test_impossible_speed(cli: Cli, zero3: Callable[..., str]) -> None:
    """More FLOPs than the GPU has."""
    told = diagnosis(cli, zero3(), *SEVEN, measured=250_000)
    assert told["mfu"] > 1
    assert "faster-than-the-peak" in ids(told["causes"])


def test_what_the_file_says_wrong_is_told_at_any_speed(cli: Cli, tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#1000: fp32 explains a slow run that is exactly as fast as fp32 can be."""
    path = megatron(tmp_path, (" --bf16", ""), ("--tensor", "--sequence-parallel --tensor"))
    expected = cli("check", path, "--gpu", "h100", "--no-advise", "--json").document["plan"]["estimate"]["tokens_per_s"]
    told = diagnosis(cli, path, "--gpu", "h100", measured=expected)
    assert told["as_expected"] is True
    assert "fp32-training" in ids(told["causes"])


def test_slow_optimizer_on_the_host(cli: Cli, zero3: Callable[..., str]) -> None:
    """deepspeedai/DeepSpeed#1635: 23 of 24 s went into CPU Adam of 1.3B parameters."""
    path = zero3(gradient_accumulation_steps=1, zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}})
    asked = ("--model", "gpt3-1.3b", "--gpu", "3090", "--gpus", "1", "--seq-len", "1024", "--recompute", "full")
    told = diagnosis(cli, path, *asked, measured=1024 / 24)
    assert {"slow-host-optimizer", "outside-the-step"} <= set(ids(told["causes"]))


# --- Files that do not belong together


@pytest.fixture
def two(tmp_path: Path, zero3: Callable[..., str]) -> tuple[str, str]:
    """A DeepSpeed file and a Megatron-LM script."""
    return zero3(), megatron(tmp_path)


def test_files_of_two_frameworks_are_refused(cli: Cli, two: tuple[str, str], tmp_path: Path) -> None:
    """Which of them is meant is not guessed, for files and for a folder; --format decides."""
    for asked in (two, (str(tmp_path),)):
        result = cli("check", *asked, "--json")
        assert result.code == 2
        error = result.document["error"]
        assert error["message"] == "these files belong to several frameworks"
        assert "ds_config.json: DeepSpeed" in error["got"]
        assert "pretrain.sh: Megatron-LM" in error["got"]
    assert cli("check", *two, "--format", "megatron-arguments", "--json").document["backend"] == "megatron"


def test_two_configurations_of_one_framework_are_refused(cli: Cli, tmp_path: Path, zero3: Callable[..., str]) -> None:
    """Not the alphabetically first, and not the last of two with the same name."""
    path = Path(zero3())
    (tmp_path / "other.json").write_text(json.dumps(ZERO3 | {"zero_optimization": {"stage": 2}}), encoding="utf-8")
    error = cli("check", str(tmp_path), "--json").document["error"]
    assert error["message"] == "2 of these files are a configuration each"
    same = tmp_path / "elsewhere" / path.name
    same.parent.mkdir()
    same.write_text(json.dumps(ZERO3 | {"zero_optimization": {"stage": 1}}), encoding="utf-8")
    error = cli("check", str(path), str(same), "--json").document["error"]
    assert error["message"] == "2 of these files are a configuration each"
    assert "elsewhere" in error["where"]


def test_an_empty_file_is_called_so(cli: Cli, tmp_path: Path) -> None:
    """Not a list of ten formats."""
    path = tmp_path / "empty.json"
    path.write_text("\n", encoding="utf-8")
    assert "there is nothing in it" in cli("check", str(path)).err


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("job.yaml", "parallelism:\n  dp: 1\n   tp: 2\n", "this is not YAML"),
        ("ds.json", '{"stages": [1, 2}', "ds.json:1"),
        ("job.toml", "[model]\nname = = 3\n", "this is not TOML"),
    ],
)
def test_a_malformed_file_is_called_so(cli: Cli, tmp_path: Path, name: str, text: str, said: str) -> None:
    """With the line, instead of a list of formats of which it is none."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    result = cli("check", str(path))
    assert result.code == 2
    assert said in result.err
    assert "no training configuration" not in result.err


def test_paths_that_the_system_refuses(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name too long, a folder that may not be listed: bad input, not our bug."""
    assert cli("check", "a" * 5000).code == 2
    assert cli("render", "--from", "a" * 5000).code == 2

    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    refused = cli("check", str(tmp_path))
    assert refused.code == 2
    assert "Permission denied" in refused.err


def test_standard_input(zero3: Callable[..., str]) -> None:
    """A configuration may come through a pipe."""
    command = [sys.executable, "-m", "planner", "check", "-", "--json"]
    text = Path(zero3()).read_bytes()
    done = subprocess.run(command, input=text, capture_output=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["backend"] == "deepspeed"


def test_names_of_frameworks_are_not_broken(cli: Cli) -> None:
    """They are what people type."""
    assert "\naccelerate-deepspeed " in cli("backends").out


# --- Ctrl-C


def test_one_interrupt_ends_the_check(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that Ctrl-C ended gives no finding and no advice: nothing is printed as if it were the whole answer."""
    found = Outcome("feasible", None, interrupted=True)
    with monkeypatch.context() as patched:
        patched.setattr("planner.service.advice.search", lambda *_, **__: found)
        assert cli("check", megatron(tmp_path), "--gpu", "h100").code == 130
    monkeypatch.setattr("planner.search.engine._Run.search", lambda _: found)
    with pytest.raises(KeyboardInterrupt):
        feasible(None, None)  # type: ignore[arg-type]


# --- Verdicts


def test_a_format_without_matrix_units_is_a_finding(cli: Cli, zero3: Callable[..., str]) -> None:
    """hiyouga/LlamaFactory#2931: V100 has no bf16; that is said beside everything else, priced as fp16."""
    v100 = ("--model", "llama-2-7b", "--gpu", "v100-sxm2-32gb", "--gpus", "8", "--seq-len", "1024")
    result = cli("check", zero3(), *v100, "--recompute", "full", "--json")
    assert result.code == 3
    told = next(each for each in result.document["findings"] if each["id"] == "precision-without-units")
    assert told["allowed"] == "fp16, fp32"
    assert result.document["plan"]["strategy"]["precision"] == "fp16"
    after = cli("check", zero3(bf16={"enabled": False}, fp16={"enabled": True}), *v100, "--json")
    assert "precision-without-units" not in ids(after.document["findings"])


def test_what_only_the_range_exceeds_may_fit(cli: Cli, zero3: Callable[..., str]) -> None:
    """InternLM/InternLM#22 ran what the upper end of the range puts beyond the GPU: the word says how sure it is."""
    asked = ("--gpu", "a100", "--gpus", "8", "--seq-len", "2048", "--recompute", "full")
    for model, verdict in (("llama-2-7b", ", fits"), ("llama-2-70b", "DOES NOT FIT")):
        assert verdict in cli("check", zero3(), "--model", model, *asked, "--no-advise").out

    def check_of(micro: int) -> Any:
        path = zero3(train_micro_batch_size_per_gpu=micro)
        return cli("check", path, "--model", "llama-2-7b", *asked, "--no-advise", "--json").document

    close = next(micro for micro in range(1, 200) if not check_of(micro)["fits"])
    estimate = check_of(close)["plan"]["estimate"]
    assert estimate["peak_memory_bytes"] <= estimate["memory_limit_bytes"] < estimate["peak_memory_range_bytes"][1]
    path = zero3(train_micro_batch_size_per_gpu=close)
    assert "MAY NOT FIT" in cli("check", path, "--model", "llama-2-7b", *asked, "--no-advise").out


def test_memory_levers_are_the_frameworks(cli: Cli, tmp_path: Path) -> None:
    """Megatron-LM shards the optimizer with pipeline stages, too; nothing is said of what it cannot do."""
    whole = ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", "--no-rope-fusion")
    path = megatron(tmp_path, ("parallel-size 8 --micro", "parallel-size 2 --micro"), whole)
    document = cli("check", path, "--gpu", "h100", "--no-advise", "--json").document
    told = next(each for each in document["findings"] if each["id"] == "gpu-memory")
    assert told["hint"].startswith("shard the optimizer, too (ZeRO 1)")
    assert "offload" not in told["hint"]


def test_sequence_parallelism_is_the_first_lever(cli: Cli, tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#1031: the activations that did not fit were those that every rank repeated."""
    path = megatron(
        tmp_path,
        ("--seq-length 4096 --max-position-embeddings 4096", "--seq-length 8192 --max-position-embeddings 8192"),
        ("parallel-size 8 --micro", "parallel-size 2 --micro"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \\", "\\"),
    )
    document = cli("check", path, "--gpu", "h100", "--no-advise", "--json").document
    told = next(each for each in document["findings"] if each["id"] == "gpu-memory")
    assert told["hint"].startswith("activations are the largest part: sequence parallelism, recomputation")


ACCELERATE = """distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_activation_checkpointing: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: {efficient}
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""


@pytest.mark.parametrize(("efficient", "gib", "code"), [("false", "256", 3), ("true", "256", 0), ("false", "1024", 0)])
def test_every_process_loading_the_model(cli: Cli, tmp_path: Path, efficient: str, gib: str, code: int) -> None:
    """inclusionAI/AReaL#1182: 8 x 64 GB of a 32B model on a node of 256 GB die while loading; one copy does not."""
    path = tmp_path / "accelerate.yaml"
    path.write_text(ACCELERATE.format(efficient=efficient), encoding="utf-8")
    asked = ("--model", "qwen2.5-32b", "--gpu", "h200", "--seq-len", "2048", "--global-batch", "8", "--no-advise")
    result = cli("check", str(path), *asked, "--host-memory-gib", gib, "--json")
    assert result.code == code
    assert result.document["fits"] is (code == 0)
    told = [each for each in result.document["findings"] if each["id"] == "load-memory"]
    assert len(told) == (code == 3)
    if told:
        assert told[0]["got"] == "8 * 61.0 GiB in 16 bits"
        assert "fsdp_cpu_ram_efficient_loading: true" in told[0]["hint"]


def test_one_replica_makes_no_fuss_of_the_optimizer(cli: Cli, tmp_path: Path) -> None:
    """Nothing is sharded over one replica, with the distributed optimizer or without it."""
    whole = (" --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", " --no-rope-fusion")
    for nodes, gpus, severities in (("8", 64, []), ("$NODES", 64, ["note"]), ("16", 128, ["warning"])):
        path = megatron(tmp_path, ("--nnodes 16", f"--nnodes {nodes}"), whole)
        asked = ("--gpu", "h200", "--gpus", str(gpus), "--no-advise", "--json")
        found = cli("check", path, *asked).document["findings"]
        assert [each["severity"] for each in found if each["id"] == "distributed-optimizer-off"] == severities


def test_gradients_that_wait_unsharded_are_counted(cli: Cli, tmp_path: Path) -> None:
    """The Trainer's accumulation over FSDP keeps 2 bytes of every parameter on each GPU, not of two blocks; the setting
    that is told frees them."""
    path, arguments = tmp_path / "accelerate.yaml", tmp_path / "training_arguments.json"
    path.write_text(ACCELERATE.format(efficient="true"), encoding="utf-8")
    asked = ("--model", "llama-3.1-8b", "--gpu", "a100", "--seq-len", "4096", "--no-advise", "--json")

    def peak(**more: Any) -> float:
        stated = {"per_device_train_batch_size": 1, "bf16": True, "gradient_accumulation_steps": 8}
        arguments.write_text(json.dumps(stated | more), encoding="utf-8")
        document = cli("check", str(path), str(arguments), *asked).document
        return float(document["plan"]["estimate"]["peak_memory_bytes"])

    waiting = 2 * (8.03e9 - 2 * 8.03e9 / 34)
    frugal = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    assert peak() - peak(**frugal) == pytest.approx(waiting, rel=0.1)
    assert peak(gradient_accumulation_steps=1) == pytest.approx(peak(**frugal), rel=1e-6)
