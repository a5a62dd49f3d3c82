"""What one step of a rank keeps in memory, term by term at its peak, and which collectives it calls.

``Observer`` watches every tensor operation of a step, on real or fake tensors, since it reads sizes and no values;
``collective_seconds`` takes the times of the same calls from a profiled step.  An observed step is slower than a
measured one, so it comes after those."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from planner.specs.validation import CollectiveUse, GroupKind, MemoryTerm
from planner_validate.trainer.model import Block
from planner_validate.trainer.training import Trainer

TERMS: tuple[MemoryTerm, ...] = ("weights", "gradients", "optimizer", "activations", "buffers")
_STEP_OF_SNAPSHOTS = 1.002
"""The terms are told apart again whenever the sum has grown by this factor."""
_OPERATIONS = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "recv_": "recv",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
}
"""Name of a collective among PyTorch's operators -> its common name."""


@dataclass(frozen=True)
class Call:
    """One collective as this rank issued it."""

    operation: str
    group: GroupKind
    sent_bytes: int


class Observer(TorchDispatchMode):
    """Context in which a trainer's steps are watched: live tensors, their peak by term, collectives.

    A tensor is a weight, an optimizer state or a gradient where a parameter says so, or a gathered weight that the plan
    keeps gathered; an activation where it was saved for the backward pass of the layers or lives on from a block that
    is recomputed; everything else is a buffer (gathered weights that come and go, logits, temporaries)."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.trainer = trainer
        self.calls: list[Call] = []
        self.peak = 0
        """Largest sum of live tensors, bytes."""
        self._terms: dict[MemoryTerm, int] = dict.fromkeys(TERMS, 0)
        self._total = 0
        self._measured = 0.0
        self._sizes: dict[int, int] = {}
        self._born: dict[int, int] = {}
        self._watch: dict[int, Any] = {}
        self._saved: set[int] = set()
        self._clock = 0
        self._stack = ExitStack()
        # While a step computes, modules hold gathered parameters in place of these.
        self._parameters = [parameter for _, parameter in trainer.named_parameters()]

    @property
    def live(self) -> int:
        """Bytes of the tensors that are alive now."""
        return self._total

    @property
    def terms(self) -> dict[MemoryTerm, int]:
        """Bytes by term at the peak; they sum to the peak."""
        known = sum(self._terms.values())
        return {**self._terms, "buffers": self._terms["buffers"] + self.peak - known}

    def __enter__(self) -> Self:
        for tensor in self._owned():
            self._note(tensor)
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor))
        self._stack.callback(_follow_resizing(self._resized))
        for stage in self.trainer.stages.values():
            for block in stage.layers.values():
                if isinstance(block, Block) and block.recompute is not None:
                    self._stack.callback(self._watch_block(block))
        return cast(Self, super().__enter__())

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._stack.close()
        self._watch.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Distributed tensors first turn into local ones and their collectives, which then come by here.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self._note_all(args)
        out = func(*args, **(kwargs or {}))
        self._note_all((out,))
        operation = self._operation(func)
        if operation is not None:
            self._count(operation, args)
        return out

    # Collectives

    def _operation(self, func: Any) -> str | None:
        if getattr(func, "namespace", "") not in ("c10d", "_c10d_functional"):
            return None
        return _OPERATIONS.get(func.__name__.split(".")[0])

    def _count(self, operation: str, args: Any) -> None:
        groups: dict[str, GroupKind] = {} if self.trainer.aside == "agreement" else self.trainer.layout.group_kinds
        name = next((found for found in map(_group_name, reversed(args)) if found in groups), None)
        tensors = list(_tensors(args))
        # Where result and input are both given, the input is the last.
        sent = tensors[-1:] if operation in ("all_gather", "reduce_scatter", "all_to_all") else tensors
        size = sum(each.numel() * each.element_size() for each in sent)
        self.calls.append(Call(operation, groups[name] if name is not None else "world", size))

    # Memory

    def _note_all(self, values: Iterable[Any]) -> None:
        for tensor in _tensors(values):
            self._note(tensor)

    def _note(self, tensor: Tensor) -> None:
        """Count a storage that was not known; its end is noted when it comes."""
        if tensor.device.type != self.trainer.device.type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._clock += 1
        self._born[key] = self._clock
        self._watch[key] = weakref.ref(storage, partial(self._freed, key))
        self._sizes[key] = 0
        self._grown(key, storage.nbytes())

    def _grown(self, key: int, size: int) -> None:
        self._total += size - self._sizes[key]
        self._sizes[key] = size
        if self._total > self.peak:
            self.peak = self._total
            if self._total > self._measured * _STEP_OF_SNAPSHOTS:
                self._measured = float(self._total)
                self._terms = self._told_apart()

    def _resized(self, storage: Any) -> None:
        if storage._cdata in self._sizes:
            self._grown(storage._cdata, storage.nbytes())

    def _freed(self, key: int, _reference: object) -> None:
        self._total -= self._sizes.pop(key, 0)
        self._born.pop(key, None)
        self._watch.pop(key, None)
        self._saved.discard(key)

    def _keep(self, tensor: Tensor) -> Tensor:
        """A tensor is saved for the backward pass; logits are no activations of the layers."""
        local = _local(tensor)
        self._note(local)
        if self.trainer.aside != "loss":
            self._saved.add(local.untyped_storage()._cdata)
        # A hook that returns the tensor itself would hold the graph behind it, beyond what autograd does.
        return tensor if tensor.is_leaf else tensor.detach()

    def _watch_block(self, block: Block) -> Callable[[], None]:
        """What a recomputed block leaves behind, forward or in its second pass, is kept for the backward pass."""
        compute = block._compute

        def watched(x: Tensor) -> Tensor:
            self._saved.add(x.untyped_storage()._cdata)
            start, result = self._clock, None
            try:
                result = compute(x)
            finally:
                own = None if result is None else result.untyped_storage()._cdata
                self._saved |= {key for key, born in self._born.items() if born > start and key != own}
            return result

        block._compute = watched  # type: ignore[method-assign]
        return lambda: block.__dict__.pop("_compute", None) and None

    def _owned(self) -> list[Tensor]:
        """Parameters, gradients and optimizer states."""
        return [tensor for group in self._by_owner().values() for tensor in group]

    def _by_owner(self) -> dict[MemoryTerm, list[Tensor]]:
        parameters = self._parameters
        states = self.trainer.optimizer.state.values()
        held = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.trainer.schedule is not None:
            gradients += list(_accumulated(self.trainer))
        groups: dict[MemoryTerm, list[Tensor]] = {"weights": parameters, "optimizer": held, "gradients": gradients}
        return {term: [_local(tensor) for tensor in tensors] for term, tensors in groups.items()}

    def _told_apart(self) -> dict[MemoryTerm, int]:
        """Bytes of all live tensors by term."""
        owner: dict[int, MemoryTerm] = dict.fromkeys(self._saved, "activations")
        strategy = self.trainer.config.strategy
        kept = strategy.zero_stage < 3 or strategy.pp > 1
        for tensor in _gathered(self.trainer):
            owner[tensor.untyped_storage()._cdata] = "weights" if kept else "buffers"
        for term, tensors in self._by_owner().items():
            owner |= {tensor.untyped_storage()._cdata: term for tensor in tensors}
        sums: dict[MemoryTerm, int] = dict.fromkeys(TERMS, 0)
        for key, size in self._sizes.items():
            sums[owner.get(key, "buffers")] += size
        return sums


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    """Plain tensors among arguments or results, lists and wrappers opened."""
    for value in values:
        if isinstance(value, DTensor):
            yield value._local_tensor
        elif isinstance(value, Tensor):
            # A result of an asynchronous collective holds the tensor that will be filled.
            yield getattr(value, "elem", value)
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _group_name(value: Any) -> str | None:
    """The process group that an argument names or holds."""
    if isinstance(value, str):
        return value
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        return cast(str, torch._C._distributed_c10d.ProcessGroup.unbox(value).group_name)
    return None


def _fsdp_parameters(trainer: Trainer) -> Iterable[Any]:
    """What ``fully_shard`` keeps about every parameter of the rank."""
    for stage in trainer.stages.values():
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                groups = getattr(state, "_fsdp_param_groups", None)
                if groups is None:
                    groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
                for group in groups:
                    yield from group.fsdp_params


def _gathered(trainer: Trainer) -> Iterable[Tensor]:
    """Gathered parameters that are in memory."""
    for held in _fsdp_parameters(trainer):
        yield from getattr(held, "all_gather_outputs", ())
        parameter = getattr(held, "_unsharded_param", None)
        if parameter is not None:
            yield _local(parameter)


def _accumulated(trainer: Trainer) -> Iterable[Tensor]:
    """Whole gradients that wait for the end of a pipeline's step."""
    for held in _fsdp_parameters(trainer):
        parameter = getattr(held, "_unsharded_param", None)
        for gradient in (getattr(held, "unsharded_accumulated_grad", None), getattr(parameter, "grad", None)):
            if gradient is not None:
                yield gradient


def _follow_resizing(resized: Callable[[Any], None]) -> Callable[[], None]:
    """Report storages that change size in place, as ``fully_shard`` does with gathered parameters; returns the way
    back."""
    original = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        result = original(storage, size)
        resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize

    def undo() -> None:
        torch.UntypedStorage.resize_ = original

    return undo


def collective_seconds(trainer: Trainer, step: int, calls: list[Call]) -> list[float] | None:
    """Seconds from issue to completion of every call of one step, in the order of ``calls`` (of an observed step).

    None where the profiler saw other calls than those."""
    gpu = trainer.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=activities) as profiled:
        trainer.step(step)
    events = sorted((event for event in profiled.events() if _is_collective(event, gpu=gpu)), key=_start)
    if not gpu:
        # The processes of one CPU issue calls from one thread, so they start in the order in which they were made.
        return [_seconds(event) for event in events] if len(events) == len(calls) else None
    return _by_operation(events, calls)


def _is_collective(event: Any, *, gpu: bool) -> bool:
    if gpu and event.device_type != torch.autograd.DeviceType.CUDA:
        return False
    name = str(event.name)
    return name.startswith("nccl:" if gpu else "gloo:") and "barrier" not in name


def _by_operation(events: list[Any], calls: list[Call]) -> list[float] | None:
    """On a GPU groups have streams of their own: only calls of one operation are in order."""
    waiting: dict[str, list[float]] = {}
    for event in events:
        name = str(event.name).replace("alltoall", "all_to_all").replace("allgather", "all_gather")
        name = name.replace("allreduce", "all_reduce")
        known = next((each for each in sorted(set(_OPERATIONS.values())) if each in name), "")
        waiting.setdefault(known, []).append(_seconds(event))
    if {name: len(times) for name, times in waiting.items()} != Counter(call.operation for call in calls):
        return None
    return [waiting[call.operation].pop(0) for call in calls]


def _start(event: Any) -> float:
    return float(event.time_range.start)


def _seconds(event: Any) -> float:
    return float(event.time_range.elapsed_us()) / 1e6


def summed(calls: list[Call], seconds: list[float] | None) -> tuple[CollectiveUse, ...]:
    """Calls of one step by operation and group."""
    uses: dict[tuple[str, GroupKind], CollectiveUse] = {}
    for index, call in enumerate(calls):
        key = (call.operation, call.group)
        before = uses.get(key) or CollectiveUse(operation=call.operation, group=call.group, calls=0, sent_bytes=0)
        taken = None if seconds is None else (before.seconds or 0.0) + seconds[index]
        uses[key] = CollectiveUse(
            operation=call.operation,
            group=call.group,
            calls=before.calls + 1,
            sent_bytes=before.sent_bytes + call.sent_bytes,
            seconds=taken,
        )
    return tuple(uses[key] for key in sorted(uses))
