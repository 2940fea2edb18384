"""A decode step of the hybrid engine: one token per sequence, whose near keys are the whole window of the state and its own.

    o = (sum_j e^(s q . k_j - c) v_j + e^(log g - c) phi(q) S) / the same with 1 in place of v

over the kept keys j and the token's own; S are the sums over all keys that have left the window (see `subquad.engines.hybrid`).

B batch, H query heads, K key-value heads, G = H / K, D channels, Dv value channels, m features, w kept keys.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines.call import Call
from subquad.engines.hybrid import HybridCall, capacity_of
from subquad.engines.step import StateView, Step
from subquad.ops.precision import compute_dtype
from subquad.state import StateTensors, rows


def prepare_step(call: Call, hybrid: HybridCall) -> Step | None:
    """A step for calls like this one."""
    return _HybridStep(call, hybrid) if call.query.dtype == compute_dtype(call.query) else None


class _HybridStep(Step):
    def __init__(self, call: Call, hybrid: HybridCall) -> None:
        self._hybrid, self._rule, self._kv_heads = hybrid, hybrid.rule, call.key.shape[1]
        self._feature_map = hybrid.feature_map
        self._log_mix = hybrid.log_mix.detach().to(call.query.dtype).reshape(1, self._kv_heads, -1, 1)  # (1, K, G, 1)
        self._tiny = torch.finfo(call.query.dtype).tiny

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, past: StateView, seen: int, *, may_overwrite: bool
    ) -> tuple[Tensor, StateTensors, bool]:
        S, old_key, old_value, count = (rows(past[name]) for name in ("S", "key", "value", "count"))
        kept = old_key.shape[2]
        if (more := capacity_of(seen + 1, self._rule.window) - kept) > 0:
            old_key, old_value, kept = F.pad(old_key, (0, 0, more, 0)), F.pad(old_value, (0, 0, more, 0)), kept + more
        keys, values = torch.cat([old_key, key], dim=2), torch.cat([old_value, value], dim=2)  # (B, K, w + 1, ...)
        empty = None  # (B, 1, w + 1): rows that no token has filled
        if min(count.tolist(), default=kept) < kept:
            empty = (torch.arange(kept + 1, device=key.device) < kept - count[:, None]).unsqueeze(1)
        out = self._attend(query, keys, values, S, empty)

        phi, _ = self._feature_map.key(self._hybrid.project(keys[:, :, :1], "key"))  # of the key that leaves the window
        assert phi is not None
        if empty is not None:
            phi = phi.masked_fill(empty[:, :, :1, None], 0)
        left = phi.mT * F.pad(values[:, :, :1], (0, 1), value=1.0)
        state: StateTensors = {
            "S": S.add_(left) if may_overwrite else S + left,
            "key": keys[:, :, 1:],
            "value": values[:, :, 1:],
            "count": (count + 1).clamp(max=kept),
        }
        return out, state, True

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, S: Tensor, empty: Tensor | None) -> Tensor:
        """(B, H, 1, Dv)."""
        grouped = query.squeeze(2).unflatten(1, (self._kv_heads, -1))  # (B, K, G, D)
        phi = (
            self._feature_map.query(self._hybrid.project(query, "query")).squeeze(2).unflatten(1, (self._kv_heads, -1))
        )  # (B, K, G, m)
        far = phi @ S  # (B, K, G, Dv + 1)
        scores = (grouped * self._rule.scale) @ keys.mT  # (B, K, G, w + 1)
        if empty is not None:
            scores = scores.masked_fill(empty.unsqueeze(2), -math.inf)
        total = far[..., -1:]
        log_far = torch.where(total >= self._tiny, total.log() + self._log_mix, -math.inf)
        top = torch.maximum(log_far, scores.amax(-1, keepdim=True))
        factor = torch.where(total >= self._tiny, (self._log_mix - top).exp(), 0)
        weights = (scores - top).exp()
        denominator = weights.sum(-1, keepdim=True) + factor * total
        out = (weights @ values + factor * far[..., :-1]) / denominator
        return out.flatten(1, 2).unsqueeze(2)
