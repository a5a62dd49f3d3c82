"""What people asked in public threads, put to the product: it must say what the thread (or the arithmetic) settled.

Each test names its thread as repository#number; the configurations in tests/data/cases are written for the test from
what the thread tells. Figures are those of the thread, with the tolerance that the kind of figure allows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner import service
from planner.errors import InfeasibleError, InputError
from planner.service import CheckRequest, ClusterInput, JobInput, PlanRequest, StrategyInput
from planner.service.parts import summands, time_parts
from planner.specs.check import CheckFinding, CheckReport
from planner.specs.plan import Breakdown, Plan, PlanDocument
from planner.units import GIB

DATA = Path(__file__).parents[1] / "data" / "cases"


def check(
    name: str | Path, gpu: str, gpus: int | None = None, *, model: str | None = None, **options: object
) -> CheckReport:
    """``planner check`` of a file; options of the machines, the job and the check by name."""
    machines = {key: options.pop(key) for key in ("gpus_per_node", "host_memory_gib") if key in options}
    job = {key: options.pop(key) for key in ("seq_len", "global_batch") if key in options}
    return service.check(
        CheckRequest(
            paths=(DATA / name,),
            model=model,
            cluster=ClusterInput(gpu=gpu, gpus=gpus, **machines),  # type: ignore[arg-type]
            job=JobInput(**job),  # type: ignore[arg-type]
            **options,  # type: ignore[arg-type]
        )
    )


def edited(tmp_path: Path, name: str, *changes: tuple[str, str]) -> Path:
    """A copy of a case's file with changes, each of which must apply."""
    text = (DATA / name).read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def estimate(model: str, gpu: str, gpus: int, backend: str = "megatron", **options: object) -> PlanDocument:
    """``planner estimate``; options of machines, job and strategy by name."""
    machines = {key: options.pop(key) for key in ("gpus_per_node", "host_memory_gib") if key in options}
    names = ("seq_len", "global_batch", "precision", "loss", "flash_attention")
    job = {key: options.pop(key) for key in names if key in options}
    return service.estimate(
        model,
        ClusterInput(gpu=gpu, gpus=gpus, **machines),  # type: ignore[arg-type]
        JobInput(**job),  # type: ignore[arg-type]
        StrategyInput(**options),  # type: ignore[arg-type]
        backend=backend,
    )


def suggest(
    model: str, gpu: str, gpus: int, backend: str = "auto", pins: tuple[str, ...] = (), **options: object
) -> Plan:
    """The best plan."""
    machines = {key: options.pop(key) for key in ("gpus_per_node", "host_memory_gib") if key in options}
    return service.suggest(
        PlanRequest(
            model=model,
            cluster=ClusterInput(gpu=gpu, gpus=gpus, **machines),  # type: ignore[arg-type]
            job=JobInput(**options),  # type: ignore[arg-type]
            backend=backend,
            pins=pins,
        )
    ).best


def finding(report: CheckReport, name: str) -> CheckFinding:
    """The one finding of that id."""
    found = [each for each in report.findings if each.id == name]
    assert len(found) == 1, [each.id for each in report.findings]
    return found[0]


def ids(report: CheckReport) -> set[str]:
    return {each.id for each in report.findings}


def parts(plan: Plan | None) -> dict[str, float]:
    """GiB of the components of the fullest stage in its worst phase."""
    assert plan is not None
    tree: Breakdown = plan.estimate.memory
    return {part.name: part.value / GIB for part in summands(tree)}


def states(plan: Plan | None) -> float:
    """GiB of weights, gradients and optimizer."""
    return sum(value for name, value in parts(plan).items() if name in ("weights", "gradients", "optimizer"))


# --- Configurations that frameworks refuse, or that run and do something else


def test_layers_that_pipeline_stages_drop(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#1304: 30 layers over 4 stages trained 28; 7,8,8,7 is an uneven split that works."""
    report = check("megatron_30_layers_pp4.sh", "a100", advise=False)
    assert not report.legal
    told = finding(report, "layers-over-stages")
    assert "30 layers % pp(4) = 2" in told.message
    assert "28 layers" in told.message
    assert told.allowed == "pp in 1, 2, 3, 5, 6, 10, 15, 30"
    assert "(7,8,8,7)" in told.hint
    uneven = "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7"
    assert uneven in told.hint
    stages = "--pipeline-model-parallel-size 4"
    followed = check(
        edited(tmp_path, "megatron_30_layers_pp4.sh", (stages, f"{stages} {uneven}")), "a100", advise=False
    )
    assert followed.legal
    assert followed.plan is not None
    assert followed.plan.strategy.layers_per_stage == (7, 8, 8, 7)


def test_forty_layers_over_sixteen_stages(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#1303: 40 layers over 16 stages trained 32."""
    changes = (
        ("--num-layers 30", "--num-layers 40"),
        ("parallel-size 4", "parallel-size 16"),
        ("--nnodes 1", "--nnodes 2"),
    )
    told = finding(
        check(edited(tmp_path, "megatron_30_layers_pp4.sh", *changes), "a100", advise=False), "layers-over-stages"
    )
    assert "32 layers" in told.message
    assert told.allowed == "pp in 1, 2, 4, 5, 8, 10, 20, 40"


def test_layers_that_virtual_stages_drop(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#468: 80 layers, 16 stages, 2 virtual stages ran 64; 5 of them, or 8 stages, divide."""
    report = check("megatron_80_layers_vpp2.sh", "a100", advise=False)
    assert not report.legal
    told = finding(report, "layers-over-virtual-stages")
    assert "64 of the 80 layers" in told.message
    assert "pp(16) with 1, 5 virtual stages" in told.hint
    assert "pp(8) with 1, 2, 5, 10 virtual stages" in told.hint
    for change in (("VPP=2", "VPP=5"), ("PP=16", "PP=8")):
        assert check(edited(tmp_path, "megatron_80_layers_vpp2.sh", change), "a100", advise=False).legal


def test_glm_air_over_four_stages(tmp_path: Path) -> None:
    """modelscope/ms-swift#5737: 46 = 2 * 23 layers over 4 stages; 11,12,12,11 or 2 stages; 4 micro-batches are few."""
    report = check("megatron_glm_air_pp4.sh", "h100")
    told = finding(report, "layers-over-stages")
    assert told.allowed == "pp in 1, 2, 23, 46"
    assert "(11,12,12,11)" in told.hint
    bubble = finding(report, "large-bubble")
    assert "4 micro-batches through pp(4)" in bubble.got
    assert "at least 16 micro-batches" in bubble.hint
    assert check(
        edited(tmp_path, "megatron_glm_air_pp4.sh", ("parallel-size 4 ", "parallel-size 2 ")), "h100", advise=False
    ).legal


def test_micro_batches_of_a_pipeline(tmp_path: Path) -> None:
    """huggingface/nanotron#347: one micro-batch through 8 stages is refused; the field to raise is named, from 7 on."""
    report = check("nanotron_pp8.yaml", "h100", advise=False)
    assert not report.legal
    told = finding(report, "micro-batches-fill-pipeline")
    assert "batch_accumulation_per_replica(1)" in told.message
    assert told.allowed == "at least 7"
    assert "32" in told.hint
    raised = edited(
        tmp_path, "nanotron_pp8.yaml", ("batch_accumulation_per_replica: 1", "batch_accumulation_per_replica: 7")
    )
    assert check(raised, "h100", advise=False).legal
    with pytest.raises(InputError) as refused:
        estimate("tinyllama-1.1b", "h100", 8, "nanotron", pp=8, seq_len=2048, global_batch=1)
    assert "batch_accumulation_per_replica of 7 or more" in str(refused.value.allowed)


def test_batch_over_seven_replicas() -> None:
    """OpenRLHF/OpenRLHF#346: 256 != 2 * 18 * 7; 252 or 266 go with 7 replicas, 256 with 4 (or 8)."""
    report = check("deepspeed_zero3_batch_256.json", "a100", 7, model="llama-2-7b", seq_len=2048)
    assert not report.legal
    told = finding(report, "batch-algebra")
    assert "micro_batch * dp * grad_accum = 252" in told.got
    assert "252 with grad_accum(18)" in told.allowed
    assert "266 with grad_accum(19)" in told.allowed
    assert "4 replicas" in told.hint
    assert told.where == "deepspeed_zero3_batch_256.json:2: train_batch_size"
    assert "batch-mismatch" not in ids(report)


@pytest.mark.parametrize(
    ("model", "equation", "allowed"),
    [
        # deepspeedai/DeepSpeed#3634: 52 = 4 * 13.
        ("llama-33b", "heads(52) % tp(8) = 4", "tp in 1, 2, 4"),
        # THU-KEG/AdaptThink#1: 28 heads; 7, 14 and 28 do not divide 8 GPUs.
        ("qwen2.5-7b", "heads(28) % tp(8) = 4", "tp in 1, 2, 4"),
    ],
    ids=["DeepSpeed#3634", "AdaptThink#1"],
)
def test_heads_over_tensor_parallel_ranks(model: str, equation: str, allowed: str) -> None:
    """The valid values of tp are listed, by every framework that splits heads."""
    told = finding(check("deepspeed_autotp8.json", "a100", 8, model=model, seq_len=2048, advise=False), "heads-over-tp")
    assert equation in told.got
    assert told.allowed == allowed
    with pytest.raises(InputError) as refused:
        estimate(model, "a100", 8, tp=8, seq_len=2048, global_batch=8)
    assert refused.value.allowed == allowed


def test_key_value_heads_are_the_last_split_without_copies() -> None:
    """THU-KEG/AdaptThink#1: with 28 heads and 4 key/value heads tp 4 is the last without copies, and runs."""
    assert estimate("qwen2.5-7b", "a100", 8, tp=4, seq_len=2048, global_batch=8).best.strategy.dp == 2
    with pytest.raises(InputError) as refused:
        estimate("qwen2.5-7b", "a100", 28, tp=14, gpus_per_node=28, seq_len=2048, global_batch=8)
    assert "kv_heads(4) % tp(14)" in str(refused.value.got)
    assert refused.value.allowed == "tp in 1, 2, 4, 28"


def test_heads_over_ulysses_ranks() -> None:
    """DAMO-NLP-SG/LongPO#5: 28 heads over 8 ranks; 4 is the most that divides them and 8 GPUs."""
    report = check("deepspeed_ulysses8.json", "a100", 8, model="qwen2.5-7b", seq_len=2048, advise=False)
    told = finding(report, "heads-over-cp")
    assert "heads(28) % cp(8) = 4" in told.got
    assert told.allowed == "cp in 1, 2, 4"


def test_ulysses_beyond_key_value_heads() -> None:
    """verl-project/verl#1226: 40 heads take 1, 2, 4, 8 (and 40) ranks, 16 not."""
    with pytest.raises(InputError) as refused:
        estimate("qwen2.5-14b", "h100", 16, "deepspeed", cp=16, seq_len=65536, global_batch=1, recompute="full")
    assert "heads(40) % cp(16) = 8" in str(refused.value.got)
    assert refused.value.allowed == "cp in 1, 2, 4, 8"
    eight = estimate("qwen2.5-14b", "h100", 16, "deepspeed", cp=8, seq_len=65536, global_batch=2, recompute="full")
    assert eight.best.strategy.cp == 8


@pytest.mark.parametrize("backend", ["megatron", "deepspeed", "fsdp"])
def test_context_parallelism_of_hybrid_models(backend: str) -> None:
    """PrimeIntellect-ai/prime-rl#3042: what splits a sequence depends on the layers; Mamba hybrids are refused by
    rule, not run past their limits."""
    with pytest.raises(InputError) as refused:
        estimate("nemotron-3-super-120b-a12b", "h200", 16, backend, cp=4, seq_len=131072, global_batch=4)
    assert "mamba" in str(refused.value.got) or "pattern" in str(refused.value.got)


def test_full_precision_found_first() -> None:
    """NVIDIA/Megatron-LM#1000: 70B without --bf16, one replica, two stages: each is said, once."""
    report = check("megatron_70b_fp32.sh", "a100")
    warnings = [each.id for each in report.findings if each.severity == "warning"]
    assert warnings[0] == "fp32-training"
    assert finding(report, "fp32-training").hint == "add --bf16"
    assert finding(report, "zero-shards-nothing").got == "dp(1) * cp(1)"
    assert report.plan is not None
    # fp32 weights, gradients and moments: 16 bytes of a sixteenth of 70.55e9 parameters.
    assert states(report.plan) == pytest.approx(16 * 70.55e9 / 16 / GIB, rel=0.02)


def test_full_precision_is_what_makes_it_slow(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#1000: about 20 TFLOP/s a GPU at most without --bf16, several times as much with it."""
    slow = check("megatron_70b_fp32.sh", "a100", advise=False).plan
    fast = check(
        edited(tmp_path, "megatron_70b_fp32.sh", ("--use-flash-attn", "--bf16 --use-flash-attn")), "a100", advise=False
    ).plan
    assert slow is not None
    assert fast is not None
    assert slow.estimate.model_flops_per_s_per_gpu < 20e12
    assert fast.estimate.model_flops_per_s_per_gpu > 5 * slow.estimate.model_flops_per_s_per_gpu


def test_pipelines_refuse_zero_2_and_3() -> None:
    """deepspeedai/Megatron-DeepSpeed#474: ZeRO-3 with stages is refused, and without stages no PipelineModule is
    written."""
    question: dict[str, Any] = {"seq_len": 1024, "global_batch": 8, "zero_stage": 3}
    with pytest.raises(InputError, match="pipeline-zero-stage"):
        estimate("gpt2-355m", "a100", 4, "deepspeed", pp=2, **question)
    document = estimate("gpt2-355m", "a100", 4, "deepspeed", pp=1, **question)
    files = service.render_document(document)
    code = "".join(text for name, text in files.items() if name.endswith((".py", ".sh", ".json")))
    assert '"stage": 3' in code
    assert "PipelineModule(" not in code


def test_name_against_dimensions() -> None:
    """mosaicml/llm-foundry#1706: called 7B, but 12 layers of 768: 125M parameters, and a low MFU for that reason."""
    report = check("megatron_small_dimensions.sh", "h100", model="mpt-7b", advise=False)
    told = finding(report, "model-differs")
    assert "125.3M parameters" in told.message
    assert "6.649B of mpt-7b" in told.message
    assert "hidden(768)" in told.got
    assert "hidden(4096)" in told.allowed
    assert report.request is not None
    assert report.request.model.hidden == 768


@pytest.mark.parametrize("backend", ["deepspeed", "fsdp"])
def test_quantised_checkpoints(backend: str) -> None:
    """deepspeedai/DeepSpeed#7096: a 4-bit checkpoint cannot be sharded by ZeRO-3 or FSDP; take the 16-bit base."""
    with pytest.raises(InputError) as refused:
        suggest(str(DATA / "qwen_32b_4bit.json"), "a100", 8, backend, seq_len=2048, global_batch=8)
    assert "4 bits" in refused.value.message
    assert "ZeRO-3" in refused.value.message
    assert "unquantised base model" in str(refused.value.hint)


@pytest.mark.parametrize("backend", ["megatron", "deepspeed", "fsdp"])
def test_one_process_a_gpu(backend: str) -> None:
    """zai-org/ChatGLM-6B#595: two GPUs in one process were slower than one; plans start a process on each."""
    document = service.suggest(
        PlanRequest(
            model="gpt2-355m",
            cluster=ClusterInput(gpu="rtx-3090", gpus=2, gpus_per_node=2),
            job=JobInput(seq_len=1024, global_batch=16),
            backend=backend,
        )
    )
    script = service.render_document(document)["launch.sh"]
    assert "torchrun" in script
    assert "--nproc_per_node" in script or "--nproc-per-node" in script
    assert "2" in next(line for line in script.splitlines() if "nproc" in line)


def test_an_inference_engine_on_the_same_gpus() -> None:
    """huggingface/trl#2688: 7B on 8 H100 beside an engine that holds 90 % of each GPU does not fit; one that holds 40 %
    leaves room."""
    question: dict[str, Any] = {"seq_len": 4096, "global_batch": 64, "pins": ("offload=none",)}
    with pytest.raises(InfeasibleError):
        suggest("qwen2.5-7b", "h100", 8, "fsdp", memory_margin=0.9, **question)
    assert suggest("qwen2.5-7b", "h100", 8, "fsdp", memory_margin=0.4, **question).estimate.fits


def test_adapters_beside_a_whole_copy_of_the_model(tmp_path: Path) -> None:
    """arielnlee/Platypus#10: DDP keeps all of a 70B base on each GPU, adapters or not; ZeRO 3 shares it."""
    (tmp_path / "sft.yaml").write_text(
        "model_name_or_path: llama-2-70b\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 4\nbf16: true\n"
        "use_peft: true\ngradient_checkpointing: true\nmax_length: 4096\noutput_dir: out\n",
        encoding="utf-8",
    )
    head = "compute_environment: LOCAL_MACHINE\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n"
    plain, sharded = head + "distributed_type: MULTI_GPU\n", head + "distributed_type: FSDP\nfsdp_config:\n"
    sharded += "  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    launch = tmp_path / "launch.yaml"
    launch.write_text(plain, encoding="utf-8")
    report = check(tmp_path, "a100", 8)
    assert report.fits is False
    assert parts(report.plan)["weights"] * GIB > 138e9
    assert "ZeRO 3" in finding(report, "gpu-memory").hint
    launch.write_text(sharded, encoding="utf-8")
    shared = check(tmp_path, "a100", 8)
    assert shared.fits is True
    # Gradients that wait for the last micro-batch are those of the adapters, not of the frozen 69e9.
    assert shared.plan is not None
    assert shared.plan.estimate.peak_memory_bytes < 50e9


# --- Out of memory


def test_zero_2_at_the_optimizer_step() -> None:
    """hiyouga/LlamaFactory#1221: LLaMA-7B on 8 V100-32G: forward and backward fit, Adam's 3.14 GiB denominator does
    not; ZeRO-3 runs."""
    question: dict[str, Any] = {"model": "llama-7b", "seq_len": 512, "recompute": "full"}
    report = check("deepspeed_zero2_hf_fp16.json", "v100-sxm2-32gb", 8, **question)
    assert report.fits is False
    assert "in the optimizer step" in finding(report, "gpu-memory").message
    sizes = parts(report.plan)
    assert sizes["weights"] == pytest.approx(12.6, abs=0.1)
    assert sizes["weights"] + sizes["gradients"] + sizes["optimizer"] == pytest.approx(12.6 + 11.0 + 3.1, abs=0.2)
    assert sizes["optimizer temporaries"] == pytest.approx(3.14, rel=0.06)
    assert "ZeRO 3" in finding(report, "gpu-memory").hint
    assert any(change.plan.strategy.zero_stage == 3 for change in report.improvements)


def test_zero_2_of_32b_on_8_h200() -> None:
    """hiyouga/LlamaFactory#8642: 65.5 GB of weights, 49 of optimizer, 16 of fp32 gradients and the step: over 141 GB;
    ZeRO-3 holds 16 (with gathered copies 18) bytes a parameter over 8 and fits."""
    report = check("deepspeed_zero2_hf.json", "h200", 8, model="qwen3-32b", seq_len=1024, recompute="full")
    assert report.fits is False
    told = finding(report, "gpu-memory")
    assert report.plan is not None
    # The thread's 147 GB count neither fragmentation nor the communication buffers.
    assert 147e9 < report.plan.estimate.peak_memory_bytes < 1.15 * 147e9
    sizes = parts(report.plan)
    assert sizes["weights"] * GIB == pytest.approx(65.5e9, rel=0.01)
    assert sizes["optimizer"] * GIB == pytest.approx(49e9, rel=0.01)
    assert "shard the weights, too (ZeRO 3)" in told.hint
    best = report.improvements[0]
    assert best.change[0].startswith("zero_stage 3 instead of 2")
    assert states(best.plan) * GIB == pytest.approx(18 * 32.76e9 / 8, rel=0.01)


def test_zero_2_too_close_to_the_limit() -> None:
    """hiyouga/LlamaFactory#4133: '2 x 7 + 14 x 7 / 8 = 26 GB' is 40 GB of 42.3e9 bytes in truth: not to be relied on;
    ZeRO-3 is."""
    question: dict[str, Any] = {"model": "qwen2.5-7b", "seq_len": 512, "recompute": "full"}
    report = check("deepspeed_zero2_hf.json", "a100-sxm-40gb", 8, **question)
    assert report.fits is False
    told = finding(report, "gpu-memory")
    assert "too close to rely on" in told.message
    assert "ZeRO 3" in told.hint
    assert report.plan is not None
    assert 37e9 < report.plan.estimate.peak_memory_bytes < 42.3e9
    assert check("deepspeed_zero3.json", "a100-sxm-40gb", 8, **question).fits


def test_seventy_billion_on_16_gpus() -> None:
    """InternLM/xtuner#842: 65.7 GiB of states and the rest make about 80 GiB; 24 GPUs or optimizer offload."""
    report = check("deepspeed_zero3.json", "a100", 16, model="llama-3-70b", seq_len=2048, recompute="full")
    assert report.fits is False
    # The thread's 16 bytes a parameter, and the 16-bit copies that ZeRO-3 keeps beside its fp32 gradients.
    assert states(report.plan) == pytest.approx(18 * 70.55e9 / 16 / GIB, rel=0.01)
    assert "fit on 24 GPUs (3 nodes)" in finding(report, "fewest-gpus").message
    assert any(change.plan.strategy.offload.optimizer > 0 for change in report.improvements)


def test_thirty_three_billion_on_8_gpus() -> None:
    """deepseek-ai/DeepSeek-Coder#78: ZeRO-3 does not fit 8 x 80 GB, with CPU offload and 1.2 TB of host memory it
    does, and 16 GPUs do without."""
    model = str(DATA / "coder_33b.json")
    plain = check("deepspeed_zero3.json", "a800", 8, model=model, seq_len=2048, recompute="full", host_memory_gib=1117)
    assert plain.fits is False
    assert "16 GPUs (2 nodes)" in finding(plain, "fewest-gpus").message
    moved = check(
        "deepspeed_zero3_offload.json", "a800", 8, model=model, seq_len=2048, recompute="full", host_memory_gib=1117
    )
    assert moved.fits is True
    assert moved.plan is not None
    assert moved.plan.estimate.host_memory_bytes_per_node == pytest.approx(33.3e9 * 18 * 1.35, rel=0.2)


def test_sharding_over_one_gpu() -> None:
    """haotian-liu/LLaVA#827: ZeRO-3 on one GPU shards nothing; 16 bytes of 7B are more than 80 GB; offload helps."""
    report = check("deepspeed_zero3.json", "a100", 1, model="llama-2-7b", seq_len=2048)
    assert report.fits is False
    assert "ZeRO 3 over one data-parallel rank shards nothing" in finding(report, "zero-shards-nothing").message
    told = finding(report, "gpu-memory")
    assert "alone take" in told.hint
    assert "no micro-batch, sequence length or recomputation helps" in told.hint
    assert states(report.plan) * GIB >= 16 * 6.7e9
    assert report.improvements[0].change[0].startswith("offload")
    assert report.improvements[0].plan.estimate.host_memory_bytes_per_node > 80e9


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_thirteen_billion_on_two_gpus(backend: str) -> None:
    """Alpha-VLLM/LLaMA2-Accessory#26: 16 x 13.0e9 = 208 GB do not go into 2 x 80; 4 GPUs hold them."""
    question: dict[str, Any] = {"seq_len": 512, "global_batch": 16}
    on_two = suggest("llama-2-13b", "a800", 2, backend, **question)
    assert on_two.strategy.offload.device == "cpu"
    with pytest.raises(InfeasibleError) as refused:
        suggest("llama-2-13b", "a800", 2, backend, pins=("offload=none",), **question)
    told = refused.value.details["relaxations"]
    assert any("--gpus 4" in text for text in told)
    assert suggest("llama-2-13b", "a800", 4, backend, pins=("offload=none",), **question).estimate.fits


def test_seventy_billion_on_24_small_gpus() -> None:
    """hiyouga/LlamaFactory#747: it is not the card: 16 x 69e9 / 24 = 46 GB are more than 40; 32 GPUs and up, or
    offload."""
    report = check("deepspeed_zero3.json", "a100-sxm-40gb", 24, model="llama-2-70b", seq_len=1024, recompute="full")
    assert report.fits is False
    assert states(report.plan) * GIB > 46e9
    assert "alone take" in finding(report, "gpu-memory").hint
    enough = finding(report, "fewest-gpus").hint
    assert 32 <= int(enough.split()[1].rstrip(",")) <= 48
    assert any(change.plan.strategy.offload.optimizer > 0 for change in report.improvements)


def test_host_memory_binds() -> None:
    """hiyouga/LlamaFactory#6755: 32B with everything offloaded on one GPU: 770 to 880 GB of host memory, not 744; the
    sign is exit code -9; 900 GB and more would do."""
    question: dict[str, Any] = {"model": "qwen2.5-32b", "seq_len": 2048, "recompute": "full", "gpus_per_node": 1}
    report = check("deepspeed_zero3_offload.json", "h100-nvl-94gb", 1, host_memory_gib=744, **question)
    assert report.fits is False
    assert "gpu-memory" not in ids(report)
    told = finding(report, "host-memory")
    assert "exit code -9" in told.message
    assert "neither batch nor sequence length" in told.hint
    assert report.plan is not None
    assert 770e9 < report.plan.estimate.host_memory_bytes_per_node < 900e9
    assert "nodes of at least" in told.allowed
    assert any("more memory" in warning for warning in report.warnings)
    more = check("deepspeed_zero3_offload.json", "h100-nvl-94gb", 1, host_memory_gib=1024, advise=False, **question)
    assert more.fits is True


def test_seventy_billion_on_one_node_with_a_terabyte() -> None:
    """axolotl-ai-cloud/axolotl#1439: 18 x 69e9 = 1.24 TB of host memory are more than 1 TB; batch size is no lever,
    two nodes are."""
    question: dict[str, Any] = {"model": "llama-2-70b", "seq_len": 2048, "recompute": "full", "host_memory_gib": 1024}
    report = check("deepspeed_zero3_offload.json", "a100", 8, **question)
    assert report.fits is False
    assert "neither batch nor sequence length" in finding(report, "host-memory").hint
    assert report.plan is not None
    assert report.plan.estimate.host_memory_bytes_per_node > 1.24e12
    assert "2 nodes" in finding(report, "fewest-gpus").message
    with pytest.raises(InfeasibleError) as refused:
        suggest("llama-2-70b", "a100", 8, "deepspeed", seq_len=2048, global_batch=8, host_memory_gib=1024)
    assert any("--gpus 16" in text for text in refused.value.details["relaxations"])


def test_neox_20b_needs_eight_gpus() -> None:
    """EleutherAI/gpt-neox#616: 330 to 371 GB of states: 4 x 80 no, 8 x 80 yes (not offloaded)."""
    question: dict[str, Any] = {"seq_len": 2048, "global_batch": 8}
    with pytest.raises(InfeasibleError) as refused:
        suggest("gpt-neox-20b", "a100", 4, "deepspeed", pins=("offload=none",), **question)
    assert any("--gpus 8" in text for text in refused.value.details["relaxations"])
    assert suggest("gpt-neox-20b", "a100", 8, "deepspeed", pins=("offload=none",), **question).estimate.fits


def test_seventy_billion_on_32_gpus_by_tensor_parallelism() -> None:
    """hpcaitech/ColossalAI#5068: tp 4 with sharded optimizer does not fit (16e9 x 4 bytes + 12/8), tp 8 with pp 2
    fits once it runs."""
    question: dict[str, Any] = {"seq_len": 1024, "global_batch": 32, "recompute": "full", "zero_stage": 1}
    refused = estimate("llama-2-70b", "a100", 32, tp=4, **question).best
    assert not refused.estimate.fits
    assert any("no micro-batch, sequence length or recomputation helps" in line for line in refused.why)
    assert estimate("llama-2-70b", "a100", 32, tp=8, pp=2, **question).best.estimate.fits


def test_sequence_parallelism_is_what_was_missing() -> None:
    """NVIDIA/Megatron-LM#1031: 70B with tp 8 and pp 2 on 128 H100 fits with sequence parallelism (23 GB of
    activations) and not without (70 GB); it is faster than pp 8 with full recomputation."""
    question: dict[str, Any] = {"seq_len": 8192, "global_batch": 128, "tp": 8}
    with_it = estimate("llama-2-70b", "h100", 128, pp=2, **question).best
    without = estimate("llama-2-70b", "h100", 128, pp=2, sequence_parallel=False, **question).best
    assert with_it.estimate.fits
    assert not without.estimate.fits
    assert parts(with_it)["activations"] * GIB == pytest.approx(23e9, rel=0.15)
    assert parts(without)["activations"] > 2.2 * parts(with_it)["activations"]
    assert any("activations are the largest part" in line for line in without.why)
    deep = estimate("llama-2-70b", "h100", 128, pp=8, recompute="full", **question).best
    assert deep.estimate.tokens_per_s / with_it.estimate.tokens_per_s == pytest.approx(296.5 / 420.5, abs=0.08)


def test_logits_of_long_sequences() -> None:
    """simplescaling/s1#13: 32B with full recomputation: 32,000 tokens do not fit 16 GPUs (58 GB of logits), and
    neither 20,000 on 8; the logits are named."""
    question: dict[str, Any] = {"global_batch": 16, "recompute": "full", "loss": "eager"}
    long = estimate("qwen2.5-32b", "h100", 16, "fsdp", seq_len=32000, **question).best
    assert not long.estimate.fits
    assert parts(long)["logits and loss"] * GIB == pytest.approx(58e9, rel=0.05)
    assert any("shrink the logits" in line for line in long.why)
    assert not estimate("qwen2.5-32b", "h100", 8, "fsdp", seq_len=20000, **question).best.estimate.fits


def test_seven_billion_on_v100() -> None:
    """hiyouga/LlamaFactory#2931: ZeRO-3 on 4 V100-32G holds 27 GB of states, on 2 twice as much: no; with offload the
    host needs 164 GB."""
    question: dict[str, Any] = {
        "seq_len": 1024,
        "global_batch": 8,
        "precision": "fp16",
        "flash_attention": False,
        "recompute": "full",
    }
    two = estimate("llama-7b", "v100-sxm2-32gb", 2, "deepspeed", zero_stage=3, **question).best
    assert not two.estimate.fits
    assert states(two) * GIB > 54e9 - 1e9
    moved = estimate(
        "llama-7b", "v100-sxm2-32gb", 2, "deepspeed", zero_stage=3, offload="cpu+parameters", **question
    ).best
    assert moved.estimate.fits
    assert moved.estimate.host_memory_bytes_per_node == pytest.approx(164e9, rel=0.35)
    with pytest.raises(InputError, match="v100-sxm2-32gb has no bf16 matrix units"):
        estimate(
            "llama-7b", "v100-sxm2-32gb", 2, "deepspeed", zero_stage=3, seq_len=1024, global_batch=8, precision="bf16"
        )


def test_what_cannot_fit_names_what_would() -> None:
    """inference-sim/inference-sim#624: 671B on 2 GPUs: never a silent default, but the number of GPUs that would do."""
    with pytest.raises(InfeasibleError) as refused:
        suggest("deepseek-v3", "h100", 2, "deepspeed", seq_len=2048, global_batch=64)
    assert any("--gpus 128 --global-batch 128" in text for text in refused.value.details["relaxations"])
    assert refused.value.details["nearest"]["deepspeed"]["needed_bytes"] > 2 * 80e9


# --- Figures


def test_states_with_and_without_sharded_optimizer() -> None:
    """huggingface/nanotron#261: 1.04e9 parameters: 20 bytes each at ZeRO-0 (19,836 MiB), 6 + 12 / 24 at ZeRO-1 (6,447
    MiB) before fp32 accumulation; the activations are the same in both."""
    question: dict[str, Any] = {"seq_len": 2048, "global_batch": 48, "micro_batch": 2}
    plain = estimate("tinyllama-1.1b", "h100", 24, "nanotron", zero_stage=0, **question).best
    shared = estimate("tinyllama-1.1b", "h100", 24, "nanotron", zero_stage=1, **question).best
    assert states(plain) * GIB / 1.1e9 == pytest.approx(20.0, rel=0.01)
    assert (states(plain) - states(shared)) * GIB / 1.1e9 == pytest.approx(12.0 * 23 / 24, rel=0.01)
    assert parts(plain)["activations"] == parts(shared)["activations"]


def test_what_more_gpus_do_not_shrink() -> None:
    """pytorch/pytorch#82001: from 8 to 32 GPUs only the states shrink, to a quarter; activations and gathered units
    stay."""
    few, many = (
        estimate("llama-3.2-3b", "a100", gpus, "fsdp", seq_len=2048, global_batch=4 * gpus, micro_batch=4).best
        for gpus in (8, 32)
    )
    assert states(many) == pytest.approx(states(few) / 4, rel=0.01)
    rest_few, rest_many = (plan.estimate.peak_memory_bytes / GIB - states(plan) for plan in (few, many))
    assert rest_many == pytest.approx(rest_few, rel=0.1)


def test_peak_of_two_stages() -> None:
    """NVIDIA/Megatron-LM#482: Llama-2-7B, pp 2, dp 8, micro-batch 2: 69.1 GB on the first stage, less on the last."""
    plan = estimate("llama-2-7b", "a100", 16, pp=2, micro_batch=2, seq_len=4096, global_batch=2048).best
    first, last = (stage.value for stage in plan.estimate.memory.children)
    assert first == pytest.approx(69.1e9, rel=0.05)
    assert last < 0.85 * first


def test_states_of_a_distributed_optimizer() -> None:
    """flagos-ai/FlagScale#454: 6 + 12 / 2 = 12 bytes a parameter at dp 2 with 16-bit weights and fp32 gradients."""
    plan = estimate("llama-2-7b", "a100", 2, seq_len=2048, global_batch=2, zero_stage=1, recompute="full").best
    assert states(plan) * GIB / 6.738e9 == pytest.approx(12.0, rel=0.01)


def test_uneven_stages_on_160_gpus() -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5797: 5 stages of 8,9,9,9,8 layers, cp 16 over nodes, ep 16 inside cp * dp = 32: dp 2
    and 64 micro-batches."""
    report = check("megatron_layout_pp5.sh", "b200", advise=False)
    assert report.legal
    assert report.plan is not None
    s = report.plan.strategy
    assert s.layers_per_stage == (8, 9, 9, 9, 8)
    assert (s.gpus, s.dp, s.cp, s.ep, s.grad_accum) == (160, 2, 16, 16, 64)


def test_memory_of_experts_counts_all_of_them() -> None:
    """AlexsJones/llmfit#230: computing takes the active parameters, memory all of them."""
    plan = estimate("qwen3-30b-a3b", "h100", 8, tp=1, ep=8, seq_len=2048, global_batch=8, recompute="full").best
    dense = estimate("qwen3-30b-a3b", "h100", 8, tp=1, ep=1, seq_len=2048, global_batch=8, recompute="full").best
    assert parts(dense)["weights"] * GIB >= 2 * 30.5e9
    assert parts(plan)["weights"] < parts(dense)["weights"]


def test_memory_is_planned_against_what_can_be_used() -> None:
    """ai-dynamo/aiconfigurator#1396: the limit is what an allocator reaches, never the nominal size, and the upper end
    of the range has to be below it."""
    plan = suggest("llama-3-8b", "b200", 8, seq_len=8192, global_batch=64)
    assert plan.estimate.memory_limit_bytes < 180 * GIB
    assert plan.estimate.peak_memory_range_bytes[1] <= plan.estimate.memory_limit_bytes


# --- Speed


def test_offload_that_is_not_needed() -> None:
    """deepspeedai/DeepSpeed#6834: 72B over 32 x 80 GB needs no offload (36 GB of states); the host step takes about
    10 s."""
    report = check("deepspeed_zero3_offload.json", "a100", 32, model="qwen2.5-72b", seq_len=2048, recompute="full")
    assert report.fits is True
    assert "offload none instead" in finding(report, "offload-not-needed").message
    assert report.plan is not None
    assert 3.0 < time_parts(report.plan)["host optimizer"] < 15.0
    best = report.improvements[0]
    assert best.plan.strategy.offload.device == "none"
    assert best.step_time_change is not None
    assert best.step_time_change < -0.4


def test_the_host_step_of_a_mixture() -> None:
    """THUDM/slime#1139: 106e9 parameters over 4 nodes: 9.6 s of CPU Adam is what DRAM allows."""
    plan = estimate(
        "glm-4.5-air", "h100", 32, tp=4, ep=8, pp=1, offload="cpu", seq_len=4096, global_batch=64, recompute="full"
    ).best
    assert time_parts(plan)["host optimizer"] == pytest.approx(9.6, rel=0.4)


def test_fits_but_slow() -> None:
    """anyscale/templates#130: 70B on 32 A10G with offload fits (207 to 276 GB of host memory a node at the least, 768
    there), and most of a step is not the model's arithmetic."""
    report = check(
        "deepspeed_zero3_offload.json", "a10g", 32, model="llama-2-70b", seq_len=4096, recompute="full",
        gpus_per_node=8, host_memory_gib=715, advise=False,
    )  # fmt: skip
    assert report.fits is True
    assert report.plan is not None
    assert 207e9 < report.plan.estimate.host_memory_bytes_per_node < 715 * GIB
    assert report.plan.estimate.mfu < 0.5
    assert report.plan.estimate.step_time_s > 45


def test_plain_data_parallelism_where_it_fits() -> None:
    """Lightning-AI/litgpt#864: a small model on 4 PCIe GPUs: full sharding is not faster than DDP, and not chosen;
    samples a second, not steps, tell the speed-up."""
    question: dict[str, Any] = {"gpus_per_node": 4, "seq_len": 1024, "global_batch": 16}
    sharded = estimate("gpt2-124m", "a40", 4, "fsdp", zero_stage=3, micro_batch=4, **question).best
    plain = estimate("gpt2-124m", "a40", 4, "fsdp", zero_stage=0, micro_batch=4, **question).best
    assert plain.estimate.step_time_s < sharded.estimate.step_time_s
    assert suggest("gpt2-124m", "a40", 4, "fsdp", **question).strategy.zero_stage < 3
    alone = estimate("gpt2-124m", "a40", 1, "fsdp", micro_batch=4, gpus_per_node=1, seq_len=1024, global_batch=4).best
    assert 2.0 < plain.estimate.tokens_per_s / alone.estimate.tokens_per_s <= 4.0
