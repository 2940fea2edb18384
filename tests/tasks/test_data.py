"""The rows of each task are what it says they are."""

import io
import lzma
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from subquad.errors import InputError
from subquad.models.inputs import IGNORED
from subquad.tasks import TASKS, DataError, imdb, listops, recall
from subquad.tasks.cifar10 import MEAN, SPREAD, decode_images
from subquad.tasks.pycode import sources
from subquad.tasks.rows import Blocks, Ragged, pad_sequences
from subquad.tasks.source import read_bytes
from tests.tasks import made_up
from tests.tasks.test_tasks import tiny


def value(symbols):
    """Of a ListOps expression, with a stack: nothing in common with the generator."""
    stack = []
    for symbol in symbols:
        if symbol != "]":
            stack.append(symbol if symbol.startswith("[") else int(symbol))
            continue
        values = []
        while isinstance(stack[-1], int):
            values.insert(0, stack.pop())
        name = stack.pop()[1:]
        values_in_order = sorted(values)
        middle = (len(values) - 1) // 2, len(values) // 2
        results = {
            "MIN": values_in_order[0],
            "MAX": values_in_order[-1],
            "MED": int(sum(values_in_order[i] for i in middle) / 2),
            "SM": sum(values) % 10,
            "FIRST": values[0],
            "LAST": values[-1],
        }
        stack.append(results[name])
    [result] = stack
    return result


def depth(symbols):
    level = deepest = 0
    for symbol in symbols:
        level += symbol.startswith("[") - (symbol == "]")
        deepest = max(deepest, level)
    return deepest


def shown(ids):
    return [listops.SYMBOLS[i] for i in ids]


@pytest.mark.parametrize("operators", set(listops.OPERATORS_OF.values()))
@pytest.mark.parametrize("length", [8, 37, 512, 2_000])
def test_listops_expressions_have_their_value_their_length_and_bounded_depth(length, operators):
    rows = listops.generate(60, length, operators, random.Random(length))
    lengths = set()
    for i in range(len(rows)):
        symbols = shown(rows[i]["input_ids"].tolist())
        assert value(symbols) == rows[i]["labels"]
        assert max(4, length // 4) <= len(symbols) <= length
        assert depth(symbols) <= listops.DEPTH
        assert {s[1:] for s in symbols if s.startswith("[")} <= set(operators)
        lengths.add(len(symbols))
    assert len(lengths) > 3


def test_listops_arguments_are_two_to_ten():
    rows = listops.generate(50, 200, ("SM",), random.Random(0))
    counts = set()
    for i in range(len(rows)):
        stack = []
        for symbol in shown(rows[i]["input_ids"].tolist()):
            if symbol.startswith("["):
                stack.append(0)
                continue
            if symbol == "]":
                counts.add(stack.pop())
            if stack:
                stack[-1] += 1
    assert counts == set(range(2, 11))


def test_listops_has_all_values(small, monkeypatch):
    monkeypatch.setattr(listops, "TRAIN", 500)
    labels = TASKS["listops"]().load(None, tiny("listops")).train.labels
    assert labels.bincount(minlength=10).min() > 15


def test_listops_takes_the_original_test_set_without_its_brackets(local, small):
    settings = tiny("listops", options=(("test", "d20s"),))
    test = TASKS["listops"]().load(local, settings).test
    assert [shown(test[i]["input_ids"].tolist()) for i in range(2)] == [
        ["[MIN", "4", "5", "3", "]"],
        ["[SM", "4", "[MED", "2", "8", "]", "]"],
    ]
    assert test.labels.tolist() == [3, 9]
    short = TASKS["listops"]().load(local, replace(settings, length=8)).test
    assert len(short) == 2
    with pytest.raises(DataError, match=r"--data DIR or SUBQUAD_DATA.*test=generated"):
        TASKS["listops"]().load(None, settings)


def test_listops_median_is_rounded_down_as_in_the_original():
    assert [listops.OPERATORS["MED"](v) for v in ([3], [9, 2], [5, 1, 9], [1, 2, 8, 9], [4, 3])] == [3, 5, 5, 5, 3]


@pytest.mark.parametrize("name", ["d20", "d20s"])
def test_listops_agrees_with_the_original(name, real):
    path = real / "listops" / f"test_{name}.tsv.xz"
    if not path.is_file():
        pytest.skip(f"needs the original test set of ListOps: {path}")
    test = TASKS["listops"]().original(name, real, 3_000)
    assert len(test) == 10_000
    assert all(value(shown(test[i]["input_ids"].tolist())) == test[i]["labels"] for i in range(0, 10_000, 7))


@pytest.mark.parametrize("length", [16, 64, 136])
def test_recall_asks_each_key_once_and_the_answer_is_its_value(length, small):
    splits = TASKS["recall"]().load(None, replace(tiny("recall"), length=length))
    counts = {}
    for part in ("train", "valid", "test"):
        rows = getattr(splits, part)
        counts[part] = set()
        for i in range(len(rows)):
            ids, labels = rows[i]["input_ids"].tolist(), rows[i]["labels"].tolist()
            places = [place for place, label in enumerate(labels) if label != IGNORED]
            known = dict(zip(ids[: length // 4 : 2], ids[1 : length // 4 : 2], strict=True))
            assert {ids[place - 1]: labels[place] for place in places} == known
            assert all(place > length // 4 for place in places)
            assert all(key < recall.KEYS <= value < recall.NOISE for key, value in known.items())
            counts[part].add(len(known))
    assert counts["train"] == counts["valid"] == counts["test"] == {length // 8}


def test_pycode_is_in_the_order_of_paths_and_holds_out_whole_files(tmp_path, monkeypatch):
    for i in range(40):
        (tmp_path / f"m{i:02}.py").write_text(f"x{i:02} = 1\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_x.py").write_text("never")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    splits = TASKS["pycode"]().load(None, replace(tiny("pycode"), length=8))
    text = {part: bytes(getattr(splits, part).text.tolist()).decode() for part in ("train", "valid", "test")}
    assert text["valid"] == "x10 = 1\n\nx30 = 1\n"
    assert text["test"] == "x19 = 1\n\nx39 = 1\n"
    assert text["train"].split() == [w for i in range(40) if i % 20 not in (10, 19) for w in (f"x{i:02}", "=", "1")]
    assert [path.name for path in sources(tmp_path)] == [f"m{i:02}.py" for i in range(40)]
    with pytest.raises(DataError, match="has none"):
        sources(tmp_path / "nowhere")


@pytest.mark.parametrize("total", [5, 6, 9, 10, 23])
def test_blocks_predict_every_token_but_the_first_once(total):
    text = torch.arange(total)
    blocks = Blocks(text, 5)
    rows = [blocks[i] for i in range(len(blocks))]
    assert all(row["input_ids"].shape == (5,) for row in rows)
    assert all(label in (IGNORED, i) for row in rows for i, label in zip(row["input_ids"], row["labels"], strict=True))
    assert all(row["labels"][0] == IGNORED for row in rows)
    predicted = [label for row in rows for label in row["labels"].tolist() if label != IGNORED]
    assert predicted == list(range(1, total))
    with pytest.raises(IndexError):
        blocks[len(blocks)]


def test_ragged_rows_and_padding():
    rows = Ragged([torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 5, 6])])
    assert [rows[i].tolist() for i in range(len(rows))] == [[1, 2], [3], [4, 5, 6]]
    ids, mask = pad_sequences([rows[0], rows[1]], pad=9)
    assert ids.tolist() == [[1, 2], [3, 9]]
    assert mask.tolist() == [[True, True], [True, False]]


def test_cifar10_draws_shifts_and_flips_by_seed_and_epoch(local, small):
    one, two, other = (TASKS["cifar10"]().load(local, tiny("cifar10", seed=seed)).train for seed in (4, 4, 5))

    def pixels(rows, epoch):
        rows.set_epoch(epoch)
        return torch.stack([rows[i]["pixel_values"] for i in range(len(rows))])

    second = pixels(one, 1)
    assert not torch.equal(pixels(one, 0), second)
    assert torch.equal(pixels(two, 1), second)  # whatever came before
    assert not torch.equal(pixels(other, 1), second)


def test_cifar10_images_are_shifted_and_mirrored_originals(local, small):
    splits = TASKS["cifar10"]().load(local, tiny("cifar10"))
    files, labels = made_up.images(23, seed=23)
    assert splits.train.labels.tolist() + splits.valid.columns["labels"].tolist() == labels
    mirrored = set()
    for i in range(20):
        picture = torch.frombuffer(bytearray(Image.open(io.BytesIO(files[i]["bytes"])).tobytes()), dtype=torch.uint8)
        padded = torch.zeros(3, 40, 40, dtype=torch.uint8)
        padded[:, 4:36, 4:36] = picture.view(32, 32, 3).permute(2, 0, 1)
        found = [
            flip
            for flip in (False, True)
            for down in range(9)
            for right in range(9)
            if torch.equal(
                padded[:, down : down + 32, right : right + 32].flip(-1)
                if flip
                else padded[:, down : down + 32, right : right + 32],
                splits.train[i]["pixel_values"],
            )
        ]
        assert len(found) == 1
        mirrored.update(found)
    assert mirrored == {False, True}
    batch = splits.collate([splits.valid[0]])
    assert torch.allclose(batch["pixel_values"] * SPREAD + MEAN, splits.valid[0]["pixel_values"] / 255, atol=1e-6)


def test_cifar10_as_pixels(local, small):
    settings = tiny("cifar10", options=(("tokens", "pixels"),))
    with pytest.raises(InputError, match=r"must be 1,024, one token for each of its pixels; got 64\. Pass 1024"):
        TASKS["cifar10"]().load(local, settings)
    task, settings = TASKS["cifar10"](), replace(settings, length=1024)
    splits = task.load(local, settings)
    model = task.model("linformer", settings)
    assert model.config.patch_size == 1
    assert model(**splits.collate([splits.train[0]])).logits.shape == (1, 10)


def test_wikitext2_counts_words_and_ends_of_lines_alike_in_words_and_pieces(local, small):
    counts = []
    for tokens in ("word", "bpe"):
        task = TASKS["wikitext2"]()
        splits = task.load(local, tiny("wikitext2", options=(("tokens", tokens),)))
        counts.append([task.words(part) for part in (splits.train, splits.valid, splits.test)])
    expected = [sum(len(line.split()) + 1 for line in made_up.text(part)) - 1 for part in ("train", "valid", "test")]
    assert counts == [expected, expected]


def test_wikitext2_writes_unknown_words(local, small):
    task = TASKS["wikitext2"]()
    splits = task.load(local, tiny("wikitext2", options=(("tokens", "word"),)))
    assert task.vocabulary == len({w for line in made_up.text("train") for w in line.split()} | {"<eos>"})
    assert splits.test.text.max() < task.vocabulary


def test_enwik8_splits_the_whole_as_usual(tmp_path, small, public):
    text = bytes(range(250)) * 20
    (tmp_path / "enwik8").mkdir()
    (tmp_path / "enwik8" / "enwik8.xz").write_bytes(lzma.compress(text))
    parts = TASKS["enwik8"]().parts(tmp_path)
    assert parts == (text[:4_000], text[4_000:4_500], text[4_500:])
    (tmp_path / "enwik8" / "enwik8.xz").write_bytes(lzma.compress(text[:-1]))
    with pytest.raises(DataError, match=r"enwik8 must have 5,000 bytes; .*enwik8.xz has 4,999"):
        TASKS["enwik8"]().parts(tmp_path)


def test_enwik8_scores_a_part_unless_all_is_asked_for(local, small):
    assert "scored" in TASKS["enwik8"].info.options
    splits = TASKS["enwik8"]().load(local, tiny("enwik8", options=(("scored", "all"),)))
    assert (len(splits.train.text), len(splits.valid.text), len(splits.test.text)) == (4_500, 500, 600)


def test_imdb_has_no_review_twice_and_no_order(local, small):
    splits = TASKS["imdb"]().load(local, tiny("imdb"))
    texts = [
        bytes(part[i]["input_ids"].tolist()) for part in (splits.train, splits.valid, splits.test) for i in range(len(part))
    ]
    assert len(texts) == len(set(texts)) == 58
    assert sorted(map(len, (splits.valid, splits.test))) == [5, 5]
    labels = splits.train.labels.tolist()
    assert sorted(labels) != labels
    assert imdb.distinct([("a", 1), ("b", 0), ("a", 0)]) == [("a", 1), ("b", 0)]


def test_imdb_scores_reviews_that_are_spread_over_all(local, small, monkeypatch):
    monkeypatch.setitem(imdb.SCORED, "1000", 2)
    few = TASKS["imdb"]().load(local, tiny("imdb"))
    every = TASKS["imdb"]().load(local, tiny("imdb", options=(("scored", "all"),)))
    assert (len(few.valid), len(few.test), len(every.test)) == (5, 2, 5)
    assert [few.test[i]["input_ids"].tolist() for i in range(2)] == [every.test[i]["input_ids"].tolist() for i in (0, 2)]


def test_imdb_tests_on_no_review_of_the_training_half(small, public):
    splits = TASKS["imdb"]().load(None, replace(tiny("imdb"), length=400))
    train, valid, test = (
        [bytes(p[i]["input_ids"].tolist()) for i in range(len(p))] for p in (splits.train, splits.valid, splits.test)
    )
    assert not {*train, *valid} & {*test}
    assert all(text.endswith(b"indeed") for text in test)


def test_multi30k_rows_and_batches(local, small):
    task = TASKS["multi30k"]()
    splits = task.load(local, tiny("multi30k", options=(("pair", "de-fr"),)))
    row = splits.test[2]
    source, target = made_up.captions("test_2016_flickr", "de")[2], made_up.captions("test_2016_flickr", "fr")[2]
    assert row["reference"] == target
    assert task.tokenizer.decode(row["input_ids"].tolist()).strip() == source
    assert task.tokenizer.decode(row["target"].tolist()).strip() == target
    batch = splits.collate([splits.test[i] for i in range(4)])
    for labels, shown_before in zip(batch["labels"], batch["decoder_input_ids"], strict=True):
        real = labels != IGNORED
        assert shown_before[0] == 1
        assert torch.equal(shown_before[1:][real[1:]], labels[:-1][real[1:]])
        assert labels[real][-1] == 2


def test_multi30k_cross_attention_is_softmax_unless_asked(local, small):
    task, settings = TASKS["multi30k"](), tiny("multi30k")
    task.load(local, settings)
    names = [config.info.name for config in task.model("linear", settings).config.decoder_part().cross_methods]
    assert names == ["softmax", "softmax"]
    same = replace(settings, options=(("cross", "same"),))
    names = [config.info.name for config in task.model("linear", same).config.decoder_part().cross_methods]
    assert names == ["linear", "linear"]


def test_multi30k_from_the_public_source_has_two_languages(small, public):
    with pytest.raises(DataError, match="has en, de; fr needs a local copy"):
        TASKS["multi30k"]().load(None, tiny("multi30k", options=(("pair", "en-fr"),)))


@pytest.mark.parametrize("name", ["wikitext2", "pycode", "enwik8"])
def test_text_that_is_too_short_for_a_block_is_refused(name, local, small):
    with pytest.raises(DataError, match=rf"{name} needs at least 9,000,000 tokens of \w+ text.*smaller --length"):
        TASKS[name]().load(local, replace(tiny(name), length=9_000_000))


@pytest.mark.parametrize(
    ("name", "length", "said"),
    [
        ("recall", 20, "multiple of 8"),
        ("recall", 8, "16"),
        ("listops", 4, "8 tokens"),
        ("pycode", 1, "--length must be at least 2; got 1"),
    ],
)
def test_lengths_that_a_generator_cannot_fill_are_refused(name, length, said):
    with pytest.raises(InputError, match=said):
        TASKS[name]().load(None, replace(tiny(name), length=length))


FILES = {
    "cifar10": "train-00000-of-00001.parquet",
    "wikitext2": "train.txt.xz",
    "enwik8": "enwik8_first20M.xz",
    "imdb": "imdb_train.jsonl.xz",
    "multi30k": "val.de.gz",
    "stsb": "stsb-en-dev.csv",
}


@pytest.fixture
def copy(local, tmp_path):
    return shutil.copytree(local, tmp_path / "data")


@pytest.mark.parametrize("name", FILES)
def test_missing_and_wrong_folders_say_what_was_looked_for(name, copy, small):
    task, settings = TASKS[name](), tiny(name)
    with pytest.raises(DataError, match=rf"nowhere is not a folder.*{task.info.source}.*subquad\[train\]"):
        task.load(copy / "nowhere", settings)
    with pytest.raises(DataError, match=rf"needs the folder .*{name}; .* has only .*{FILES[name]}"):
        task.load(copy / name, settings)
    (copy / name / FILES[name]).rename(copy / name / "other")
    with pytest.raises(DataError, match=rf"needs .*{FILES[name]}.*; .* has only .*other"):
        task.load(copy, settings)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named(name, copy, small):
    path = copy / name / FILES[name]
    whole = path.read_bytes()
    for damage in (whole[: len(whole) * 2 // 3], b"not what it says", b""):
        path.write_bytes(damage)
        with pytest.raises(DataError, match=rf"{FILES[name]} cannot be read: .*Get it again"):
            TASKS[name]().load(copy, tiny(name))


@pytest.mark.parametrize(
    ("name", "file", "content", "said"),
    [
        (
            "imdb",
            "imdb_train.jsonl.xz",
            '{"label": 0, "text": "x"}\n{"label": 2, "text": "y"}\n',
            "row 2 is not a review and label",
        ),
        ("imdb", "imdb_train.jsonl.xz", '{"label": -1, "text": "x"}\n', "row 1 is not a review and label"),
        ("imdb", "imdb_train.jsonl.xz", '{"label": 1, "text": 5}\n', "row 1 is not a review and label"),
        ("imdb", "imdb_train.jsonl.xz", r'{"label": 1, "text": "\ud800"}', "row 1 is not a review and label"),
        ("imdb", "imdb_train.jsonl.xz", "[" * 100_000, "row 1 is not a review and label"),
        ("listops", "test_d20s.tsv.xz", "3\t[MIN 3 4 ]\n4\t[AVG 3 4 ]\n", "row 2 is not a value and expression"),
        ("listops", "test_d20s.tsv.xz", "-3\t[MIN 3 4 ]\n", "row 1 is not a value and expression"),
        ("stsb", "stsb-en-dev.csv", "a,b,nan\n", "row 1 is not a pair of sentences and a number .*from 0 to 5; got nan"),
        (
            "stsb",
            "stsb-en-dev.csv",
            "a,b,5.0\na,b,5.5\n",
            "row 2 is not a pair of sentences and a number .*from 0 to 5; got 5.5",
        ),
    ],
)
def test_a_row_that_is_none_is_named(name, file, content, said, copy, small):
    packed = lzma.compress if file.endswith(".xz") else bytes
    (copy / name / file).write_bytes(packed(content.encode()))
    options = (("test", "d20s"),) if name == "listops" else ()
    with pytest.raises(DataError, match=f"{file} cannot be read: {said}"):
        TASKS[name]().load(copy, tiny(name, options=options))


@pytest.mark.parametrize("file", ["enwik8_first20M.xz", "enwik8_last5M.xz"])
def test_a_text_without_content_is_refused(file, copy, small):
    (copy / "enwik8" / file).write_bytes(lzma.compress(b""))
    with pytest.raises(DataError, match=r"enwik8 needs at least 24 tokens of \w+ text, one block of --length; got 0"):
        TASKS["enwik8"]().load(copy, tiny("enwik8"))


def test_translations_that_do_not_pair_up_are_refused(copy, small):
    import gzip

    (copy / "multi30k" / "val.de.gz").write_bytes(gzip.compress(b"ein Satz\n"))
    with pytest.raises(DataError, match="valid has 7 in en and 1 in de"):
        TASKS["multi30k"]().load(copy, tiny("multi30k"))


def test_what_the_hub_says_is_passed_on(monkeypatch, small):
    def refuse(*name, **given):
        raise ConnectionError("no route to the hub\nand more")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(DataError, match=r"could not be loaded from the Hugging Face hub: no route to the hub\. .*--data"):
        TASKS["stsb"]().load(None, tiny("stsb"))


def test_zip_and_plain_files_are_read(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a", b"inside")
    (tmp_path / "a").write_bytes(b"plain")
    assert (read_bytes(tmp_path / "a.zip"), read_bytes(tmp_path / "a")) == (b"inside", b"plain")


def test_an_archive_with_a_password_is_refused(tmp_path):
    import zipfile

    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", b"inside")
    content = bytearray(path.read_bytes())
    for header, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(header) + place] |= 1  # the flag of encryption
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.zip cannot be read: .*password"):
        read_bytes(path)


def picture(kind):
    file = io.BytesIO()
    Image.new("RGB", (32, 32)).save(file, kind)
    return {"bytes": file.getvalue(), "path": None}


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("img", picture("EPS"), "row 2 is not a picture of 32 x 32"),  # which Pillow would pass on to Ghostscript
        ("img", {"bytes": b"", "path": "../x"}, "row 2 is not a picture of 32 x 32"),
        ("img", None, "row 2 is not a picture of 32 x 32"),
        ("label", 10, "row 2 is not a class from 0 to 9"),
        ("label", -1, "row 2 is not a class from 0 to 9"),
        ("label", None, "row 2 is not a class from 0 to 9"),
    ],
)
def test_pictures_and_labels_of_another_kind_are_refused(copy, small, column, value, said):
    import pyarrow
    import pyarrow.parquet

    path = copy / "cifar10" / "test-00000-of-00001.parquet"
    rows = pyarrow.parquet.read_table(path).to_pydict()
    rows[column][1] = value
    pyarrow.parquet.write_table(pyarrow.table(rows), path)
    with pytest.raises(DataError, match=rf"test-00000-of-00001\.parquet cannot be read: {said}"):
        TASKS["cifar10"]().load(copy, tiny("cifar10"))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
def test_pictures_of_usual_kinds_are_read(kind):
    images, labels = decode_images(Path("file"), [picture(kind)], [3])
    assert (images.shape, labels.tolist()) == ((1, 3, 32, 32), [3])
