"""Whether a measured run can be fitted to at all: it can be priced, no GPU would have had to be faster or larger than
it is, and a fit to it alone asks for no implausible factor."""

from __future__ import annotations

from planner.accuracy.fits.calibration import NEEDS, check_alone, priceable
from planner.accuracy.runs.interpret import Case
from planner.cost.estimate import mfu_peak
from planner.cost.flops import model_flops_per_token
from planner.errors import InputError
from planner.specs.measurement import MeasuredRun
from planner.units import GIB, duration, gib

MOST_OF_PEAK = 1.05
"""Of the dense peak of the run's number format: clocks are not exact, nor are published peaks."""
MOST_OF_MEMORY = 1.1
"""Of the memory that an allocator can reach."""


def check_usable(run: MeasuredRun) -> None:
    """Raise InputError with the field and the reason where nothing can be fitted to the run."""
    cases, reasons = priceable([run])
    if not cases:
        raise InputError(f"the run cannot be priced: {reasons[run.id]}", hint=NEEDS)
    _check_speed(cases[0])
    _check_memory(cases[0])
    check_alone(cases[0])


def _check_speed(case: Case) -> None:
    context, measured_s = case.context, case.run.measured.step_time_s
    job, gpus = context.job, context.cluster.gpus
    flops_per_token = model_flops_per_token(context.model, job.attended_tokens, frozen=job.frozen)
    least_s = job.global_batch * job.seq_len * flops_per_token / (gpus * mfu_peak(context) * MOST_OF_PEAK)
    if measured_s is not None and measured_s < least_s:
        raise InputError(
            f"no {context.cluster.accelerator.id} is so fast: at its {job.precision} peak the step takes longer",
            where="measured.step_time_s",
            got=f"{measured_s:g}",
            allowed=f"at least {least_s:.3g} ({duration(least_s)})",
            hint="give the seconds of a whole optimizer step, and check batch, sequence length, GPUs and number format",
        )


def _check_memory(case: Case) -> None:
    peak_gib, most = case.run.measured.peak_mem_gib, case.context.cluster.memory_bytes_per_gpu * MOST_OF_MEMORY
    if peak_gib is not None and peak_gib * GIB > most:
        raise InputError(
            f"a {case.context.cluster.accelerator.id} has less memory",
            where="measured.peak_mem_gib",
            got=f"{peak_gib:g}",
            allowed=f"at most {gib(most)}",
            hint="give the peak of one GPU in GiB",
        )
