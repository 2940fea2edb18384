"""What reads files: for each kind, a whole set of them, which of them are damaged, and the command or function that reads them."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import tempfile
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import subquad as sq
from subquad.bench import Plan as ComparisonPlan
from subquad.bench import Setting, compare
from subquad.bench.measure import saved_inputs
from subquad.bench.results import load as load_comparison
from subquad.bench.results import save as save_comparison
from subquad.cli import app
from subquad.cli.compare import _report as report_comparison
from subquad.cli.convert import _print as print_conversion
from subquad.cli.convert import _write_page as write_conversion
from subquad.cli.train import _print as print_training
from subquad.cli.train import _written as write_training
from subquad.conversion.pretrained import load_config, load_model, load_tokenizer
from subquad.conversion.repair.loop import Stage, train
from subquad.conversion.repair.schedule import Schedule
from subquad.conversion.results import load as load_conversion
from subquad.conversion.text import calibration
from subquad.errors import SubquadError
from subquad.runs import checkpoints
from subquad.runs.tensor_file import read_tensors
from subquad.tasks import TASKS, cifar10, enwik8, listops, multi30k, stsb, wikitext2
from subquad.training import train as run_training
from subquad.training.folder import RunFolder
from subquad.training.plan import Plan as TrainingPlan
from subquad.training.plan import class_path
from tests.report.made_up import made_up
from tests.soak import damage, payloads
from tests.tasks import made_up as data
from tests.tasks.test_tasks import tiny

SAVED = Path(__file__).parents[1] / "saved"  # small runs and models of an earlier version
IDS = torch.tensor([[1, 2, 3, 4, 5]])


class Reader(ABC):
    """Files of one kind, whole in `prepare`, damaged by `spoil`, read by `read`, which raises what the user would see."""

    share: ClassVar[int] = 4  # how often it is chosen

    @abstractmethod
    def prepare(self, folder: Path) -> list[Path]:
        """Write whole files, and return those that are to be damaged."""

    @abstractmethod
    def read(self, folder: Path, chance: random.Random) -> None:
        """Read them as a user does."""

    def spoil(self, files: list[Path], mark: Path, chance: random.Random) -> str:
        """Damage one of the files; returns what was done."""
        path = chance.choice(files)
        is_json = path.suffix == ".json" and chance.random() < 0.75
        return f"{path.name}: {damage.damage_json(path, chance) if is_json else damage.damage_bytes(path, chance)}"


class Comparison(Reader):
    """The results of `subquad compare`."""

    share = 8

    def prepare(self, folder: Path) -> list[Path]:
        save_comparison(made_up(["linear", "local", "clustered"], [256, 4096, 32768], rounds=2), folder / "results.json")
        return [folder / "results.json"]

    def read(self, folder: Path, chance: random.Random) -> None:
        how = chance.choice(["advise", "advise", "page", "resume"])
        if how == "advise":
            flags = [flag for flag in ("--causal", "--decode", "--training", "--json") if chance.random() < 0.2]
            command("advise", "--length", str(chance.choice([1, 300, 16384, 500_000])), "--results", str(folder), *flags)
        elif how == "page":
            report_comparison(load_comparison(folder / "results.json"), folder, chance.random() < 0.05)
        else:  # another machine made them: nothing is measured
            compare(ComparisonPlan(("linear",), (16,)), Setting(threads=2), folder)


class Training(Reader):
    """The results and checkpoints of `subquad train`."""

    share = 8

    def prepare(self, folder: Path) -> list[Path]:
        shutil.copytree(SAVED / "training", folder / "run")
        for name in ("best", "checkpoint-3"):
            (folder / "victim" / name).mkdir(parents=True)
        files = sorted(path for path in (folder / "run").rglob("*") if path.is_file())
        return [folder / "run" / "results.json"] * len(files) + files

    def spoil(self, files: list[Path], mark: Path, chance: random.Random) -> str:
        path = chance.choice(files)
        if path.suffix in (".pt", ".bin") and chance.random() < 0.5:
            done = f"{path.name}: {payloads.write_pickle(path, mark, chance)}"
        elif path.suffix == ".safetensors" and chance.random() < 0.5:
            done = f"{path.name}: {payloads.write_safetensors(path, chance)}"
        else:
            done = super().spoil([path], mark, chance)
        if path.name not in ("results.json", checkpoints.CHECKSUMS) and chance.random() < 0.5:
            checkpoints.write_checksums(path.parent)
            done += ", with new checksums"
        return done

    def read(self, folder: Path, chance: random.Random) -> None:
        run, settings = folder / "run", tiny_digits()
        if any(path.name == "results.json" for path in changed_since(SAVED / "training", run)) or chance.random() < 0.7:
            task = TASKS["digits"]()
            plan = TrainingPlan(task=class_path(task), settings=settings)
            kind = chance.choice([{"resume": True}, {"resume": True}, {"fresh": True}, {}])
            flags = {"resume": False, "fresh": False, **kind}
            results = RunFolder(run, task, plan, {"linear": sq.Linear()}, {}, **flags).open()
            print_training(console(), results, write_training(results, run))
        else:
            results = run_training(TASKS["digits"](), ["linear"], settings, run, threads=1, resume=True, in_worker=False)
            if results.records[0].status != "done":
                raise SubquadError(results.records[0].why)
        if not all((folder / "victim" / name).exists() for name in ("best", "checkpoint-3")):
            raise AssertionError("a run has removed the folders of another one")


class Conversion(Reader):
    """The results of `subquad convert`."""

    share = 6

    def prepare(self, folder: Path) -> list[Path]:
        shutil.copytree(_converted() / "run", folder / "run")
        if random.Random(str(folder)).random() < 0.3:
            shutil.copy(SAVED / "conversion" / "results.json", folder / "run")
        return [folder / "run" / "results.json"]

    def read(self, folder: Path, chance: random.Random) -> None:
        if chance.random() < 0.3:
            convert(folder / "run", *chance.choice([["--resume"], ["--fresh"], []]))
        else:
            results = load_conversion(folder / "run" / "results.json")
            print_conversion(results, write_conversion(results, folder / "run", True))


class Model(Reader):
    """The folder of a model: configs, tokenizer and weights."""

    share = 12
    origins: ClassVar[tuple[str, ...]] = ("model", "converted", "llama")

    def prepare(self, folder: Path) -> list[Path]:
        origin = random.Random(str(folder)).choice(self.origins)
        source = _converted() / "run" / "model" if origin == "converted" else SAVED / origin
        shutil.copytree(source, folder / "model")
        (folder / "victim").mkdir()
        names = ("expected.pt", checkpoints.CHECKSUMS)
        files = sorted(path for path in (folder / "model").iterdir() if path.name not in names)
        return files + [path for path in files if path.name == "config.json"] * 2

    def spoil(self, files: list[Path], mark: Path, chance: random.Random) -> str:
        if chance.random() < 0.2:
            return payloads.hide_code(files[0].parent, mark, chance)
        path = chance.choice(files)
        if path.suffix == ".safetensors" and chance.random() < 0.5:
            return payloads.write_safetensors(path, chance)
        return super().spoil([path], mark, chance)

    def read(self, folder: Path, chance: random.Random) -> None:
        model = folder / "model"
        how = chance.choice(["load", "generate", "generate", "convert"])
        if how == "load":
            with torch.no_grad():
                sq.load(model).eval()(IDS)
        elif how == "generate":
            flags = ["--bytes"] if not (model / "tokenizer.json").exists() else []
            command("generate", str(model), "1 2 3", "--max-new-tokens", "3", *flags)
        else:
            command("convert", str(model), "--method", "linear", "--threads", "1", "--out", str(folder / "out"))


class Inputs(Reader):
    """The query, key and value of `--qkv`."""

    def prepare(self, folder: Path) -> list[Path]:
        from safetensors.torch import save_file

        tensors = {name: torch.randn(1, 2, 16, 4) for name in ("query", "key", "value")}
        torch.save(tensors, folder / "qkv.pt")
        save_file(tensors, folder / "qkv.safetensors")
        return [folder / "qkv.pt", folder / "qkv.safetensors"]

    def spoil(self, files: list[Path], mark: Path, chance: random.Random) -> str:
        path = files[chance.randrange(2)]
        how = chance.choice(["bytes", "pickle", "tensors"])
        if how == "bytes":
            return super().spoil([path], mark, chance)
        if path.suffix == ".safetensors":
            return payloads.write_safetensors(path, chance)
        if how == "pickle":
            return payloads.write_pickle(path, mark, chance)
        return spoil_tensors(path, chance)

    def read(self, folder: Path, chance: random.Random) -> None:
        for name in ("qkv.pt", "qkv.safetensors"):
            saved_inputs(folder / name)


class States(Reader):
    """Decode states that were saved."""

    def prepare(self, folder: Path) -> list[Path]:
        shutil.copy(SAVED / "states.pt", folder)
        return [folder / "states.pt"]

    def spoil(self, files: list[Path], mark: Path, chance: random.Random) -> str:
        how = chance.choice(["bytes", "pickle", "tensors", "tensors", "tensors"])
        if how == "pickle":
            return payloads.write_pickle(files[0], mark, chance)
        return spoil_tensors(files[0], chance) if how == "tensors" else super().spoil(files, mark, chance)

    def read(self, folder: Path, chance: random.Random) -> None:
        saved = read_tensors(folder / "states.pt")
        whole = torch.load(SAVED / "states.pt", weights_only=True)
        found = saved.get("states") if isinstance(saved, dict) else None
        x = whole["tokens"][:, :, 9:]
        for name in whole["states"]:
            entry = found.get(name) if isinstance(found, dict) else None
            state = sq.State.from_state_dict(entry.get("state") if isinstance(entry, dict) else entry)
            sq.attention(x, x, x, _MECHANISMS[name], is_causal=True, state=state)


class RepairCheckpoint(Reader):
    """The checkpoint of a stage of repair."""

    def prepare(self, folder: Path) -> list[Path]:
        shutil.copytree(_repaired(), folder / "repair")
        return [folder / "repair" / "small.pt"]

    def spoil(self, files: list[Path], mark: Path, chance: random.Random) -> str:
        how = chance.choice(["bytes", "pickle", "tensors", "tensors", "tensors"])
        if how == "pickle":
            return payloads.write_pickle(files[0], mark, chance)
        return spoil_tensors(files[0], chance) if how == "tensors" else super().spoil(files, mark, chance)

    def read(self, folder: Path, chance: random.Random) -> None:
        repair(folder / "repair")


class Data(Reader):
    """The data of the tasks."""

    share = 8

    def prepare(self, folder: Path) -> list[Path]:
        shutil.copytree(_data(), folder / "data")
        return sorted(path for path in (folder / "data").rglob("*") if path.is_file())

    def spoil(self, files: list[Path], mark: Path, chance: random.Random) -> str:
        path = chance.choice(files)
        done = self.spoil_content(path, chance) if chance.random() < 0.6 else damage.damage_bytes(path, chance)
        self.task = path.parent.name
        return f"{self.task}/{path.name}: {done}"

    @staticmethod
    def spoil_content(path: Path, chance: random.Random) -> str:
        """Damage what is inside of a compressed file; a picture or a label of a table."""
        import gzip
        import lzma

        if path.suffix == ".parquet":
            return spoil_table(path, chance)
        packing: Any = {".xz": lzma, ".gz": gzip}.get(path.suffix)
        content = path.read_bytes() if packing is None else packing.decompress(path.read_bytes())
        path.write_bytes(content)
        if chance.random() < 0.6:
            lines = content.split(b"\n")
            value = damage.hostile_value(chance)
            text = value if isinstance(value, str) else payloads.json.dumps(value)
            parts = lines[0].split(b"\t" if b"\t" in lines[0] else b",")
            parts[chance.randrange(len(parts))] = text.encode(errors="surrogatepass")
            lines[chance.randrange(len(lines))] = (b"\t" if b"\t" in lines[0] else b",").join(parts)
            path.write_bytes(b"\n".join(lines))
            done = f"a line with {text[:40]!r}"
        else:
            done = f"inside, {damage.damage_bytes(path, chance)}"
        if packing is not None:
            path.write_bytes(packing.compress(path.read_bytes()))
        return done

    def read(self, folder: Path, chance: random.Random) -> None:
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

    def prepare(self, folder: Path) -> list[Path]:
        import gzip
        import lzma

        text = (SAVED / "counting.txt").read_bytes()
        for name, content in (("a.txt", text), ("a.xz", lzma.compress(text)), ("a.gz", gzip.compress(text))):
            (folder / name).write_bytes(content)
        return [folder / name for name in ("a.txt", "a.xz", "a.gz")]

    def spoil(self, files: list[Path], mark: Path, chance: random.Random) -> str:
        self.name = chance.choice(files).name
        return f"{self.name}: {damage.damage_bytes(files[0].with_name(self.name), chance)}"

    def read(self, folder: Path, chance: random.Random) -> None:
        calibration(*_llama(), [folder / self.name], length=24, batch=4, tokens=2400, for_training=chance.random() < 0.5)


READERS: dict[str, type[Reader]] = {
    reader.__name__: reader
    for reader in (Comparison, Training, Conversion, Model, Inputs, States, RepairCheckpoint, Data, CalibrationText)
}
_MECHANISMS: dict[str, Any] = {
    mechanism.info.name: mechanism
    for mechanism in (
        sq.Softmax(), sq.Linear(), sq.Performer(features=8), sq.Local(window=3), sq.Reformer(buckets=4, chunk=4, rounds=2),
        sq.Pooled(stride=3, window=2),
    )
}  # fmt: skip


def command(*arguments: str) -> None:
    """Run a command of the command line in this process, and raise its error."""
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


def console() -> Any:
    from rich.console import Console

    return Console(highlight=False)


def spoil_tensors(path: Path, chance: random.Random) -> str:
    content = torch.load(path, weights_only=True)
    done = damage.damage_values(content, chance, payloads.odd_tensor)
    torch.save(content, path)
    return f"{path.name}: {done}"


def spoil_table(path: Path, chance: random.Random) -> str:
    import pyarrow
    import pyarrow.parquet

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
    return f"{column} of row {at}"


def changed_since(before: Path, after: Path) -> list[Path]:
    files = (path for path in after.rglob("*") if path.is_file())
    return [path for path in files if path.read_bytes() != (before / path.relative_to(after)).read_bytes()]


def tiny_digits() -> Any:
    from dataclasses import replace

    return replace(TASKS["digits"].info.defaults, layers=1, dim=8, heads=2, batch=16, steps=12, epochs=None)


class Small(Stage):
    """A stage of repair that takes no time."""

    name, lr = "small", 0.1

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Linear(3, 2)

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.module(batch["x"]).square().mean()

    def train(self, mode: bool) -> None:
        self.module.train(mode)


def repair(folder: Path, is_stopping: Any = lambda: False) -> None:
    batches = [{"x": torch.ones(2, 3) * i} for i in range(1, 6)]
    train(Small(), batches, Schedule(steps=6, every=2), folder=folder, is_stopping=is_stopping)


def kept(name: str) -> Path:
    """A folder that lasts as long as this process."""
    holder = tempfile.TemporaryDirectory(prefix=f"soak-{name}-")
    _KEPT.append(holder)
    return Path(holder.name)


_KEPT: list[Any] = []


@cache
def _repaired() -> Path:
    folder = kept("repair")
    steps = iter([False, False, True])
    repair(folder, lambda: next(steps))
    return folder


@cache
def _converted() -> Path:
    folder = kept("conversion")
    convert(folder / "run")
    return folder


@cache
def _data() -> Path:
    for module, held_out in ((cifar10, 3), (enwik8, 500), (listops, 9)):
        module.HELD_OUT = held_out  # type: ignore[attr-defined]
    for other in (multi30k, stsb, wikitext2):
        other.PIECES = 300  # type: ignore[attr-defined]
    listops.TRAIN = 40  # type: ignore[attr-defined]
    return data.folder(kept("data"))


@cache
def _llama() -> tuple[Any, Any]:
    place = str(SAVED / "llama")
    return load_model(place, load_config(place)), load_tokenizer(place)


@contextlib.contextmanager
def captured() -> Any:
    """What the block prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield out
