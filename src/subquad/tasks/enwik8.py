"""`enwik8`: language modelling over the first 100 MB of Wikipedia as bytes; bits per byte.

The usual split: the first 90 MB for training, 5 MB for validation, the last 5 MB for testing. A local copy is the file
itself (`enwik8`, `enwik8.zip`, `enwik8.xz`), or two excerpts: `enwik8_first20M.xz`, of which the last 500,000 bytes are for
validation, and `enwik8_last5M.xz`. With the excerpts there is less text to train on.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from subquad.tasks.base import Settings, Splits, TaskInfo
from subquad.tasks.language import ByteModel, byte_ids
from subquad.tasks.source import DataError, download_advice, find_file, load_from_hub, read_bytes, task_folder

WHOLE, FIRST, LAST = ("enwik8", "enwik8.zip", "enwik8.xz"), "enwik8_first20M.xz", "enwik8_last5M.xz"
BYTES, PART = 100_000_000, 5_000_000
HELD_OUT = 500_000  # bytes, of the first excerpt
SCORED = {"500KB": 500_000, "all": PART}


class Enwik8(ByteModel):
    """Bits per byte of Wikipedia's markup. The option `scored` sets how many bytes of each held-out part are scored."""

    info: ClassVar[TaskInfo] = TaskInfo(
        name="enwik8",
        idea="the first 100 MB of Wikipedia, bytes, language modelling",
        kind="causal",
        metric="bits_per_byte",
        higher_is_better=False,
        source="LTCB/enwik8, enwik8-raw",
        folder="enwik8",
        defaults=Settings(length=512, layers=4, dim=128, heads=4, batch=8, lr=3e-3, steps=1_500),
        options={"scored": tuple(SCORED)},
    )

    def load(self, folder: Path | None, settings: Settings) -> Splits:
        count = SCORED[self.options(settings)["scored"]]
        train, valid, test = self.parts(folder)
        return self.splits(byte_ids(train), byte_ids(valid[:count]), byte_ids(test[:count]), settings)

    def parts(self, folder: Path | None) -> tuple[bytes, bytes, bytes]:
        if folder is None:
            # The loader of this data set is a script, which `datasets` no longer runs; the hub has its output as parquet.
            text = load_from_hub(self.info, split="train", revision="refs/convert/parquet")["text"][0].encode()
            return _whole(text, self.info.source, download_advice(self.info))
        inside = task_folder(self.info, folder)
        path = find_file(self.info, inside, [*WHOLE, FIRST])
        if path.name != FIRST:
            return _whole(read_bytes(path), str(path), "Get it again.")
        text = read_bytes(path)
        return text[:-HELD_OUT], text[-HELD_OUT:], read_bytes(find_file(self.info, inside, [LAST]))


def _whole(text: bytes, name: str, advice: str) -> tuple[bytes, bytes, bytes]:
    if len(text) != BYTES:
        raise DataError(f"enwik8 must have {BYTES:,} bytes; {name} has {len(text):,}. {advice}")
    return text[: -2 * PART], text[-2 * PART : -PART], text[-PART:]
