"""A convolution along the sequence, with zeros beyond both ends.

B batch, H query heads, K key-value heads, N tokens, Dv channels.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from subquad.ops import convolution as compiled
from subquad.ops import dispatch


def add_convolved(out: Tensor, value: Tensor, kernel: Tensor) -> Tensor:
    """out (B, H, N, Dv) plus the values (B, K, N, Dv) of each head, convolved with its row of kernel (H, size), size odd.

    If no gradient is recorded, `out` may be changed in place.
    """
    kernel = kernel.to(value.dtype)
    if dispatch.can_use_compiled(out, value, kernel):
        return compiled.add_convolved(out, value, kernel)
    return out + F.conv2d(value, kernel[:, None, :, None], padding=(kernel.shape[1] // 2, 0), groups=value.shape[1])
