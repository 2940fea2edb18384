"""Readers. Each has an intact set of files, the ones to damage, and the command or function that reads them."""

from __future__ import annotations

import contextlib
import io
import random
import tempfile
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from typer.testing import CliRunner

from subquad.cli import app
from subquad.errors import SubquadError
from tests.soak import damage, payloads
from tests.soak.damage import Damage

SAVED = Path(__file__).parents[2] / "saved"  # small runs and models that an earlier version wrote
_KEPT: list[Any] = []


class Reader(ABC):
    """Files of one kind: `prepare` writes them intact, `spoil` damages one, `read` raises the error that a user would see."""

    share: ClassVar[int] = 4  # how often it is chosen

    @abstractmethod
    def prepare(self, folder: Path, chance: random.Random) -> list[Path]:
        """Write intact files, and return those that may be damaged."""

    @abstractmethod
    def read(self, folder: Path, chance: random.Random) -> None:
        """Read the files as a user would."""

    def spoil(self, files: list[Path], mark: Path, chance: random.Random) -> Damage:
        """Damage one of the files."""
        path = chance.choice(files)
        is_json = path.suffix == ".json" and chance.random() < 0.75
        return damage.damage_json(path, chance) if is_json else damage.damage_bytes(path, chance)


class TensorReader(Reader):
    """One file that `torch.save` wrote."""

    def spoil(self, files: list[Path], mark: Path, chance: random.Random) -> Damage:
        how = chance.choice(["bytes", "pickle", "tensors", "tensors", "tensors"])
        if how == "pickle":
            return payloads.write_pickle(files[0], mark, chance)
        return spoil_tensors(files[0], chance) if how == "tensors" else super().spoil(files, mark, chance)


def command(*arguments: str) -> None:
    """Run a command line in this process, and raise its error."""
    done = CliRunner().invoke(app, list(arguments))
    print(done.output)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    if done.exit_code == 2:
        raise SubquadError(done.output)


def convert(out: Path, *flags: str) -> None:
    command(
        "convert", str(SAVED / "llama"), "--method", "hybrid", "--option", "window=2", "--text", str(SAVED / "counting.txt"),
        "--length", "24", "--batch", "4", "--tokens", "2400", "--threads", "1", "--report", "--out", str(out), *flags,
    )  # fmt: skip


def spoil_tensors(path: Path, chance: random.Random) -> Damage:
    content = torch.load(path, weights_only=True)
    done = damage.damage_values(content, chance, payloads.odd_tensor)
    torch.save(content, path)
    return done


def kept(name: str) -> Path:
    """A folder that lasts as long as this process."""
    holder = tempfile.TemporaryDirectory(prefix=f"soak-{name}-")
    _KEPT.append(holder)
    return Path(holder.name)


@cache
def converted() -> Path:
    folder = kept("conversion")
    convert(folder / "run")
    return folder


@contextlib.contextmanager
def captured() -> Any:
    """Capture what the block prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield out
