"""Files of models and tensors."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file

import subquad as sq
from subquad.bench.measure import saved_inputs
from subquad.runs import checkpoints
from subquad.runs.tensor_file import read_tensors
from tests.soak import payloads
from tests.soak.damage import Damage
from tests.soak.readers.base import SAVED, Reader, TensorReader, command, converted, spoil_tensors

IDS = torch.tensor([[1, 2, 3, 4, 5]])
_MECHANISMS: dict[str, Any] = {
    mechanism.info.name: mechanism
    for mechanism in (
        sq.Softmax(), sq.Linear(), sq.Performer(features=8), sq.Local(window=3), sq.Reformer(buckets=4, chunk=4, rounds=2),
        sq.Pooled(stride=3, window=2),
    )
}  # fmt: skip


class Model(Reader):
    """A model folder: configs, tokenizer and weights."""

    share = 12
    origins: ClassVar[tuple[str, ...]] = ("model", "converted", "llama")

    def prepare(self, folder: Path, chance: random.Random) -> list[Path]:
        origin = chance.choice(self.origins)
        source = converted() / "run" / "model" if origin == "converted" else SAVED / origin
        shutil.copytree(source, folder / "model")
        (folder / "victim").mkdir()
        names = ("expected.pt", checkpoints.CHECKSUMS)
        files = sorted(path for path in (folder / "model").iterdir() if path.name not in names)
        return files + [path for path in files if path.name == "config.json"] * 2

    def spoil(self, files: list[Path], mark: Path, chance: random.Random) -> Damage:
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

    def prepare(self, folder: Path, chance: random.Random) -> list[Path]:
        tensors = {name: torch.randn(1, 2, 16, 4) for name in ("query", "key", "value")}
        torch.save(tensors, folder / "qkv.pt")
        save_file(tensors, folder / "qkv.safetensors")
        return [folder / "qkv.pt", folder / "qkv.safetensors"]

    def spoil(self, files: list[Path], mark: Path, chance: random.Random) -> Damage:
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


class States(TensorReader):
    """Saved decode states."""

    def prepare(self, folder: Path, chance: random.Random) -> list[Path]:
        shutil.copy(SAVED / "states.pt", folder)
        return [folder / "states.pt"]

    def read(self, folder: Path, chance: random.Random) -> None:
        saved = read_tensors(folder / "states.pt")
        whole = torch.load(SAVED / "states.pt", weights_only=True)
        found = saved.get("states") if isinstance(saved, dict) else None
        x = whole["tokens"][:, :, 9:]
        for name in whole["states"]:
            entry = found.get(name) if isinstance(found, dict) else None
            state = sq.State.from_state_dict(entry.get("state") if isinstance(entry, dict) else entry)
            sq.attention(x, x, x, _MECHANISMS[name], is_causal=True, state=state)
