"""Part `files`: it notices what it looks for, and a short run of it finds nothing."""

import json
import pickle
import random
from collections import Counter

import pytest

from subquad.errors import InputError
from tests.soak import files, payloads, readers
from tests.soak.damage import TAG, damage_bytes, damage_json


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("<p>text</p>", ""),
        (f"<p>&lt;{TAG}&gt; &quot; {TAG}=</p>", ""),
        (f"<p><{TAG}></p>", "markup"),
        (f'<p class="" {TAG}="">', "markup"),
        (f'<script type="application/json">["\\u003c/script><{TAG}>"]</script>', ""),
        (f'<script type="application/json">["</script><{TAG}>"]</script>', "markup"),
        ('<script type="application/json">[NaN]</script>', "NaN is not valid JSON"),
    ],
)
def test_a_page_with_markup_from_a_file_is_noticed(page, said):
    found = files.fault_of_page(page)
    assert said in found
    assert bool(found) == bool(said)


class Bad(readers.Reader):
    """Reads in the way that the test asks for."""

    def __init__(self, read):
        self._read = read

    def prepare(self, folder, chance):
        payloads.write_pickle(folder / "file.pt", folder / "executed", random.Random(0))
        return [folder / "file.pt"]

    def spoil(self, paths, mark, chance):
        paths[0].write_bytes(pickle.dumps(payloads.Touch(mark)))
        return "pickle that runs code", ""

    def read(self, folder, chance):
        self._read(folder)


def refuse(message):
    raise InputError(message)


@pytest.mark.parametrize(
    ("read", "verdict", "said"),
    [
        (lambda folder: None, "answered", None),
        (lambda folder: refuse("no"), "refused", None),
        (lambda folder: refuse(""), "wrong", "refused without a message"),
        (lambda folder: {}["key"], "foreign error", "KeyError: 'key'"),
        (lambda folder: pickle.loads((folder / "file.pt").read_bytes()).close(), "wrong", "code in a file was executed"),
        (lambda folder: print("\x1b]0;title\x07"), "wrong", "text from a file controls the terminal"),
        (lambda folder: (folder / "a.html").write_text(f"<{TAG}>"), "wrong", "text from a file acts as markup in the page"),
    ],
)
def test_what_must_not_happen_is_noticed(read, verdict, said, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "READERS", {"bad": type("Chosen", (Bad,), {"__init__": lambda self: Bad.__init__(self, read)})})
    found = files.run_case(0, 0, tmp_path)
    assert found["verdict"] == verdict
    assert said is None or said in found["error"]


def test_a_case_is_a_function_of_seed_and_index(tmp_path):
    path = tmp_path / "a.json"
    for change in (damage_bytes, damage_json):
        contents = set()
        for _ in range(2):
            path.write_text(json.dumps({"a": [1, 2, {"b": "c"}], "d": None}))
            done = change(path, random.Random(7))
            contents.add((done, path.read_bytes()))
        assert len(contents) == 1


def test_a_short_run_finds_nothing(tmp_path):
    """Each kind of file a few times."""
    seen = Counter()
    for index in range(150):
        folder = tmp_path / str(index)
        folder.mkdir()
        found = files.run_case(0, index, folder)
        assert found["verdict"] in ("answered", "refused"), found["error"]
        seen[found["labels"]["file"]] += 1
        seen[found["labels"]["damage"]] += 1
        seen[found["verdict"]] += 1
    assert len(seen) == len(readers.READERS) + 6 + 2
