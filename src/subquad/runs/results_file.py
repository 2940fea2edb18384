"""The results of a run: one JSON file with a schema and a version, written atomically."""

from __future__ import annotations

import reprlib
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from subquad.errors import SubquadError
from subquad.runs import typed_json
from subquad.runs.files import write_atomically
from subquad.runs.typed_json import Between, Matching, MisfitError

Kind = TypeVar("Kind")
MethodName = Annotated[str, Matching("[a-z][a-z0-9_]*", "the name of a method")]  # never a path: folders are named after it
Positive = Annotated[int, Between(1, 2**31 - 1)]
Count = Annotated[int, Between(0, 2**63 - 1)]


class ResultsError(SubquadError, ValueError):
    """A results file that cannot be read or written, or that belongs to another run."""


def write_results(path: Path, schema: str, version: int, content: dict[str, Any]) -> None:
    """Write `content` with its schema and version; the folder is made if need be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, typed_json.dumps({"schema": schema, "version": version, **content}).encode())
    except OSError as error:
        raise ResultsError(
            f"the results cannot be written to {path}: {error.strerror or error}. Choose another folder."
        ) from error


def read_results(path: Path, schema: str, version: int) -> dict[str, Any]:
    """The content of a results file, which must have that schema and version."""
    try:
        saved = typed_json.load(path)
    except OSError as error:
        raise ResultsError(f"the results in {path} cannot be read: {error.strerror or error}.") from error
    except MisfitError as error:
        raise ResultsError(f"{path} cannot be read: {error}. Move it away, or start over with --fresh.") from error
    found = (saved.get("schema"), saved.get("version")) if isinstance(saved, dict) else (None, None)
    if found != (schema, version):
        writer, also = ("release", ", or start over with --fresh") if found[0] == schema else ("program", "")
        raise ResultsError(
            f"{path} must have schema {schema!r}, version {version}; got {reprlib.repr(found[0])}, version "
            f"{reprlib.repr(found[1])}. It was written by another {writer}: choose another folder{also}."
        )
    return {name: value for name, value in saved.items() if name not in ("schema", "version")}


def load_results(path: Path, schema: str, version: int, kind: type[Kind], check: Callable[[Kind], None]) -> Kind:
    """The results in a file as a `kind`; `check` raises a `MisfitError` for what its type does not say."""
    content = read_results(path, schema, version)
    try:
        found: Kind = typed_json.parse(kind, content)
        check(found)
    except MisfitError as error:
        raise ResultsError(f"{path} is not a valid results file of this version: {error}. Start over with --fresh.") from error
    return found


def differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """One phrase for each setting in which a saved run and the current one differ."""
    names = dict.fromkeys([*saved, *current])
    return [f"{n}: {saved.get(n)!r} there, {current.get(n)!r} here" for n in names if saved.get(n) != current.get(n)]


def command_line() -> str:
    """The command that is running, as one would type it."""
    return shlex.join(["subquad", *sys.argv[1:]])
