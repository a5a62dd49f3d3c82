"""Scratch memory that matrix libraries keep inside the framework's allocator.

PyTorch holds one cuBLAS workspace for each thread that multiplies (forward and autograd); Transformer Engine its own,
and three more where it overlaps tensor-parallel traffic.  Small beside real models, most of the state of tiny ones."""

from __future__ import annotations

import numpy as np

from planner.cost.context import Work
from planner.specs.batch import FloatArray
from planner.units import MIB

WORKSPACES = "matrix library workspaces"
"""Their name among the buffers of a rank."""
_THREADS = 2
_LARGE_CUBLAS = 32.0 * MIB
"""CUBLAS_WORKSPACE_CONFIG :4096:8: PyTorch's choice on Hopper, and Megatron's for deterministic runs."""
_SMALL_CUBLAS = 8.125 * MIB
"""PyTorch's choice elsewhere, :4096:2:16:8 (aten/src/ATen/cuda/CublasHandlePool.cpp)."""
BEFORE_HOPPER = ("volta", "ampere", "ada")
_ENGINE_OLD, _ENGINE_NEW = 4.0 * MIB, 32.0 * MIB
"""Transformer Engine, get_cublas_workspace_size_bytes: 32 MiB from Hopper on, 4 MiB before."""
_OVERLAP_STREAMS = 3


def workspace_bytes(work: Work) -> FloatArray:
    """Bytes on every rank, (N,)."""
    habits, architecture = work.context.backend.habits, work.context.cluster.accelerator.architecture
    if work.context.cluster.accelerator.synchronous:
        return work.zeros()
    large = habits.deterministic or architecture == "hopper"
    cublas = _THREADS * (_LARGE_CUBLAS if large else _SMALL_CUBLAS)
    engine = _ENGINE_OLD if architecture in BEFORE_HOPPER else _ENGINE_NEW
    if not habits.transformer_engine:
        return np.full(len(work.batch), cublas)
    overlap = np.where((work.tp > 1) & (work.tensor_overlap > 0), _OVERLAP_STREAMS, 0)
    return np.asarray(cublas + engine * (1 + overlap))
