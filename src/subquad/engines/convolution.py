"""A convolution along the sequence: what lies beyond both ends is 0.

B batch, H query heads, K key-value heads, N tokens, Dv channels.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from subquad.ops import convolution as compiled
from subquad.ops import dispatch


def add_convolved(out: Tensor, value: Tensor, kernel: Tensor) -> Tensor:
    """out (B, H, N, Dv), plus each query head's kernel (H, size), of odd size, over the values (B, K, N, Dv) of its head.

    Where no graph is recorded, `out` itself may take the sum.
    """
    kernel = kernel.to(value.dtype)
    if dispatch.can_use_compiled(out, value, kernel):
        return compiled.add_convolved(out, value, kernel)
    return out + F.conv2d(value, kernel[:, None, :, None], padding=(kernel.shape[1] // 2, 0), groups=value.shape[1])
