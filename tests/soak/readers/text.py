"""The data of tasks, and calibration text."""

from __future__ import annotations

import contextlib
import gzip
import json
import lzma
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow
import pyarrow.parquet

from subquad.conversion.pretrained import load_config, load_model, load_tokenizer
from subquad.conversion.text import calibration
from subquad.tasks import TASKS, cifar10, enwik8, listops, multi30k, stsb, wikitext2
from tests.soak import damage
from tests.soak.damage import Damage
from tests.soak.readers.base import SAVED, Reader, kept
from tests.tasks import made_up as data
from tests.tasks.test_tasks import tiny


class Data(Reader):
    """The data of the tasks."""

    share = 8

    def prepare(self, folder: Path, chance: random.Random) -> list[Path]:
        shutil.copytree(_data(), folder / "data")
        return sorted(path for path in (folder / "data").rglob("*") if path.is_file())

    def spoil(self, files: list[Path], mark: Path, chance: random.Random) -> Damage:
        path = chance.choice(files)
        self.task = path.parent.name
        return self.spoil_content(path, chance) if chance.random() < 0.6 else damage.damage_bytes(path, chance)

    @staticmethod
    def spoil_content(path: Path, chance: random.Random) -> Damage:
        """Damage what is inside: the text of a compressed file, or an image or a label in a table."""
        if path.suffix == ".parquet":
            return spoil_table(path, chance)
        packing: Any = {".xz": lzma, ".gz": gzip}.get(path.suffix)
        content = path.read_bytes() if packing is None else packing.decompress(path.read_bytes())
        path.write_bytes(content)
        if chance.random() < 0.6:
            lines = content.split(b"\n")
            value = damage.hostile_value(chance)
            text = value if isinstance(value, str) else json.dumps(value)
            parts = lines[0].split(b"\t" if b"\t" in lines[0] else b",")
            parts[chance.randrange(len(parts))] = text.encode(errors="surrogatepass")
            lines[chance.randrange(len(lines))] = (b"\t" if b"\t" in lines[0] else b",").join(parts)
            path.write_bytes(b"\n".join(lines))
            done = damage.HOSTILE, f"{path.name}: a line with {text[:40]!r}"
        else:
            done = damage.damage_bytes(path, chance)
        if packing is not None:
            path.write_bytes(packing.compress(path.read_bytes()))
        return done

    def read(self, folder: Path, chance: random.Random) -> None:
        with small_splits():
            self.read_splits(folder)

    def read_splits(self, folder: Path) -> None:
        task, settings = TASKS[self.task](), tiny(self.task)
        if self.task == "listops":
            settings = tiny(self.task, options=(("test", "d20s"),))
        splits = task.load(folder / "data", settings)
        for rows in (splits.train, splits.valid, splits.test):
            splits.collate([rows[0], rows[len(rows) - 1]])  # type: ignore[arg-type]
        batch = splits.collate([splits.train[0], splits.train[1 % len(splits.train)]])  # type: ignore[arg-type]
        task.model("softmax", settings)(**batch)


class CalibrationText(Reader):
    """The text of `subquad convert --text`."""

    share = 2

    def prepare(self, folder: Path, chance: random.Random) -> list[Path]:
        text = (SAVED / "counting.txt").read_bytes()
        for name, content in (("a.txt", text), ("a.xz", lzma.compress(text)), ("a.gz", gzip.compress(text))):
            (folder / name).write_bytes(content)
        return [folder / name for name in ("a.txt", "a.xz", "a.gz")]

    def spoil(self, files: list[Path], mark: Path, chance: random.Random) -> Damage:
        self.path = chance.choice(files)
        return damage.damage_bytes(self.path, chance)

    def read(self, folder: Path, chance: random.Random) -> None:
        calibration(*_llama(), [self.path], length=24, batch=4, tokens=2400, for_training=chance.random() < 0.5)


def spoil_table(path: Path, chance: random.Random) -> Damage:
    rows = pyarrow.parquet.read_table(path).to_pydict()
    column = chance.choice(["img", "label"])
    at = chance.randrange(len(rows[column]))
    if column == "label":
        rows[column][at] = chance.choice([-1, 10, 2**40, None])
    else:
        picture = rows[column][at]["bytes"]
        spoiled = path.with_suffix(".picture")
        spoiled.write_bytes(picture)
        damage.damage_bytes(spoiled, chance)
        rows[column][at] = chance.choice([None, {"bytes": spoiled.read_bytes(), "path": "../x"}, {"bytes": None, "path": None}])
        spoiled.unlink()
    if chance.random() < 0.3:
        rows = {name: list(map(str, values)) if name == column else values for name, values in rows.items()}
    pyarrow.parquet.write_table(pyarrow.table(rows), path)
    return damage.HOSTILE, f"{path.name}: {column} of row {at}"


@cache
def _data() -> Path:
    return data.folder(kept("data"))


@contextlib.contextmanager
def small_splits() -> Any:
    """Make splits and vocabularies small enough for made-up data."""
    sizes = {"HELD_OUT": {cifar10: 3, enwik8: 500, listops: 9}, "TRAIN": {listops: 40}}
    sizes["PIECES"] = dict.fromkeys((multi30k, stsb, wikitext2), 300)
    with contextlib.ExitStack() as changed:
        for name, modules in sizes.items():
            for module, size in modules.items():
                changed.enter_context(patch.object(module, name, size))
        yield


@cache
def _llama() -> tuple[Any, Any]:
    place = str(SAVED / "llama")
    return load_model(place, load_config(place)), load_tokenizer(place)
