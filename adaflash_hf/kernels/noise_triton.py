"""The noise of `noise.py` inside Triton kernels: the same words, the same arithmetic on them."""

import triton
import triton.language as tl

from .noise import ROUNDS


_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def philox_words(counter, row, purpose: tl.constexpr, key0, key1):
    """Four uint32 blocks for a block of counters and one row."""
    c0 = counter.to(tl.uint32)
    zero = c0 * 0
    k0, k1 = zero + key0.to(tl.uint32), zero + key1.to(tl.uint32)
    return tl.philox_impl(c0, zero + row.to(tl.uint32), zero + purpose, zero, k0, k1, _ROUNDS)


@triton.jit
def uniform_of(words):
    return (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def exponential_of(words):
    u = uniform_of(words)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0)))
    return tl.where(words < 33554432, series, -tl.log(uniform_of(words ^ 0xFFFFFFFF)))
