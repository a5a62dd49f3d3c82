"""Logs of the frameworks, in the format that their sources print, are read to steps, losses, memory and errors."""

from __future__ import annotations

import pytest

from planner.units import GIB, MIB
from planner_validate.frameworks.logs import (
    DEEPSPEED,
    MEGATRON,
    OWN_SCRIPT,
    TORCHTITAN,
    MemoryRead,
    read_failures,
    read_log,
)

AMOUNTS = {"tokens": 65536.0, "samples": 64.0}


def megatron_line(step: int, milliseconds: float, loss: float) -> str:
    return (
        f" [2026-08-22 10:11:12.123456] iteration {step:8d}/{10:8d} | consumed samples: {step * 64:12d} |"
        f" elapsed time per iteration (ms): {milliseconds:.1f} | throughput per GPU (TFLOP/s/GPU): 412.3 |"
        f" learning rate: {1.5e-4:.6E} | global batch size: {64:5d} | lm loss: {loss:.6E} | loss scale: {1.0:.1f} |"
        f" grad norm: {3.2:.3f} | number of skipped iterations: {0:3d} | number of nan iterations: {0:3d} |"
    )


def megatron_memory(rank: int, iterations: int, allocated: float, reserved: float) -> str:
    return (
        f"[Rank {rank}] (after {iterations} iterations) memory (MB) | allocated: {allocated / 2:.2f} | "
        f"max allocated: {allocated:.2f} | reserved: {reserved:.2f} | max reserved: {reserved:.2f}"
    )


def test_megatron() -> None:
    """Milliseconds become seconds, MiB bytes; the largest of the memory reports of a rank counts."""
    text = "\n".join(
        [
            "Number of parameters in transformer block in billions:  6.98",
            megatron_line(1, 9123.4, 11.9),
            megatron_memory(0, 1, 20480.5, 24576.0),
            megatron_memory(8, 1, 18000.0, 22000.0),
            megatron_line(2, 1234.5, 11.5),
            megatron_memory(0, 2, 30720.25, 34816.0),
            " [2026-08-22 10:11:20.000000] iteration        3/      10 | consumed sam",
        ]
    )
    read = read_log(text, MEGATRON, AMOUNTS)
    assert read.seconds == pytest.approx({1: 9.1234, 2: 1.2345})
    assert read.losses == pytest.approx({1: 11.9, 2: 11.5})
    assert read.memory == {
        0: MemoryRead(round(30720.25 * MIB), 34816 * MIB),
        8: MemoryRead(18000 * MIB, 22000 * MIB),
    }
    assert read.failures == ()


def test_megatron_without_a_loss() -> None:
    """A step whose loss is not a number is read all the same; one that was skipped has none."""
    read = read_log(megatron_line(4, 1000.0, float("nan")), MEGATRON, AMOUNTS)
    assert read.seconds == {4: 1.0}
    assert read.losses[4] != read.losses[4]
    skipped = megatron_line(5, 1000.0, 1.0).replace(" lm loss: 1.000000E+00 |", "")
    read = read_log(skipped, MEGATRON, AMOUNTS)
    assert read.seconds == {5: 1.0}
    assert read.losses == {}


def torchtitan_line(step: int, loss: float, memory: float, tps: int, colour: bool = True) -> str:
    red, green, orange, turquoise, blue, cyan, magenta, reset = (
        [f"\x1b[{code}m" for code in (31, 32, "38;2;180;60;0", "38;2;54;234;195", 34, 36, 35, 39)]
        if colour
        else [""] * 8
    )
    return (
        f"[titan] 2026-08-22 10:11:12,345 - root - INFO - {red}step: {step:2}  {green}loss: {loss:8.5f}  "
        f"{orange}grad_norm: {4.2:7.4f}  {turquoise}memory: {memory:5.2f}GiB({50.0:.2f}%)  {blue}tps: {tps:,}  "
        f"{cyan}tflops: {1234.5:,.2f}  {magenta}mfu: 41.20%{reset}"
    )


@pytest.mark.parametrize("colour", [True, False])
def test_torchtitan(colour: bool) -> None:
    """Tokens per second of a GPU become seconds of the slowest rank; a negative loss is that of a rank without one."""
    text = "\n".join(
        [
            torchtitan_line(1, 12.25, 0.97, 131, colour),
            torchtitan_line(9, -1.0, 31.5, 8192, colour),
            torchtitan_line(9, 11.5, 33.25, 8190, colour),
            "[titan] 2026-08-22 10:11:13,345 - root - INFO - "
            "validate step:  9  loss: 10.0  memory: 90.00GiB(9%)  tps: 1",
        ]
    )
    read = read_log(text, TORCHTITAN, AMOUNTS)
    assert read.seconds[9] == pytest.approx(65536 / 8190)
    assert read.losses == {1: 12.25, 9: 11.5}
    assert read.memory == {None: MemoryRead(None, round(33.25 * GIB))}


def test_deepspeed() -> None:
    """Samples per second become seconds of a step."""
    text = (
        "[2026-08-22 10:11:12,345] [INFO] [logging.py:107:log_dist] [Rank 0] step=4, skipped=0, lr=[0.00015], "
        "mom=[(0.9, 0.95)]\n"
        "[2026-08-22 10:11:12,346] [INFO] [timer.py:264:stop] epoch=0/micro_step=8/global_step=4, "
        "RunningAvgSamplesPerSec=25.025771473496132, CurrSamplesPerSec=32.0, MemAllocated=4.32GB, "
        "MaxMemAllocated=38.49GB\n"
    )
    read = read_log(text, DEEPSPEED, AMOUNTS)
    assert read.seconds == {4: 2.0}
    assert read.memory == {None: MemoryRead(round(38.49 * GIB), None)}


@pytest.mark.parametrize("rate", ["inf", "-inf", "nan", "0.0"])
def test_rates_that_are_none(rate: str) -> None:
    """DeepSpeed prints such rates before its timer runs: they are no times."""
    text = (
        f"global_step=1, RunningAvgSamplesPerSec={rate}, CurrSamplesPerSec={rate}, MemAllocated=0.0GB, "
        "MaxMemAllocated=0.0GB"
    )
    read = read_log(text, DEEPSPEED, AMOUNTS)
    assert (read.seconds, read.memory) == ({}, {})


def test_own_script() -> None:
    """What example_train.py prints."""
    read = read_log("step 3  loss 5.54518  0.1250 s  peak 0.00 GiB\nlosses [5.5]\n", OWN_SCRIPT, AMOUNTS)
    assert (read.seconds, read.losses, read.memory) == ({3: 0.125}, {3: 5.54518}, {})


@pytest.mark.parametrize("form", [MEGATRON, TORCHTITAN, DEEPSPEED, OWN_SCRIPT], ids=lambda form: form.title)
@pytest.mark.parametrize("text", ["", "\x00\x1b[31m", "step: loss: memory: tps:", "iteration 1/ 2 |", "nan\ninf\n" * 3])
def test_texts_without_a_step(form: object, text: str) -> None:
    """Nothing is read from what is no log."""
    read = read_log(text, form, AMOUNTS)  # type: ignore[arg-type]
    assert (read.seconds, read.losses, read.memory, read.failures) == ({}, {}, {}, ())


OUT_OF_MEMORY = (
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of "
    "79.10 GiB of which 1.06 GiB is free."
)
LOST = "[rank0]: torch.distributed.DistBackendError: NCCL error: Connection closed by remote peer node-1<41234>"
ELASTIC = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "


@pytest.mark.parametrize(
    ("lines", "kinds", "first"),
    [
        ([LOST, "Traceback (most recent call last):", OUT_OF_MEMORY, ELASTIC], ["out-of-memory", "error", "error"], 3),
        (
            ["pretrain_gpt.py: error: unrecognized arguments: --num-virtual-stages"],
            ["error"],
            None,
        ),
        (["RuntimeError: world size (6) is not divisible by 8"], ["mismatch"], None),
        (
            [
                "[rank1]:[E822 10:11:12.3 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation "
                "timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600000 milliseconds before timing out."
            ],
            ["timeout"],
            None,
        ),
        (["  traceback : Signal 9 (SIGKILL) received by PID 4711"], ["killed"], None),
        (["/x/y.py:3: UserWarning: MemoryError handling is deprecated", "  warnings.warn("], [], None),
    ],
)
def test_failures(lines: list[str], kinds: list[str], first: int | None) -> None:
    """Kinds, causes before consequences, and the rank where it is named."""
    found = read_failures("\n".join(lines))
    assert [failure.kind for failure in found] == kinds
    if found:
        assert found[0].rank == first


def test_the_same_error_of_many_ranks_is_told_once() -> None:
    """Eight ranks that run out of the same code say so once."""
    text = "\n".join(f"[rank{rank}]: ValueError: no such layer" for rank in range(8))
    assert len(read_failures(text)) == 1
