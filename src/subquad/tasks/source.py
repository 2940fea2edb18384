"""Where a task's data comes from: the public source, through `datasets`, or a local copy; and what to say when it does not."""

from __future__ import annotations

import csv
import gzip
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from subquad.errors import InputError, SubquadError, load_extra
from subquad.tasks.base import Settings, TaskInfo

Read = TypeVar("Read")
Parsed = TypeVar("Parsed")
_OPEN: dict[str, Callable[[Path], Any]] = {".xz": lzma.open, ".gz": gzip.open}


class DataError(SubquadError):
    """Data that is missing, elsewhere or damaged."""


def local(info: TaskInfo, folder: Path) -> Path:
    """The task's folder of a local copy."""
    if not folder.is_dir():
        raise DataError(f"--data is a folder with local copies of data; {folder} is none. {how_to_get(info)}")
    found = folder / info.folder
    if not found.is_dir():
        raise DataError(f"{info.name} looks for the folder {found}, which is not there; {_inside(folder)}. {how_to_get(info)}")
    return found


def one_of(info: TaskInfo, folder: Path, names: Sequence[str]) -> Path:
    """The first of `names` that is a file in `folder`."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{info.name} looks for {' or '.join(names)} in {folder}; {_inside(folder)}. {how_to_get(info)}")


def read(path: Path) -> bytes:
    """A file's bytes; of .xz, .gz and of the only member of .zip, what is packed inside."""
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                return archive.read(archive.namelist()[0])
        if path.suffix not in _OPEN:
            return path.read_bytes()
        with _OPEN[path.suffix](path) as file:
            return bytes(file.read())
    except (OSError, EOFError, IndexError, lzma.LZMAError, zlib.error, zipfile.BadZipFile) as error:
        raise damaged(path, error) from error


def lines(path: Path) -> list[str]:
    """Of a text file, each without its end."""
    try:
        text = read(path).decode()
    except UnicodeDecodeError as error:
        raise damaged(path, error) from error
    if not text.strip():
        raise damaged(path, "it is empty")
    return text.removesuffix("\n").split("\n")


def parsed(path: Path, rows: Iterable[Read], parse: Callable[[Read], Parsed], what: str) -> list[Parsed]:
    """`parse` of each row; the first row that it fails on is named."""
    found: list[Parsed] = []
    try:
        found.extend(map(parse, rows))
    except (ArithmeticError, OSError, LookupError, TypeError, ValueError, csv.Error) as error:
        raise damaged(path, f"row {len(found) + 1} is no {what} ({error})") from error
    return found


def damaged(path: Path, error: object) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DataError(f"there is no file {path}.")
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataError(f"{path} cannot be read: {said}. Is it whole? Get it again.")


def hub(info: TaskInfo, *name: str, **given: Any) -> Any:
    """What `datasets.load_dataset` has under a public name."""
    [datasets] = load_extra("train", f"the data of {info.name}", "datasets")
    try:
        return datasets.load_dataset(*(name or info.source.split(", ")), **given)
    except Exception as error:  # no network, no such name, a broken download: whatever it is, the advice is the same
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{info.source} did not come from the Hugging Face hub: {said}. {how_to_get(info)}") from error


def how_to_get(info: TaskInfo) -> str:
    return (
        f"Without --data and SUBQUAD_DATA it comes from the Hugging Face hub as {info.source}, which needs a network and the "
        f"extra subquad[train]; with them, from the folder {info.folder} inside."
    )


def require_length(info: TaskInfo, settings: Settings, length: int, why: str) -> None:
    if settings.length != length:
        raise InputError(f"{info.name} has a length of {length:,}, {why}; got {settings.length:,}. Set --length {length}.")


def require_rows(info: TaskInfo, count: int, least: int, what: str, advice: str) -> None:
    if count < least:
        raise DataError(f"{info.name} needs at least {least:,} {what}; got {count:,}. {advice}")


def _inside(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return f"there is {', '.join(names[:12])}{' and more' if len(names) > 12 else ''}" if names else "the folder is empty"
