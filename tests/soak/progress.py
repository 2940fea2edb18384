"""What a part has found so far, in a JSON file that a later run continues."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from subquad.runs.files import write_atomically
from subquad.runs.results_file import ResultsError
from tests.soak import FINDINGS

SHRUNK = 3  # findings of one class that get a small reproduction
KEPT = 1000  # findings that are kept with all they say; the others are counted


@dataclass
class PartProgress:
    """The cases below `following`, and those in `ahead`, are done.

    Args:
        counts: by label, value and verdict, how many cases; the label "" has all of them.
        findings: what the cases returned, with their index.
        commits: of the code that ran them, the latest last.
    """

    part: str
    seed: int
    following: int = 0
    ahead: set[int] = field(default_factory=set)
    seconds: float = 0.0  # of all workers together
    counts: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    was_stopped: bool = False  # by Ctrl-C; not saved

    @property
    def done(self) -> int:
        return self.following + len(self.ahead)

    @property
    def verdicts(self) -> dict[str, int]:
        return self.counts.get("", {}).get("", {})

    def add(self, index: int, result: dict[str, Any], seconds: float) -> None:
        self.seconds += seconds
        if index >= self.following:
            self.ahead.add(index)
        while self.following in self.ahead:
            self.ahead.remove(self.following)
            self.following += 1
        verdict = result["verdict"]
        for label, values in {"": "", **result.get("labels", {})}.items():
            for value in [values] if isinstance(values, str) else values:
                found = self.counts.setdefault(label, {}).setdefault(value, {})
                found[verdict] = found.get(verdict, 0) + 1
        if verdict in FINDINGS and len(self.findings) < KEPT:
            self.findings.append({"index": index, **result})

    def forget(self, finding: dict[str, Any]) -> None:
        """Take a finding back, because its case runs again."""
        for label, values in {"": "", **finding.get("labels", {})}.items():
            for value in [values] if isinstance(values, str) else values:
                self.counts[label][value][finding["verdict"]] -= 1
        self.findings = [other for other in self.findings if other is not finding]

    def alike(self, result: dict[str, Any]) -> int:
        """How many findings of the same class there are."""
        return sum(finding_class(finding) == finding_class(result) for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {**{name: value for name, value in vars(self).items() if name != "was_stopped"}, "ahead": sorted(self.ahead)}


def finding_class(finding: dict[str, Any]) -> str:
    """What is wrong, and where, in a few words."""
    labels = finding.get("labels", {})
    where = [labels[name] for name in ("mechanism", "check") if isinstance(labels.get(name), str)]
    return ", ".join([finding["verdict"], *where])


def path_of(out: Path, part: str, seed: int) -> Path:
    return out / f"{part}-seed-{seed}.json"


def load(out: Path, part: str, seed: int) -> PartProgress:
    path = path_of(out, part, seed)
    if not path.exists():
        return PartProgress(part, seed)
    try:
        saved = json.loads(path.read_text())
        return PartProgress(**{**saved, "ahead": set(saved["ahead"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ResultsError(f"{path} cannot be read: {error}. Choose another --out, or remove it.") from error


def save(out: Path, progress: PartProgress) -> None:
    write_atomically(path_of(out, progress.part, progress.seed), json.dumps(progress.to_json()).encode())
