"""How a file goes wrong: cut, bits flipped, bytes from elsewhere; or JSON of the right shape with something hostile in it."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

TAG = "soakmark"  # an element or attribute of this name in a page came from a file
HOSTILE_TEXT = [
    "", "..", "../victim", "/etc/passwd", "a/../../b", "\x00", "\x1b]0;title\x07\x1b[31m", "\ud800", "[/red]", "[bold", "{x}", "%s",
    f"<{TAG}>", f"</script><{TAG}>", f"<!--<script><{TAG}>", f"\" {TAG}=\"", f"' {TAG}='", f"javascript:{TAG}", "{{ 7 * 7 }}",
    "x" * 10_000, "²", "NaN", "Infinity", "-1", "1e400", "true", "None", "日本", "\u202e", "__class__", "__init__", "os.system",
]  # fmt: skip
HOSTILE_NUMBERS = [
    0, -1, 1, 2, 7, -0.0, 0.5, 1e-320, 1e308, -1e308, 2**31 - 1, 2**31, 2**53, 2**62, 2**63, -(2**63), 10**40, 10**400, math.nan,
    math.inf, -math.inf, 5e-324,
]  # fmt: skip
USUAL_TEXT = [
    "sdpa", "softmax", "linear", "hybrid", "other", "measured", "predicted", "failed", "refused", "done", "running", "stopped",
    "forward", "decode", "float64", "cuda", "cpu", "naive swap", "keep", "lora", "sigmoid", "bert", "LlamaModel", "fp32",
]  # fmt: skip
REMOVE, REPEAT, RENAME, SWAP = "remove", "repeat", "rename", "swap"
Damage = tuple[str, str]  # its kind, and what was done
_KINDS = {"cut": "truncated", "empty": "truncated", "flip": "bits flipped"}  # of damage to bytes; all others are "other bytes"
HOSTILE = "hostile content"


def damage_bytes(path: Path, chance: random.Random) -> Damage:
    """Damage the file as storage and transport do."""
    content = bytearray(path.read_bytes())
    size = len(content)
    how = chance.choice(["cut", "cut", "flip", "flip", "flip", "insert", "overwrite", "empty", "other", "double"])
    if how == "cut":
        del content[chance.randrange(size + 1) if size else 0 :]
    elif how == "flip" and size:
        for _ in range(chance.choice([1, 1, 1, 2, 10, 100])):
            content[_place(size, chance)] ^= 1 << chance.randrange(8)
    elif how == "insert":
        at = _place(size + 1, chance)
        content[at:at] = chance.randbytes(chance.choice([1, 3, 50]))
    elif how == "overwrite" and size:
        at = _place(size, chance)
        part = chance.randbytes(chance.choice([1, 8, 100]))[: size - at]
        content[at : at + len(part)] = part
    elif how == "empty":
        content.clear()
    elif how == "other":
        content[:] = chance.choice(
            [b"\x00" * 64, b"{}", b"[]", b"null", b"[" * 60_000, b"\xff\xfe{}", b"<html>", b"PK\x03\x04", b"\x80\x04."]
        )
    elif how == "double":
        content *= 2
    path.write_bytes(content)
    return _KINDS.get(how, "other bytes"), f"{path.name}: {how}, {size} -> {len(content)} bytes"


def _place(size: int, chance: random.Random) -> int:
    """More often near the beginning, where headers are."""
    return min(int(size * chance.random() ** chance.choice([1, 4])), size - 1)


def damage_json(path: Path, chance: random.Random) -> Damage:
    """Put something hostile at one or a few places of a JSON file."""
    content = json.loads(path.read_bytes())
    done = [_change(content, chance) for _ in range(chance.choice([1, 1, 1, 2, 5]))]
    path.write_bytes(json.dumps(content).encode())
    return HOSTILE, f"{path.name}: {'; '.join(done)}"


def damage_values(content: Any, chance: random.Random, others: Callable[[random.Random], Any]) -> Damage:
    """The same for a structure in memory, whose values may also become `others`."""
    return HOSTILE, "; ".join(_change(content, chance, others) for _ in range(chance.choice([1, 1, 2])))


def _change(content: Any, chance: random.Random, others: Callable[[random.Random], Any] | None = None) -> str:
    """Change one entry, found by walking down at random."""
    holder: Any = None
    key: Any = None
    place, node = "", content
    while isinstance(node, (dict, list)) and node and (holder is None or chance.random() < 0.8):
        holder, key = node, chance.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node, place = node[key], f"{place}[{key!r}]"
    if holder is None:
        return "nothing to change"
    how = chance.choice([REMOVE, REPEAT, RENAME, SWAP, *["value"] * 8])
    if how == REMOVE:
        del holder[key]
    elif how == REPEAT and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(node))
    elif how == RENAME and isinstance(holder, dict):
        holder[chance.choice(HOSTILE_TEXT)] = holder.pop(key) if chance.random() < 0.5 else node
    elif how == SWAP:
        holder[key] = copy.deepcopy(chance.choice(list(holder.values()) if isinstance(holder, dict) else holder))
    else:
        value = hostile_value(chance) if others is None or chance.random() < 0.5 else others(chance)
        holder[key] = value
        how = repr(value)[:60]
    return f"{place[:120]}: {how}"


def hostile_value(chance: random.Random) -> Any:
    kind = chance.choice(["text", "text", "number", "number", "other", "deep", "usual", "usual"])
    if kind == "usual":  # of the right kind, and unlike its neighbours
        return chance.choice([chance.randrange(5_000), chance.lognormvariate(0, 9), chance.choice(USUAL_TEXT)])
    if kind == "text":
        return chance.choice(HOSTILE_TEXT)
    if kind == "number":
        return chance.choice(HOSTILE_NUMBERS)
    if kind == "deep":
        deep: Any = chance.choice([None, 1, "x"])
        for _ in range(chance.choice([3, 17, 60, 300])):
            deep = [deep] if chance.random() < 0.5 else {"x": deep}
        return deep
    return copy.deepcopy(chance.choice([None, True, False, [], {}, [[]], {"": None}, [None], [1, "x"], {"name": 1}, [1] * 100]))
