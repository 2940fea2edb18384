"""Random feature attention: trigonometric features of unit vectors, with a learned width and an optional gate.

    phi(x) = m^(-1/2) [sin(w.x^), cos(w.x^)],    x^ = x/|x|,  w = sigma * w0,  w0 ~ N(0, I),  sigma learned per head and channel

    S_t = S_(t-1) + phi(k_t) v_t^T,                              z likewise
    S_t = g_t S_(t-1) + (1 - g_t) phi(k_t) v_t^T,                with gated=True, g_t = sigmoid(w_g . x_t + b), x_t the token

Peng et al., 2021. O((N + M) m D) time, a (2m, Dv) state. With fewer key-value heads than query heads, sigma and the gate belong
to the key-value heads.

The features are signed, and so is the denominator; its magnitude is kept above `floor`. A key equal to its query has weight 1,
but in training some queries have sums near 0. With a floor of 0.001 their gradients dominate all others, and a language model
stops learning. With a floor of 1 it learns fastest, but the weights of a few keys do not add up to 1, and sharp attention is
learned late. The authors' code keeps the denominator above 1.6 in these units, at 64 directions, and redraws the directions at
every training step; here `redraw` does that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines.call import Call
from subquad.errors import OptionError
from subquad.families.base import Info, Sizes
from subquad.families.feature_maps import needs_module
from subquad.families.kernelized import MEMORY, STATE, TIME, Kernelized, refuses
from subquad.families.random_features import gaussian
from subquad.ops.feature_map import FeatureMap, NativeMap, unit_vectors
from subquad.ops.kernelized import KernelizedRule
from subquad.ops.precision import compute_dtype

INFO = Info(
    name="rfa",
    family="kernelized",
    engine="kernelized",
    idea="random sines and cosines of unit vectors with a learned width, and an optional gate that forgets",
    paper="Peng et al., 2021, Random Feature Attention, arXiv:2103.02143",
    replaces_softmax=True,
    time=TIME,
    memory=MEMORY,
    state=STATE,
    parameters="sigma; with gated=True the gate",
    random="the m feature directions",
    refuses=refuses(
        scale="q and k are normalized to unit length; the learned sigma is the scale",
        functional=needs_module("rfa", "RFA", "sigma"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class RFA(Kernelized):
    """Random feature attention.

    Args:
        features: m, the number of random directions.
        gated: let each token decide how much of the past to keep. Causal only; build it with `dim`.
        floor: the smallest magnitude of the denominator.
        seed: the seed of the directions.
    """

    info: ClassVar[Info] = INFO
    features: int = 64
    gated: bool = False
    floor: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        self._require_rows("features")
        self._require_flag("gated")
        self._require_positive("floor")
        self._require_seed()

    @property
    def refuses(self) -> Mapping[str, str]:
        if not self.gated:
            return self.info.refuses
        return {
            **self.info.refuses,
            "bidirectional": "gated=True forgets along the sequence, so it is defined for causal attention only",
        }

    @property
    def reads_tokens(self) -> bool:
        return self.gated

    def buffers(self, sizes: Sizes) -> dict[str, Tensor]:
        return {"projection": gaussian(self.features, sizes.head_dim, self.seed)}

    def parameters(self, sizes: Sizes) -> dict[str, Tensor]:
        learned = {"sigma": torch.ones(sizes.kv_heads, sizes.head_dim)}
        if self.gated:
            if sizes.dim is None:
                raise OptionError(
                    "rfa with gated=True computes its gate from the hidden states, so it needs their width; got dim=None. "
                    "Pass dim=... to build."
                )
            learned["gate_weight"] = torch.randn(sizes.kv_heads, sizes.dim) * sizes.dim**-0.5
            learned["gate_bias"] = torch.full((sizes.kv_heads,), 2.0)  # starts by keeping most of the past
        return learned

    def rule(self, call: Call) -> KernelizedRule:
        dtype, factor = compute_dtype(call.query), self.features**-0.5
        w = call.weights["projection"].to(dtype) * call.weights["sigma"].to(dtype).unsqueeze(1)  # (K, m, D)

        def phi(x: Tensor) -> Tensor:
            return torch.cat([x.sin(), x.cos()], dim=-1) * factor

        feature_map = FeatureMap(
            projection=lambda x: unit_vectors(x) @ w.mT,
            query=phi,
            key=lambda x: (phi(x), None),
            features=2 * self.features,
            weights=(w,),
            native=None if self.gated else NativeMap("trigonometric", scale=factor, weight=w),
            is_signed=True,
        )
        log_gate = self._log_gate(call) if self.gated else None
        return KernelizedRule(
            feature_map=feature_map,
            normalizer="signed",
            floor=self.floor,
            log_decay=log_gate,
            write=None if log_gate is None else -log_gate.expm1(),  # 1 - g
        )

    def _log_gate(self, call: Call) -> Tensor:
        """log g_t of each key-value head: (B, K, M)."""
        assert call.hidden is not None
        dtype = compute_dtype(call.query)
        x = call.hidden.to(dtype)
        if call.key_padding_mask is not None:
            x = x.masked_fill(~call.key_padding_mask.unsqueeze(-1), 0)
        gate = F.linear(x, call.weights["gate_weight"].to(dtype), call.weights["gate_bias"].to(dtype))
        return F.logsigmoid(gate).mT
