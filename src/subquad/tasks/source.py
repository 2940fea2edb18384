"""Loading a task's data from a local copy or, through `datasets`, from the public source, with clear errors if that fails."""

from __future__ import annotations

import gzip
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from subquad.errors import InputError, SubquadError, first_line, load_extra
from subquad.tasks.base import Settings, TaskInfo

Read = TypeVar("Read")
Parsed = TypeVar("Parsed")
_UNREADABLE = (  # RuntimeError: a zip file with a password, or compressed in an unknown way
    OSError, EOFError, IndexError, MemoryError, RuntimeError, lzma.LZMAError, zlib.error, zipfile.BadZipFile,
)  # fmt: skip
_OPEN: dict[str, Callable[[Path], Any]] = {".xz": lzma.open, ".gz": gzip.open}


class DataError(SubquadError):
    """Data that is missing or damaged."""


def task_folder(info: TaskInfo, folder: Path) -> Path:
    """The folder with the local copy of this task's data."""
    if not folder.is_dir():
        raise DataError(f"--data must be a folder with local copies of data; {folder} is not a folder. {download_advice(info)}")
    found = folder / info.folder
    if not found.is_dir():
        raise DataError(f"{info.name} needs the folder {found}; {folder} {_contents(folder)}. {download_advice(info)}")
    return found


def find_file(info: TaskInfo, folder: Path, names: Sequence[str]) -> Path:
    """The first of `names` that is a file in `folder`."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{info.name} needs {' or '.join(names)}; {folder} {_contents(folder)}. {download_advice(info)}")


def read_bytes(path: Path) -> bytes:
    """The bytes of a file; .xz, .gz and .zip files with one member are decompressed."""
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                return archive.read(archive.namelist()[0])
        if path.suffix not in _OPEN:
            return path.read_bytes()
        with _OPEN[path.suffix](path) as file:
            return bytes(file.read())
    except _UNREADABLE as error:
        raise damaged_file(path, error) from error


def read_lines(path: Path) -> list[str]:
    """The lines of a text file, without their line ends."""
    try:
        text = read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise damaged_file(path, error) from error
    if not text.strip():
        raise damaged_file(path, "it is empty")
    return text.removesuffix("\n").split("\n")


def parse_rows(path: Path, rows: Iterable[Read], parse: Callable[[Read], Parsed], what: str) -> list[Parsed]:
    """`parse` of each row; the error names the first row on which it fails."""
    found: list[Parsed] = []
    try:
        found.extend(map(parse, rows))
    except Exception as error:  # a row may hold anything, and each reader has its own errors for that
        raise damaged_file(path, f"row {len(found) + 1} is not a {what} ({first_line(error).removesuffix('.')})") from error
    return found


def damaged_file(path: Path, error: object) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DataError(f"there is no file {path}.")
    said = first_line(error) if isinstance(error, BaseException) else f"{error}."
    return DataError(f"{path} cannot be read: {said} It may be incomplete. Get it again.")


def load_from_hub(info: TaskInfo, *name: str, **given: Any) -> Any:
    """The data set of that public name, by `datasets.load_dataset`."""
    [datasets] = load_extra("train", f"the data of {info.name}", "datasets")
    try:
        return datasets.load_dataset(*(name or info.source.split(", ")), **given)
    except Exception as error:  # no network, no such name, a broken download: the advice is the same
        raise DataError(
            f"{info.source} could not be loaded from the Hugging Face hub: {first_line(error)} {download_advice(info)}"
        ) from error


def download_advice(info: TaskInfo) -> str:
    return (
        f"Without --data and SUBQUAD_DATA, {info.source} is loaded from the Hugging Face hub, which needs a network and the "
        f"extra subquad[train]; with one of them, the data is read from the folder {info.folder} inside it."
    )


def require_length(info: TaskInfo, settings: Settings, length: int, why: str) -> None:
    if settings.length != length:
        raise InputError(f"--length of {info.name} must be {length:,}, {why}; got {settings.length:,}. Pass {length}.")


def require_rows(info: TaskInfo, count: int, least: int, what: str, advice: str) -> None:
    if count < least:
        raise DataError(f"{info.name} needs at least {least:,} {what}; got {count:,}. {advice}")


def _contents(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return f"has only {', '.join(names[:12])}{' and more' if len(names) > 12 else ''}" if names else "is empty"
