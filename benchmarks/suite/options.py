"""Options for short sequences.

The defaults are for thousands of tokens: a window of 256 covers all of 64 tokens, and a table would compare softmax with
itself. Here every mechanism that leaves out pairs sees about a quarter of the sequence, and one that compresses has an
eighth to a quarter as many points as tokens. Mechanisms without such a size keep their defaults.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from subquad.families.base import Mechanism


def fit_to_length(mechanism: Mechanism, tokens: int) -> Mechanism:
    """The mechanism, with options for sequences of that many tokens."""
    eighth, quarter = max(1, tokens // 8), max(2, tokens // 4)
    sizes: dict[str, dict[str, Any]] = {
        "local": {"window": eighth},
        "longformer": {"window": eighth},
        "hybrid": {"window": eighth},
        "pooled": {"window": eighth, "stride": max(2, tokens // 16)},
        "bigbird": {"block": max(1, tokens // 16), "random": 1, "globals": 1},
        "reformer": {"chunk": eighth, "buckets": 8, "rounds": 2},
        "routing": {"chunk": eighth, "clusters": 8},
        "clustered": {"clusters": eighth, "topk": eighth},
        "linformer": {"rank": quarter},
        "nystrom": {"landmarks": quarter},
        "induced": {"points": quarter},
    }
    return replace(mechanism, **sizes.get(mechanism.info.name, {}))  # type: ignore[type-var]


def changed_options(mechanism: Mechanism) -> dict[str, Any]:
    """The options that differ from the defaults."""
    defaults = vars(type(mechanism)())
    return {name: value for name, value in vars(mechanism).items() if value != defaults[name]}
