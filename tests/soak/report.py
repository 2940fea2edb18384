"""The results of all parts: a table, results.json, and the tables of docs/reliability.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from subquad.runs.files import write_atomically
from subquad.runs.machine import describe_machine
from subquad.runs.results_file import ResultsError
from tests.soak import FINDINGS, PARTS, VERDICTS
from tests.soak import progress as records
from tests.soak.progress import PartProgress, finding_class

SCHEMA = {"schema": "subquad-soak", "version": 1}
TITLES = {
    "cases": "Random calls",
    "kills": "Interrupted runs",
    "files": "Damaged and hostile files",
    "address": "AddressSanitizer",
    "undefined": "UndefinedBehaviorSanitizer",
    "thread": "ThreadSanitizer",
}
HEADINGS = {"compiled": "torch.compile", "stride": "memory layout", "together": "concurrency", "tokens": "sequence"}
_MARKED = re.compile(r"(<!-- soak:(\w+) -->\n).*?(<!-- soak:end -->)", flags=re.DOTALL)
NOT_RUN = "No run is recorded yet.\n"


def write_results(out: Path, seed: int) -> dict[str, Any]:
    """results.json of all parts that have run with this seed."""
    parts = {}
    for part in PARTS:
        if records.path_of(out, part, seed).exists():
            parts[part] = summary(records.load(out, part, seed))
    results = {**SCHEMA, "machine": describe_machine(), "parts": parts}
    write_atomically(out / "results.json", json.dumps(results, indent=1).encode())
    return results


def summary(progress: PartProgress) -> dict[str, Any]:
    classes: dict[str, int] = {}
    for finding in progress.findings:
        classes[finding_class(finding)] = classes.get(finding_class(finding), 0) + 1
    return {
        "command": f"python -m tests.soak --part {progress.part} --seed {progress.seed} --cases {progress.done}",
        "commits": progress.commits,
        "cases": progress.done,
        "seconds": round(progress.seconds, 1),
        "verdicts": {verdict: progress.verdicts.get(verdict, 0) for verdict in VERDICTS},
        "counts": {label: dict(sorted(found.items())) for label, found in progress.counts.items() if label},
        "classes": classes,
        "findings": progress.findings,
    }


def show(results: dict[str, Any], console: Console) -> None:
    for part, found in results["parts"].items():
        table = Table("", "cases", *VERDICTS, title=f"{TITLES[part]}: {found['cases']} cases, {found['seconds']:.0f} s")
        for label, row in rows(found):
            table.add_row(label, *map(str, row))
        console.print(table)
        for name, count in sorted(found["classes"].items()):
            console.print(f"  {count} x {name}", markup=False)
        for finding in found["findings"]:
            if "not_shrunk" not in finding and finding.get("reproduction"):
                show_finding(finding, console)


def show_finding(finding: dict[str, Any], console: Console) -> None:
    console.rule(f"{finding_class(finding)}" + (f", case {finding['index']}" if "index" in finding else ""))
    for name in ("command", "error", "not_shrunk", "reproduction"):
        if finding.get(name):
            console.print(
                f"{name}: " if name == "command" else "", finding[name], sep="", markup=False, highlight=False, soft_wrap=True
            )


def rows(found: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """All cases, then by each value of each label: the number of cases, and of those with each verdict."""
    lines = [("all", found["verdicts"])]
    lines += [
        (f"{label}: {value}", verdicts) for label, values in found["counts"].items() for value, verdicts in values.items()
    ]
    return [(name, [sum(v.values()), *(v.get(verdict, 0) for verdict in VERDICTS)]) for name, v in lines]


def update_page(page: Path, out: Path) -> None:
    """Copy the results beside the page, as far as there are new ones, and render its tables from there."""
    saved, new = page.with_suffix(".json"), out / "results.json"
    text = page.read_text()
    if not _MARKED.search(text):
        raise ResultsError(f"{page} must have places for tables, <!-- soak:PART --> to <!-- soak:end -->; got none.")
    if not new.exists() and not saved.exists():
        raise ResultsError(f"there are no results to report: neither {new} nor {saved} exists. Run the soak test first.")
    results = json.loads(saved.read_text()) if saved.exists() else {**SCHEMA, "parts": {}}
    if new.exists():
        found = json.loads(new.read_text())
        results = {**found, "parts": {**results["parts"], **found["parts"]}}
        write_atomically(saved, (json.dumps(results, indent=1) + "\n").encode())
    write_atomically(page, rendered(text, results).encode())


def rendered(text: str, results: dict[str, Any]) -> str:
    """The page with its marked places filled in: `<!-- soak:PART -->` ... `<!-- soak:end -->`."""
    return _MARKED.sub(lambda found: found[1] + _section(found[2], results) + found[3], text)


def _section(name: str, results: dict[str, Any]) -> str:
    parts = results["parts"]
    if name == "summary":
        return _summary(results) if parts else NOT_RUN
    if name not in parts:
        return NOT_RUN
    found = parts[name]
    tables = []
    for label in found["counts"]:
        values = {**found, "counts": {label: found["counts"][label]}}
        lines = [
            (value.removeprefix(f"{label}: "), row) for value, row in rows(values)[1:] if row[0]
        ]  # retried findings leave 0
        if not lines:
            continue
        head = [HEADINGS.get(label, label), "cases", "answered", "refused", "findings"]
        body = [[value, row[0], row[1], row[2], sum(row[3:])] for value, row in lines]
        tables.append(_table(head, body))
    return "\n".join(tables)


def _summary(results: dict[str, Any]) -> str:
    body = []
    for part, found in results["parts"].items():
        verdicts = [found["verdicts"][verdict] for verdict in VERDICTS]
        body.append([TITLES[part], found["cases"], *verdicts, f"`{found['command']}`", ", ".join(found["commits"])])
    machine = results["machine"]
    where = f"{machine['processor']}, {machine['cores']} cores, PyTorch {machine['torch']}"
    return _table(["part", "cases", *VERDICTS, "command", "commit"], body) + f"\nOn {where}.\n"


def _table(head: list[str], body: list[list[Any]]) -> str:
    lines = [head, ["---"] + ["---:" if isinstance(cell, int) else "---" for cell in body[0][1:]], *body]
    cells = ([f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def has_findings(results: dict[str, Any]) -> bool:
    return any(found["verdicts"][verdict] for found in results["parts"].values() for verdict in FINDINGS)
