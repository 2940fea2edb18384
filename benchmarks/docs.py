"""Writes the tables of docs/performance.md from what the benchmarks have measured.

    python benchmarks/docs.py

Each table stands between two marks, the first of which names its JSON file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, too
from benchmarks import engines, peers, roofline, steps
from subquad import files

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "peers": peers.section,
    "roofline": roofline.section,
    "growth": engines.section,
    "steps": steps.section,
}


def filled(text: str, folder: Path = ROOT / "benchmarks") -> str:
    """`text` with every table anew."""
    for name, section in SECTIONS.items():
        mark, end = f"<!-- made from benchmarks/{name}.json -->\n", "\n<!-- end -->"
        if text.count(mark) != 1:
            raise SystemExit(f"{PAGE.name} has the mark {mark.strip()!r} once; found {text.count(mark)}.")
        before, rest = text.split(mark)
        text = before + mark + section(json.loads((folder / f"{name}.json").read_text())) + end + rest.split(end, 1)[1]
    return text


if __name__ == "__main__":
    files.write(PAGE, filled(PAGE.read_text()).encode())
