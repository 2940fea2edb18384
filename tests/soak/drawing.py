"""A random call of a random mechanism, as plain values: a pure function of seed and index.

B batch, H heads, K key-value heads, N queries, M keys, D channels, Dv value channels.
"""

from __future__ import annotations

import random
import sys
import types
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from subquad import reference
from subquad.errors import SubquadError
from subquad.families.base import Mechanism
from subquad.registry import methods, resolve
from tests.options import small, variants

DTYPES = ("float16", "bfloat16", "float32", "float64")
STRIDES = ("contiguous", "transposed", "sliced", "expanded", "misaligned", "lazy")
DIMS = (16, 32, 64, 80, 128)
MAGNITUDES = (1e-30, 1e-20, 1e-8, 1e-3, 10.0, 1e3, 1e8, 1e12, 1e15, 1e20, 1e30)
COMPILED_EVERY, INDUCTOR_EVERY = 400, 8000
WHOLE = (0, 1, 2, 3, 5, 7, 8, 16, 33, 64, 100, 2**31 - 1)
REAL = (1e-300, 1e-8, 0.1, 0.5, 1.0, 3.0, 1e300)
# Options that set the size of weights, or the number of iterations: a huge one asks for more memory, or time, than there is.
LIMITS = {
    "features": 300,
    "buckets": 300,
    "bits": 300,
    "rank": 300,
    "points": 300,
    "rounds": 5,
    "iterations": 12,
    "conv": 101,
    "max_length": 700,
    ("routing", "clusters"): 300,
}
FORMED_PAIRS = 1_500_000  # numbers that a reference may form at once; more take too long


@dataclass(frozen=True)
class Spec:
    """One call. Lists by tensor have the entries "q", "k", "v".

    Args:
        options: of the mechanism.
        strides: how each tensor lies in memory, one of `STRIDES`, and the dimension that is special there.
        magnitudes: what each tensor is multiplied by.
        spikes: by tensor, tokens that are multiplied by another number.
        padding: where pads are: "left", "right", "inner", or "empty" for a row of nothing else.
        fill: what keys and values hold in pads, and queries, too, with `fills_queries`.
        attn_mask: "bool" or "float", with `mask_shape`.
        has_nan_query: one channel of one query is NaN.
        grad: which of q, k, v, hidden and weights gradients are taken of.
        pieces: lengths of the pieces that the tokens are fed in, with a state; None for all at once.
        saved_after: the piece after which the state is saved and loaded.
        entry: "function" or "module".
        weights: the precision of the module's weights.
        compiler: a backend of torch.compile.
        together: "threads" that call at once, or a "fork" of this process.
        wrong: what is wrong with the call, if anything; it must be refused.
    """

    mechanism: str
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    queries: int = 5
    keys: int = 5
    dim: int = 4
    value_dim: int = 4
    dtype: str = "float64"
    is_causal: bool = False
    strides: dict[str, tuple[str, int]] = field(default_factory=dict)
    magnitudes: dict[str, float] = field(default_factory=dict)
    spikes: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    padding: str | None = None
    fill: str = "0"
    fills_queries: bool = False
    attn_mask: str | None = None
    mask_shape: tuple[bool, ...] = (True, True, True, True)
    has_global_mask: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    has_nan_query: bool = False
    grad: tuple[str, ...] = ()
    pieces: tuple[int, ...] | None = None
    saved_after: int | None = None
    entry: str = "module"
    weights: str = "float64"
    compiler: str | None = None
    together: str | None = None
    threads: int = 1
    is_native: bool = True
    wrong: str | None = None
    tensor_seed: int = 0

    @property
    def needs(self) -> dict[str, bool]:
        """What the call requires of the mechanism."""
        return {
            "is_causal": self.is_causal,
            "bidirectional": not self.is_causal,
            "cross": self.queries != self.keys,
            "key_padding_mask": self.padding is not None,
            "attn_mask": self.attn_mask is not None,
            "scale": self.scale is not None,
            "dropout_p": self.dropout_p > 0,
            "enable_gqa": self.heads != self.kv_heads,
            "decode": self.pieces is not None,
            "global_mask": self.has_global_mask,
            "functional": self.entry == "function",
        }


@cache
def names() -> list[str]:
    """The mechanisms that have a reference."""
    return [name for name in methods() if reference.covers(resolve(name))]


def draw(seed: int, index: int, among: list[str] | None = None) -> Spec:
    rng = random.Random(f"{seed} {index}")
    name = rng.choice(among or names())
    is_compiled = index % COMPILED_EVERY == COMPILED_EVERY - 1
    options = draw_options(rng, name)
    mechanism = made(name, options)

    def supports(need: str, often: float, seldom: float = 0.01) -> bool:
        """Whether to require `need`: with probability `often` where it is supported, else `seldom`."""
        refused = need in mechanism.refuses
        return rng.random() < ((0.0 if is_compiled else seldom) if refused else often)

    directions = [is_causal for is_causal, need in enumerate(("bidirectional", "is_causal")) if need not in mechanism.refuses]
    is_causal = bool(rng.choice(directions if is_compiled or rng.random() < 0.97 else (0, 1)))
    kv_heads, groups = rng.choice((1, 1, 2, 3)), rng.choice((2, 2, 3, 4)) if supports("enable_gqa", 0.25) else 1
    batch = rng.choice((1, 1, 1, 2, 2, 3, 0 if rng.random() < 0.1 else 1))
    dim = draw_dim(rng)
    value_dim = dim if rng.random() < 0.5 else draw_dim(rng)
    group = rng.random()
    together = None if is_compiled or group > 0.03 else "threads" if group < 0.02 else "fork"
    threads = rng.choice((2, 3, 4)) if not is_compiled and together is None and rng.random() < 0.05 else 1
    length = draw_length(rng, 300 if threads > 1 else 0)
    if length > 150:
        batch, kv_heads, groups = min(batch, 1), 1, min(groups, 2)
    keys = draw_length(rng) if supports("cross", 0.2) and not is_causal else length
    dtype = rng.choice(DTYPES)
    sizes = {"batch": batch, "heads": kv_heads * groups, "kv_heads": kv_heads, "dim": dim, "value_dim": value_dim}
    sizes |= affordable(mechanism, sizes, length, keys, is_causal)
    spec: dict[str, Any] = {**sizes, "is_causal": is_causal, "dtype": dtype, "together": together, "threads": threads}
    spec["entry"] = "function" if supports("functional", 0.4) else "module"
    spec["weights"] = dtype if dtype == "float64" or (spec["entry"] == "module" and rng.random() < 0.3) else "float32"
    spec |= draw_masks(rng, supports, sizes, mechanism)
    if supports("scale", 0.15):
        spec["scale"] = rng.choice((0.0, -0.5, 1e-3, 0.3, 1.0, 5.0, 1e3))
    spec |= draw_content(rng, spec)
    spec["strides"] = {x: draw_stride(rng, spec) for x in "qkv"}
    has_state = not is_compiled and is_causal and "attn_mask" not in spec and supports("decode", 0.45, 0.05)
    spec["grad"] = () if rng.random() < 0.45 else tuple(x for x in ("q", "k", "v", "hidden", "weights") if rng.random() < 0.6)
    if has_state:
        spec["pieces"] = draw_pieces(rng, spec["queries"])
        if not spec["grad"] and rng.random() < 0.5:
            spec["saved_after"] = rng.randrange(len(spec["pieces"]))
    if supports("dropout_p", 0.15) and not is_compiled and not has_state and together is None and spec["keys"]:
        spec |= {"dropout_p": rng.choice((0.1, 0.5, 0.9)), "grad": ()}
    if rng.random() < 0.03 and spec.get("padding") is None and spec["queries"] and batch and not is_compiled:
        spec |= {"has_nan_query": True, "grad": (), "strides": {**spec["strides"], "q": ("contiguous", 0)}}
    if is_compiled:
        spec["compiler"] = "inductor" if index % INDUCTOR_EVERY == INDUCTOR_EVERY - 1 else "aot_eager"
    if spec.get("compiler") == "inductor":  # which reads lazy views without their sign (pytorch #145093)
        spec["strides"] = {x: (kind if kind != "lazy" else "contiguous", dim) for x, (kind, dim) in spec["strides"].items()}
    spec["is_native"] = rng.random() < 0.9
    if rng.random() < 0.02 and not is_compiled:
        spec |= {"wrong": rng.choice(WRONG), "pieces": None, "saved_after": None, "together": None, "dropout_p": 0.0}
    if mechanism.shares_query_and_key:
        for what in ("strides", "magnitudes", "spikes"):
            spec[what] = {**spec[what], **({"q": spec[what]["k"]} if "k" in spec[what] else {})}
    return Spec(name, options, **spec, tensor_seed=rng.randrange(2**31))


WRONG = ("batch", "length", "channels", "heads", "padding", "dtype", "scale", "dropout", "causal", "mask dtype")


def made(name: str, options: dict[str, Any]) -> Mechanism:
    """The mechanism; with its default options if these are refused."""
    default = resolve(name)
    try:
        return type(default)(**options)
    except SubquadError:
        return default


type_hints = cache(get_type_hints)


def draw_options(rng: random.Random, name: str) -> dict[str, Any]:
    """The defaults, or those that the contract is tested with; in half of the cases one or two of them at random."""
    cls = type(resolve(name))
    hints = type_hints(cls)
    options = {**small(name), **rng.choice(({}, *variants(name)))} if rng.random() < 0.75 else {}
    if name == "linformer":
        options = {"max_length": 700, "rank": 16, **options}
    known = [f.name for f in fields(cls)]
    for _ in range(rng.choice((0, 0, 1, 2)) if known else 0):
        option = rng.choice(known)
        options[option] = draw_value(rng, hints[option], name, option)
    if options.get("mode") == "etc":  # learns block * globals tokens
        options |= {"block": min(options.get("block", 8), 16), "globals": min(options.get("globals", 1), 4)}
    return options


def draw_value(rng: random.Random, hint: Any, name: str, option: str) -> Any:
    if option == "seed":
        return rng.choice((0, 1, 2**31, 2**63 - 1))
    if get_origin(hint) in (Union, types.UnionType):
        return draw_value(rng, rng.choice(get_args(hint)), name, option)
    if get_origin(hint) is Literal:
        return rng.choice(get_args(hint))
    if get_origin(hint) is tuple:
        return tuple(rng.choice((1, 2, 3)) for _ in range(rng.choice((1, 2, 4))))
    if hint is type(None):
        return None
    if hint is bool:
        return rng.random() < 0.5
    if hint is float:
        return rng.choice(REAL)
    limit = LIMITS.get((name, option), LIMITS.get(option, sys.maxsize))
    return min(rng.choice(WHOLE), limit)


def draw_dim(rng: random.Random) -> int:
    return rng.choice(DIMS) if rng.random() < 0.5 else rng.randint(1, 160) if rng.random() < 0.3 else rng.randint(1, 24)


def draw_length(rng: random.Random, least: int = 0) -> int:
    low, high = rng.choices(((0, 3), (1, 40), (40, 130), (130, 300), (300, 700)), (5, 60, 30, 4, 1))[0]
    return max(least, rng.randint(low, high))


def affordable(mechanism: Mechanism, sizes: dict[str, int], queries: int, keys: int, is_causal: bool) -> dict[str, int]:
    """Lengths that the dense reference can afford."""
    name, options = mechanism.info.name, {f.name: getattr(mechanism, f.name) for f in fields(mechanism)}  # type: ignore[arg-type]
    each = max(sizes["batch"], 1) * sizes["heads"]
    if name == "efficient" or options.get("kind") == "favor++":
        each *= sizes["dim"]
    if name == "reformer":
        each *= 100 * mechanism.rounds  # loops over pairs of tokens in Python
    if name == "routing":
        each *= 100
    if name == "bigbird":  # loops over blocks
        each *= 1 + 2000 // mechanism.block**2 * (1 + min(mechanism.random, 20))
    if name == "svd":
        each *= 50
    if name == "clustered":
        each *= 10
    if queries == keys:
        queries = keys = min(queries, int((FORMED_PAIRS / each) ** 0.5))
    else:
        shrunk = min(1.0, (FORMED_PAIRS / each / max(queries * keys, 1)) ** 0.5)
        queries, keys = int(queries * shrunk), int(keys * shrunk)
    return {"queries": queries, "keys": queries if is_causal else keys}


def draw_masks(rng: random.Random, supports: Any, sizes: dict[str, int], mechanism: Mechanism) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if supports("key_padding_mask", 0.45):
        found["padding"] = rng.choice(("left", "right", "inner", "empty"))
        found["fill"] = rng.choice(("0", "0", "1e4", "inf", "nan"))
        found["fills_queries"] = sizes["queries"] == sizes["keys"] and rng.random() < 0.3
    if supports("attn_mask", 0.4):
        found["attn_mask"] = rng.choice(("bool", "float"))
        found["mask_shape"] = tuple(rng.random() < 0.6 for _ in range(4))[rng.choice((0, 0, 1, 2)) :]
    if supports("global_mask", 0.4):
        found["has_global_mask"] = True
    return found


def draw_content(rng: random.Random, spec: dict[str, Any]) -> dict[str, Any]:
    magnitudes, spikes = {}, {}
    if rng.random() < 0.3:
        magnitudes = {x: rng.choice(MAGNITUDES) for x in "qkv" if rng.random() < 0.5}
    if rng.random() < 0.12 and spec["keys"]:
        x = rng.choice("kkv")
        spikes[x] = [(rng.randrange(spec["keys"]), rng.choice(MAGNITUDES)) for _ in range(rng.choice((1, 2)))]
    return {"magnitudes": magnitudes, "spikes": spikes}


def draw_stride(rng: random.Random, spec: dict[str, Any]) -> tuple[str, int]:
    """The kind, and for "expanded" the dimension, for "sliced" the dimension that is read with a step, for "transposed" which two."""
    kind = rng.choice(STRIDES)
    # Tokens or rows of a batch that share memory cannot have pads of their own.
    dims = (1, 3) if spec.get("padding") else (0, 1, 2, 3)
    return kind, rng.choice(dims if kind == "expanded" else (1, 2) if kind == "transposed" else (0, 1, 2, 3))


def draw_pieces(rng: random.Random, length: int) -> tuple[int, ...]:
    """Lengths that sum to `length`: a prompt and tokens one by one, or any pieces, also empty ones."""
    if rng.random() < 0.5:
        steps = min(length, rng.choice((1, 2, 5, 9)))
        return (length - steps, *[1] * steps)
    cuts = sorted(rng.randint(0, length) for _ in range(rng.choice((0, 1, 2, 4))))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True))
