"""The noise of a request inside kernels; `specdec.kernels.reference` says what it is."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (kernels are not Python: their arguments are pointers and device scalars)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def noise_words(seed, first, position, stream, salt, BLOCK: tl.constexpr):
    """uint32 [BLOCK]: the words of tokens `first`, `first + 1`, ...; `first` and BLOCK are multiples of 4."""
    counter = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = tl.zeros_like(counter)
    w0, w1, w2, w3 = tl.philox(seed, counter, zero + position.to(tl.uint32), zero + stream.to(tl.uint32), zero + salt.to(tl.uint32))
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def gumbel(words):
    """float64: -log(-log v) for v = 1 - (word + 0.5) / 2**32."""
    v = ((~words).to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(v))


@triton.jit
def gumbel_bound(words):
    """float32, cheap, and up to rounding not below the gumbel of a word: E = -log(1 - u) is at least u."""
    return -tl.log((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10)


@triton.jit
def first_best(scores, tokens):
    """The highest score of a block, and the lowest token that has it."""
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, tokens, 2147483647), axis=0)
