"""Results of a run as one JSON file, which is always whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from subquad.errors import SubquadError
from subquad.runs.files import write


class ResultsError(SubquadError, ValueError):
    """A results file that cannot be read, or that belongs to another comparison."""


def write_json(path: Path, content: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, json.dumps(content).encode())
    except OSError as error:
        raise ResultsError(
            f"the results cannot be written to {path}: {error.strerror or error}. Choose another folder."
        ) from error


def read(path: Path, schema: str, version: int) -> dict[str, Any]:
    """What a results file of that schema and version holds."""
    try:
        saved = json.loads(path.read_text())
    except OSError as error:
        raise ResultsError(f"the results in {path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ResultsError(f"{path} is not whole JSON ({error}). Move it away, or start over with --fresh.") from error
    found = (saved.get("schema"), saved.get("version")) if isinstance(saved, dict) else (None, None)
    if found != (schema, version):
        writer, also = ("release", ", or start over with --fresh") if found[0] == schema else ("program", "")
        raise ResultsError(
            f"{path} must have schema {schema!r}, version {version}; got {found[0]!r}, version {found[1]!r}. "
            f"It was written by another {writer}: choose another folder{also}."
        )
    return {name: value for name, value in saved.items() if name not in ("schema", "version")}


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    names = dict.fromkeys([*before, *now])
    return [f"{n}: {before.get(n)!r} there, {now.get(n)!r} here" for n in names if before.get(n) != now.get(n)]
