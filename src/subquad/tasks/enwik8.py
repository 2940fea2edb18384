"""`enwik8`: the first 100 MB of Wikipedia as bytes; bits per byte.

The usual split: the first 90 MB to learn from, 5 MB to choose by, the last 5 MB to report. A local copy is the file itself
(`enwik8`, `enwik8.zip`, `enwik8.xz`), or two excerpts: `enwik8_first20M.xz`, of which the last 500,000 bytes are held out to
choose by, and `enwik8_last5M.xz`. Figures from excerpts are of less training text.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from subquad.tasks.base import Settings, Splits, TaskInfo
from subquad.tasks.language import ByteModel, byte_ids
from subquad.tasks.source import DataError, how_to_get, hub, local, one_of, read

WHOLE, FIRST, LAST = ("enwik8", "enwik8.zip", "enwik8.xz"), "enwik8_first20M.xz", "enwik8_last5M.xz"
BYTES, PART = 100_000_000, 5_000_000
HELD_OUT = 500_000  # bytes of an excerpt
SCORED = {"500KB": 500_000, "all": PART}


class Enwik8(ByteModel):
    """Bits per byte of Wikipedia's markup. The option `scored` says how many bytes of each held-out part count."""

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
            # The set's own loader is a script, which `datasets` runs no longer; the hub keeps what it made as parquet.
            text = hub(self.info, split="train", revision="refs/convert/parquet")["text"][0].encode()
            return _whole(text, self.info.source, how_to_get(self.info))
        inside = local(self.info, folder)
        path = one_of(self.info, inside, [*WHOLE, FIRST])
        if path.name != FIRST:
            return _whole(read(path), str(path), "Get it again.")
        text = read(path)
        return text[:-HELD_OUT], text[-HELD_OUT:], read(one_of(self.info, inside, [LAST]))


def _whole(text: bytes, name: str, advice: str) -> tuple[bytes, bytes, bytes]:
    if len(text) != BYTES:
        raise DataError(f"enwik8 has {BYTES:,} bytes; {name} has {len(text):,}. {advice}")
    return text[: -2 * PART], text[-2 * PART : -PART], text[-PART:]
