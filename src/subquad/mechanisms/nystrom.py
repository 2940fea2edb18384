"""Nystrom attention: the softmax matrix, approximated through a few landmarks.

    o = F pinv(A) (B v) + conv(v),    F = softmax(s q kl^T),  A = softmax(s ql kl^T),  B = softmax(s ql k^T),  s = 1/sqrt(D)

ql and kl are the means of q and k over m segments of the real tokens. The pseudo-inverse is computed by iteration:
Z0 = A^T/(|A|_1 |A|_inf) for each matrix, Z <- Z(13 I - AZ(15 I - AZ(7 I - AZ)))/4.

Xiong et al., 2021. O(N m D + m^3) time. With at most m real tokens, the tokens are the landmarks, and the result is exact
softmax. The optional convolution runs along positions; pads count as zeros, and so does everything beyond both ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subquad.engines.call import Call
from subquad.engines.convolution import add_convolved
from subquad.engines.low_rank import attend, pinv, segment_means, segment_members
from subquad.families.base import Info, Mechanism, Sizes
from subquad.masks import zero_pads
from subquad.ops.precision import upcast
from subquad.state import StateTensors

INFO = Info(
    name="nystrom",
    family="low_rank",
    engine="low_rank",
    idea="means of segments are landmarks: softmax to, among and from them, combined with a pseudo-inverse",
    paper="Xiong et al., 2021, Nystromformer: A Nystrom-Based Algorithm for Approximating Self-Attention, arXiv:2102.03902",
    time="O(N m D + m^3)",
    memory="O(N (m + D))",
    parameters="with conv, the kernels of the convolution",
    refuses={
        "is_causal": "it has no sound causal form: landmarks average the whole sequence, including the future",
        "decode": "landmarks average the whole sequence, so a new token changes all of them",
        "cross": "landmarks are means over queries and keys of the same tokens",
        "attn_mask": "queries attend to keys through landmarks, so no single pair can be masked",
        "dropout_p": "queries attend to keys through landmarks, so no weight of a single pair can be dropped",
    },
)


@dataclass(frozen=True, kw_only=True)
class Nystrom(Mechanism):
    """Attention through landmarks; `key_padding_mask` applies to queries and keys alike.

    Args:
        landmarks: m, the number of segments.
        iterations: the number of iterations for the pseudo-inverse.
        conv: the size, odd, of a convolution of the values along the sequence, with one kernel per query head; None for none.
    """

    info: ClassVar[Info] = INFO
    landmarks: int = 64
    iterations: int = 6
    conv: int | None = None

    def __post_init__(self) -> None:
        self._require_count("landmarks")
        self._require_count("iterations", most=1000)
        if self.conv is not None:
            self._require_rows("conv")
            if self.conv % 2 == 0:
                self._refuse("conv", "must be odd, so that a kernel has a middle")

    @property
    def refuses(self) -> Mapping[str, str]:
        if self.conv is None:
            return self.info.refuses
        build = f"Nystrom(conv={self.conv}).build(heads=..., head_dim=...)"
        return {**self.info.refuses, "functional": f"with conv it has learned kernels; use {build}, or conv=None"}

    def parameters(self, sizes: Sizes) -> dict[str, Tensor]:
        if self.conv is None:
            return {}
        bound = self.conv**-0.5
        return {"kernel": torch.empty(sizes.heads, self.conv).uniform_(-bound, bound)}

    def run(self, call: Call) -> tuple[Tensor, StateTensors | None]:
        query, key, value = (upcast(zero_pads(x, call.key_padding_mask)) for x in (call.query, call.key, call.value))
        if query.shape[2] <= self.landmarks:
            out = attend(query, key, value, call.key_padding_mask, call.scale)
        else:
            out = self._approximate(query, key, value, call.key_padding_mask, call.scale)
        if self.conv is not None and query.shape[2]:
            out = add_convolved(out, value, call.weights["kernel"])
        return out.to(call.query.dtype), None

    def _approximate(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        member = segment_members(mask, query, self.landmarks)  # (B, m, N)
        is_even = mask is None and query.shape[2] % self.landmarks == 0
        ql = segment_means(query, member, is_even)  # (B, H, m, D)
        kl = segment_means(key, member, is_even).repeat_interleave(groups, dim=1)  # (B, H, m, D)
        a = (ql @ kl.mT * (query.shape[-1] ** -0.5 if scale is None else scale)).softmax(-1)
        seen = attend(ql, key, value, mask, scale)  # B v: (B, H, m, Dv)
        if mask is None:
            return attend(query, kl, pinv(a, self.iterations) @ seen, None, scale)
        # If every segment of a row has at most one token, attending to the landmarks is exact. A may be singular there: use I.
        exact = (mask.sum(1) <= self.landmarks)[:, None, None, None]
        eye = torch.eye(self.landmarks, dtype=a.dtype, device=a.device)
        mixed = pinv(torch.where(exact, eye, a), self.iterations) @ seen
        vl = segment_means(value, member, is_even).repeat_interleave(groups, dim=1)
        return attend(query, kl, torch.where(exact, vl, mixed), member.any(-1), scale)
