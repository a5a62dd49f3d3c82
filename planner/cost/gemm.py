"""Time of matrix multiplications by shape, plain and grouped (mixture of experts).

A GEMM of M x K by K x N takes 2 (M + a)(K + b)(N + a) / R: the half-points a and b are tile and pipeline losses, R
the sustained rate; it is never faster than its operands can be streamed."""

from __future__ import annotations

import numpy as np

from planner.cost.constants import Constants
from planner.specs.batch import FloatArray

Size = FloatArray | float

_FP32_ACCUMULATE_BYTES = 8.0
"""Weight-gradient GEMMs that accumulate in fp32 read and write their result: 4 + 4 bytes an element."""


def gemm_s(
    constants: Constants, rate: float, stream: float, m: Size, k: Size, n: Size, *, out_bytes: float = 2.0
) -> FloatArray:
    """Seconds of one M x K by K x N multiplication; ``rate`` FLOP/s before shape losses, ``stream`` bytes/s."""
    a, b = constants.gemm_half_mn, constants.gemm_half_k
    compute = 2.0 * (m + a) * (k + b) * (n + a) / rate
    traffic = (2.0 * (m * k + k * n) + out_bytes * (m * n)) / stream
    return np.maximum(compute, traffic)


def linear_s(
    constants: Constants, rate: float, stream: float, tokens: Size, inputs: Size, outputs: Size, *, frozen: bool = False
) -> tuple[FloatArray, FloatArray]:
    """(forward, backward) seconds of a linear layer: y = x W, dx = dy W^T, dW = x^T dy accumulated in fp32.

    Frozen weights have no dW."""
    forward = gemm_s(constants, rate, stream, tokens, inputs, outputs)
    input_gradient = gemm_s(constants, rate, stream, tokens, outputs, inputs)
    if frozen:
        return forward, input_gradient
    weight_gradient = gemm_s(constants, rate, stream, inputs, tokens, outputs, out_bytes=_FP32_ACCUMULATE_BYTES)
    return forward, input_gradient + weight_gradient


def adapter_s(
    rate: float, stream: float, rows: FloatArray, inputs: Size, rank: float, outputs: Size
) -> tuple[FloatArray, FloatArray]:
    """(forward, backward) seconds of a low-rank adapter: x A B, scaled and added to the output of the matrix beside it.

    Its GEMMs are so thin that device memory bounds them up to ranks of some hundreds.  Forward reads x and writes
    x A B, scales it (read, write) and adds it (two reads, one write); backward scales dy (read, write), reads it for dB
    and for the gradient of x A, reads x for dA, and writes dx and adds it to that of the matrix beside."""
    compute = 2.0 * rows * rank * (inputs + outputs) / rate
    forward = 2.0 * rows * (inputs + 6.0 * outputs) / stream
    backward = 2.0 * rows * (5.0 * inputs + 4.0 * outputs) / stream
    return np.maximum(compute, forward), np.maximum(2.0 * compute, backward)


def grouped_linear_s(
    constants: Constants,
    rate: float,
    stream: float,
    rows: FloatArray,
    groups: FloatArray,
    inputs: Size,
    outputs: Size,
    *,
    frozen: bool = False,
) -> tuple[FloatArray, FloatArray]:
    """(forward, backward) seconds of ``groups`` expert matrices that share ``rows`` inputs.

    The rate falls with tokens per expert t as t / (t + half); in weight gradients t is also the reduction length, so
    its own half-point adds to that, and they read and write every local expert in fp32 whatever the number of tokens
    (frozen experts have none)."""
    a, b, half = constants.gemm_half_mn, constants.gemm_half_k, constants.expert_half_tokens
    filled = rows + groups * half * np.minimum(rows / groups, 1.0)
    weights = groups * (inputs * outputs)
    streamed = 2.0 * rows * (inputs + outputs) / stream
    forward = 2.0 * filled * (inputs + b) * (outputs + a) / rate
    input_gradient = 2.0 * filled * (outputs + b) * (inputs + a) / rate
    read = streamed + 2.0 * weights / stream
    if frozen:
        return np.maximum(forward, read), np.maximum(input_gradient, read)
    weight_gradient = 2.0 * (filled + groups * b) * (inputs + a) * (outputs + a) / rate
    accumulated = streamed + _FP32_ACCUMULATE_BYTES * weights / stream
    return (
        np.maximum(forward, read),
        np.maximum(input_gradient, read) + np.maximum(weight_gradient, accumulated),
    )
