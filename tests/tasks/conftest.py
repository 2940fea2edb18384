import os
from pathlib import Path

import pytest

pytest.importorskip("transformers")
for module in ("datasets", "PIL", "pyarrow", "sacrebleu", "sklearn"):
    pytest.importorskip(module, reason="install subquad[train]")

from subquad.tasks import cifar10, enwik8, listops, multi30k, pycode, recall, stsb, wikitext2  # noqa: E402
from tests.tasks import made_up  # noqa: E402


@pytest.fixture(scope="session")
def local(tmp_path_factory):
    """A made-up local copy of all data."""
    return made_up.folder(tmp_path_factory.mktemp("data"))


@pytest.fixture
def small(monkeypatch):
    """Splits and vocabularies small enough for made-up data."""
    for module, held_out in ((cifar10, 3), (enwik8, 500), (listops, 9), (recall, 9), (pycode, 3_000)):
        monkeypatch.setattr(module, "HELD_OUT", held_out)
    for module in (listops, recall):
        monkeypatch.setattr(module, "TRAIN", 40)
    for module in (multi30k, stsb, wikitext2):
        monkeypatch.setattr(module, "PIECES", 300)


@pytest.fixture
def public(monkeypatch):
    """The public source, answered from made-up rows."""
    monkeypatch.setattr("datasets.load_dataset", made_up.load_dataset)
    monkeypatch.setattr(enwik8, "BYTES", 5_000)
    monkeypatch.setattr(enwik8, "PART", 500)


@pytest.fixture
def real():
    """The real data."""
    folder = os.environ.get("SUBQUAD_DATA")
    if not folder:
        pytest.skip(
            "needs real data: set SUBQUAD_DATA to a folder with cifar10, wikitext2, ... (docs/training.md says what is inside)"
        )
    return Path(folder).resolve()
