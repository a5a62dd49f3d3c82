"""A process group whose other ranks are not there: every collective is a copy of the same size on this device.

One rank of a plan computes on it exactly what it would compute among the others, on values that are finite but not
those of a training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

BACKEND = "planner_loopback"
RECEIVED_SPREAD = 0.02
"""Standard deviation of what is received from another pipeline stage."""


def _done() -> Any:
    """A collective that has ended: its copy stands in the current stream."""
    future: Future[None] = Future()
    future.set_result(None)
    return _create_work_from_future(future)


class Loopback(dist.ProcessGroup):
    """Rank ``rank`` of ``size``, alone."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._received: dict[tuple[Any, ...], Tensor] = {}

    def size(self) -> int:
        """Ranks that the group would have."""
        return self._size

    def getBackendName(self) -> str:  # noqa: N802 - the name that torch calls
        """Name under which the group was registered."""
        return BACKEND

    @property
    def pg_name(self) -> str:
        """Name under which torch knows the group."""
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def group_name(self) -> str:
        """The same, where torch asks for it by this name."""
        return self.pg_name

    def barrier(self, *_: Any, **__: Any) -> Any:
        """Nobody is waited for."""
        return _done()

    def allreduce(self, tensors: Sequence[Tensor], *_: Any, **__: Any) -> Any:
        """Reads and writes the tensors and leaves their values."""
        for tensor in tensors:
            tensor.mul_(1)
        return _done()

    def allreduce_coalesced(self, tensors: Sequence[Tensor], *_: Any, **__: Any) -> Any:
        """As ``allreduce``."""
        return self.allreduce(tensors)

    def broadcast(self, tensors: Sequence[Tensor], *_: Any, **__: Any) -> Any:
        """As ``allreduce``."""
        return self.allreduce(tensors)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *_: Any, **__: Any) -> Any:
        """Every part is this rank's own."""
        for parts, own in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(own)
        return _done()

    def all_gather_single(self, output: Tensor, own: Tensor, *_: Any, **__: Any) -> Any:
        """``output`` is as many times ``own`` as there are ranks."""
        flat = own.reshape(-1)
        for part in output.view(self._size, -1):
            # The input may be its own part of the output.
            if part.data_ptr() != flat.data_ptr():
                part.copy_(flat)
        return _done()

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *_: Any, **__: Any
    ) -> Any:
        """Several of them."""
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return _done()

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], *_: Any, **__: Any) -> Any:
        """This rank's own part."""
        for output, parts in zip(outputs, inputs, strict=True):
            output.copy_(parts[self._rank])
        return _done()

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, *_: Any, **__: Any) -> Any:
        """The mean of the parts, so that all of ``whole`` is read."""
        parts = whole.reshape(self._size, -1)
        output.copy_(parts.mean(0).view_as(output))
        return _done()

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *_: Any, **__: Any
    ) -> Any:
        """Several of them."""
        for output, whole in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, whole)
        return _done()

    def all_to_all_single(self, output: Tensor, own: Tensor, *_: Any, **__: Any) -> Any:
        """What this rank sends, cut or repeated to what it receives."""
        rows = output.shape[0]
        if rows and own.shape[0]:
            whole, rest = divmod(rows, own.shape[0])
            for index in range(whole):
                output[index * own.shape[0] : (index + 1) * own.shape[0]].copy_(own)
            output[rows - rest :].copy_(own[:rest])
        return _done()

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *_: Any, **__: Any) -> Any:
        """Part by part."""
        for output, own in zip(outputs, inputs, strict=True):
            output.copy_(own)
        return _done()

    def send(self, tensors: Sequence[Tensor], *_: Any, **__: Any) -> Any:
        """Reads what is sent into a buffer of the same size."""
        for tensor in tensors:
            self._buffer(tensor).copy_(tensor)
        return _done()

    def recv(self, tensors: Sequence[Tensor], *_: Any, **__: Any) -> Any:
        """Values like those of a residual stream."""
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(self._buffer(tensor))
        return _done()

    def _buffer(self, like: Tensor) -> Tensor:
        key = (tuple(like.shape), like.dtype, like.device)
        if key not in self._received:
            self._received[key] = torch.randn(like.shape, device=like.device).mul_(RECEIVED_SPREAD).to(like.dtype)
        return self._received[key]

    # Names of the same calls before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _create(_store: Any, rank: int, size: int, _timeout: Any) -> Loopback:
    return Loopback(rank, size)


def join(rank: int, size: int) -> None:
    """Make this process rank ``rank`` of a run of ``size`` whose other ranks are not there."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=size)
