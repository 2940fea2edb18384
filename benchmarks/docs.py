"""Writes the tables of docs/performance.md, docs/results.md, docs/converting.md and the README from the measurements.

    python benchmarks/docs.py

Each table is between two markers, the first of which names its JSON file. The step times of docs/results.md come from
benchmarks/times.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, too
from benchmarks import compile as compilation
from benchmarks import converting, engines, features, peers, roofline, serving, steps
from benchmarks.suite import page, times
from subquad.runs.files import write_atomically

Sections = Mapping[str, Callable[[dict[str, Any]], str]]
ROOT = Path(__file__).parents[1]
PERFORMANCE, RESULTS, CONVERTING = (ROOT / "docs" / f"{name}.md" for name in ("performance", "results", "converting"))
README = ROOT / "README.md"
TIMES = times.beside(ROOT / "benchmarks" / "results.json")
SECTIONS: dict[Path, Sections] = {
    PERFORMANCE: {
        "peers": peers.section,
        "roofline": roofline.section,
        "growth": engines.section,
        "steps": steps.section,
        "compile": compilation.section,
    },
    CONVERTING: {"converting": converting.section, "serving": serving.section, "features": features.section},
    RESULTS: {"results": lambda found: page.section(found, times.read(TIMES))},
    README: {"results": page.overview},
}


def filled(path: Path, sections: Sections, folder: Path = ROOT / "benchmarks") -> str:
    """The page with its tables made again."""
    text = path.read_text()
    for name, section in sections.items():
        marker, end = f"<!-- made from benchmarks/{name}.json -->\n", "\n<!-- end -->"
        if text.count(marker) != 1:
            raise SystemExit(f"{path.name} must have the marker {marker.strip()!r} once; found it {text.count(marker)} times.")
        before, rest = text.split(marker)
        text = before + marker + section(json.loads((folder / f"{name}.json").read_text())) + end + rest.split(end, 1)[1]
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    for path, sections in SECTIONS.items():
        write_atomically(path, filled(path, sections).encode())


if __name__ == "__main__":
    main()
