"""DeepSpeed's batch arithmetic, from any two of its three sizes, and the replicas that it counts.

``train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * replicas``
(deepspeed/runtime/config.py, _set_batch_related_parameters and _batch_assertion), where tensor-parallel ranks of AutoTP
count as replicas of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.reading.deepspeed.values import Notes, Section

TRAIN, MICRO, GAS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sizes as far as they follow; sequences."""

    train: int | None = None
    """As DeepSpeed counts it, AutoTP ranks included."""
    micro: int | None = None
    gas: int | None = None
    replicas: int | None = None
    """Ranks that DeepSpeed counts, as given or as the three sizes imply."""


def read_batch(notes: Notes, top: Section, replicas: int | None) -> Batch:
    """Complete the sizes for ``replicas`` (None: unknown), with a finding where DeepSpeed would refuse them."""
    train, micro, gas = (_positive(notes, top, name) for name in (TRAIN, MICRO, GAS))
    open_sizes = [name for name in (TRAIN, MICRO, GAS) if top.stated(name) and top.get(name) is None]
    if not (top.stated(TRAIN) or top.stated(MICRO)) and not any(name in notes.filled for name in ((TRAIN,), (MICRO,))):
        notes.add(
            "batch-missing",
            "error",
            f"neither {TRAIN} nor {MICRO} is there; DeepSpeed stops with an AssertionError",
            (),
            allowed="any two of the three batch sizes",
            hint=f"write {MICRO} and {GAS}",
        )
    if open_sizes:
        # Something is auto or unreadable: only what is certain is taken.
        return Batch(train=train, micro=micro, gas=gas, replicas=replicas)
    if train is None:
        gas = gas or (1 if micro is not None else None)
        total = micro * gas * replicas if micro and gas and replicas else None
        return Batch(train=total, micro=micro, gas=gas, replicas=replicas)
    return _from_total(notes, train, micro, gas, replicas)


def _positive(notes: Notes, top: Section, name: str) -> int | None:
    value = top.get(name)
    if value == 0:
        notes.add(
            "batch-mismatch",
            "error",
            f"{name} is 0; DeepSpeed stops with an AssertionError",
            (name,),
            allowed="1 or more",
        )
        return None
    return value if isinstance(value, int) else None


def _from_total(notes: Notes, train: int, micro: int | None, gas: int | None, replicas: int | None) -> Batch:
    if micro and gas:
        return _all_three(notes, train, micro, gas, replicas)
    if replicas is None:
        # One replica count is as good as another; with neither size DeepSpeed accumulates nothing.
        return Batch(train=train, micro=micro, gas=gas or (None if micro else 1))
    if micro:
        gas = train // micro // replicas
    else:
        gas = gas or 1
        micro = train // replicas // gas
    if micro * gas * replicas != train or 0 in (micro, gas):
        _mismatch(notes, train, micro, gas, replicas)
        return Batch(train=train, micro=micro or None, gas=gas or None, replicas=replicas)
    return Batch(train=train, micro=micro, gas=gas, replicas=replicas)


def _all_three(notes: Notes, train: int, micro: int, gas: int, replicas: int | None) -> Batch:
    one = micro * gas
    if replicas is None and train % one == 0:
        return Batch(train=train, micro=micro, gas=gas, replicas=train // one)
    if replicas is None or one * replicas != train:
        _mismatch(notes, train, micro, gas, replicas)
    return Batch(train=train, micro=micro, gas=gas, replicas=replicas)


def _mismatch(notes: Notes, train: int, micro: int, gas: int, replicas: int | None) -> None:
    """The equation with its values, and the totals nearest to the one that is there."""
    one = max(micro, 1) * max(gas, 1) * (replicas or 1)
    below = train // one * one
    near = [str(total) for total in (below, below + one) if total > 0]
    equation = f"{TRAIN}({train}) != {MICRO}({micro}) * {GAS}({gas}) * replicas"
    if replicas:
        why = f"({replicas}) = {micro * gas * replicas}"
    else:
        why = f" for any number of replicas: {train} % {one} = {train % one}"
    notes.add(
        "batch-mismatch",
        "error",
        f"{equation}{why}; DeepSpeed stops with an AssertionError",
        (TRAIN,),
        allowed=f"{TRAIN} = {' or '.join(near)}" + ("" if replicas else f", or another multiple of {one}"),
        hint=f"leave {TRAIN} out, DeepSpeed derives it",
    )
