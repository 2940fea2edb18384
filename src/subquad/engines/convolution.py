"""A convolution along the sequence, with zeros beyond both ends.

B batch, H query heads, K key-value heads, N tokens, Dv channels.
"""

from __future__ import annotations

from torch import Tensor

from subquad.ops import convolution, dispatch


def add_convolved(out: Tensor, value: Tensor, kernel: Tensor) -> Tensor:
    """out (B, H, N, Dv) plus the values (B, K, N, Dv) of each head, convolved with its row of kernel (H, size), size odd."""
    kernel = kernel.to(value.dtype)
    if dispatch.choose("convolution", (out, value, kernel)):
        return convolution.add_convolved(out, value, kernel)
    return out + convolution.convolve(value, kernel)
