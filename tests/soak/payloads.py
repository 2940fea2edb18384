"""Content that would do something if it were trusted: pickles and code that leave a mark when they run, tensors that lie."""

from __future__ import annotations

import json
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.soak.damage import HOSTILE, Damage, hostile_value


class Touch:
    """Its pickle creates the file `path` when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def odd_tensor(chance: random.Random) -> torch.Tensor:
    """A tensor of an unusual kind."""
    return chance.choice(_ODD)()


_ODD: list[Callable[[], Any]] = [
    lambda: torch.zeros(0), lambda: torch.tensor(3), lambda: torch.zeros(1).expand(2, 3, 10**9, 64), lambda: torch.full((2, 3, 8, 4), torch.nan),
    lambda: torch.zeros(2, 3, 8, 4, dtype=torch.complex64), lambda: torch.zeros(2, 3, 8, 4, dtype=torch.bool), lambda: torch.eye(3).to_sparse(),
    lambda: torch.zeros(2, 3, 8, 4, dtype=torch.int64), lambda: torch.zeros(2, 3, 8, 4).to(torch.float8_e4m3fn), lambda: torch.zeros(2, 0, 8, 4),
    lambda: torch.empty(2, 3, 8, 4, device="meta"), lambda: torch.quantize_per_tensor(torch.zeros(2, 3), 1.0, 0, torch.qint8),
    lambda: torch.zeros(2, 3, 8, 4).transpose(1, 2), lambda: torch.nn.Parameter(torch.zeros(2, 3)), lambda: torch.full((4,), 2**62),
]  # fmt: skip


def write_pickle(path: Path, mark: Path, chance: random.Random) -> Damage:
    """A pickle that runs code, as it is or inside what `torch.save` writes."""
    payload = Touch(mark)
    how = chance.choice(["pickle", "torch", "inside", "old"])
    if how == "pickle":
        path.write_bytes(pickle.dumps(payload))
    elif how == "torch":
        torch.save(payload, path)
    elif how == "inside":
        names = ("query", "key", "value", "identity", "progress", "weights", "tensors")
        torch.save({**{name: torch.zeros(1, 2, 8, 4) for name in names}, "more": payload}, path)
    else:
        torch.save({"weights": payload}, path, _use_new_zipfile_serialization=False)
    return "pickle that runs code", f"{path.name}: {how}"


def write_safetensors(path: Path, chance: random.Random) -> Damage:
    """The same file with another header: offsets, shapes, names and types that lie."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    name = chance.choice(list(header))
    field = chance.choice(["dtype", "shape", "data_offsets", "name", "entry"])
    value = chance.choice(
        ["F64", "I32", "U8", "BOOL", [1], [0], [2**62], [-1, 4], [10**12, 10**12], [0, 2**63], [8, 0], hostile_value(chance)]
    )
    if field == "name":
        header[chance.choice(["../x", "a" * 1000, "model.\x00", "lm_head.weight", "__metadata__"])] = header.pop(name)
    elif field == "entry" or not isinstance(header[name], dict):
        header[name] = value
    else:
        header[name][field] = value
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + content[8 + size :])
    return HOSTILE, f"{path.name}: header, {name}, {field}, {str(value)[:40]}"


def hide_code(folder: Path, mark: Path, chance: random.Random) -> Damage:
    """Code in a model folder, and a config that asks for it."""
    code = f"open({str(mark)!r}, 'w').close()\n"
    how = chance.choice(
        ["auto_map", "unknown type", "tokenizer", "generate", "kernel", "pickle", "index", "adapter", "module", "weights"]
    )
    if how in ("auto_map", "unknown type"):
        (folder / "evil.py").write_text(code + "class Evil: pass\n")
        names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
        changes: dict[str, Any] = {"auto_map": dict.fromkeys(names, "evil.Evil")}
        _change(folder / "config.json", **changes, **({"model_type": "evil"} if how == "unknown type" else {}))
    elif how == "tokenizer":
        (folder / "evil.py").write_text(code + "class Evil: pass\n")
        _change(
            folder / "tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
        )
    elif how == "generate":
        (folder / "custom_generate").mkdir(exist_ok=True)
        (folder / "custom_generate" / "generate.py").write_text(code + "def generate(*_, **__): ...\n")
    elif how == "kernel":
        name = chance.choice(["evil/kernel", "evil/kernel:run", "../evil", "sdpa|evil/kernel"])
        _change(folder / "config.json", attn_implementation=name, _attn_implementation=name)
    elif how == "module":
        name = chance.choice(
            [
                "pipeline",
                "Trainer",
                "os",
                "AutoModel",
                "__builtins__",
                "GenerationConfig",
                "logging",
                "BertModel",
                "PreTrainedModel",
            ]
        )
        _change(folder / "config.json", architectures=[name])
    elif how == "weights":
        write_pickle(folder / "adapter_model.bin", mark, chance)
        _change(folder / "config.json", transformers_weights="adapter_model.bin")
    elif how == "adapter":
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "../victim", "peft_type": "LORA"}))
        write_pickle(folder / "adapter_model.bin", mark, chance)
    else:
        weights = load_file(folder / "model.safetensors") if how == "index" else {}
        (folder / "model.safetensors").unlink()
        write_pickle(folder / "pytorch_model.bin", mark, chance)
        if how == "index":
            index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "pytorch_model.bin")}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return "code in a model", how


def _change(path: Path, **changes: Any) -> None:
    saved = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**saved, **changes}))
