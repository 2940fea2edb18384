"""Data of the shapes of the real ones, made up: as files of a local copy, and as what the public source gives."""

import csv
import gzip
import io
import json
import lzma
import random

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

WORDS = "a man dog plays in the park with red ball , and two women ride horses near water .".split()  # noqa: SIM905


def sentences(count, seed, least=3, most=12):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(least, most))) for _ in range(count)]


def images(count, seed):
    """PNG files of noise in memory, and labels."""
    draw = np.random.default_rng(seed)
    files = []
    for pixels in draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        files.append({"bytes": file.getvalue(), "path": None})
    return files, draw.integers(0, 10, count).tolist()


def text(part):
    """Lines like WikiText's: blank ones, headings, rare words."""
    lines = []
    for sentence in sentences(60 if part == "train" else 30, seed=len(part)):
        lines += ["", f" = {sentence.split()[0]} = ", f" {sentence} <unk> Zoë . "]
    return lines


def markup(count, seed):
    draw = random.Random(seed)
    return bytes(draw.choices(b"<page> wiki [[link]]\n\xc3\xa9", k=count))


def reviews(count):
    """Sorted by label; the last text of each label is that of the first."""
    found = []
    for label in (0, 1):
        texts = sentences(count // 2, seed=label, least=5, most=30)
        texts[-1] = texts[0]
        found += [(f"{text} {'good' if label else 'bad'}", label) for text in texts]
    return found


def pairs(count, seed):
    draw = random.Random(seed)
    return [(a, b, draw.randint(0, 50) / 10) for a, b in zip(sentences(count, seed), sentences(count, seed + 1), strict=True)]


def captions(part, language):
    upper = {"de": str.title, "fr": str.upper}.get(language, str)
    return [upper(line) for line in sentences({"train": 40, "val": 7, "test_2016_flickr": 9}[part], seed=len(part))]


LISTS = [("3", "( ( ( ( [MIN 4 ) 5 ) 3 ) ] )"), ("9", "( ( ( [SM 4 ) ( ( ( [MED 2 ) 8 ) ] ) ) ] )")]


def folder(root):
    """A local copy of everything."""
    (root / "cifar10").mkdir()
    for part, count in (("train", 23), ("test", 5)):
        files, labels = images(count, seed=count)
        table = pyarrow.table({"img": files, "label": labels})
        pyarrow.parquet.write_table(table, root / "cifar10" / f"{part}-00000-of-00001.parquet")
    write(root / "wikitext2", {f"{part}.txt.xz": "\n".join(text(part)) + "\n" for part in ("train", "valid", "test")})
    write(root / "enwik8", {"enwik8_first20M.xz": markup(5_000, 1), "enwik8_last5M.xz": markup(600, 2)})
    rows = [json.dumps({"text": text, "label": label}) for text, label in reviews(60)]
    write(root / "imdb", {"imdb_train.jsonl.xz": "\n".join(rows) + "\n"})
    write(root / "listops", {"test_d20s.tsv.xz": "".join(f"{value}\t{shown}\n" for value, shown in LISTS)})
    files = ((part, language) for part in ("train", "val", "test_2016_flickr") for language in ("en", "de", "fr"))
    write(root / "multi30k", {f"{part}.{language}.gz": "\n".join(captions(part, language)) + "\n" for part, language in files})
    (root / "stsb").mkdir()
    for seed, (part, count) in enumerate({"train": 20, "dev": 6, "test": 7}.items()):
        with (root / "stsb" / f"stsb-en-{part}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(pairs(count, seed))
    return root


def write(folder, files):
    folder.mkdir()
    for name, content in files.items():
        packed = lzma.compress if name.endswith(".xz") else gzip.compress
        (folder / name).write_bytes(packed(content if isinstance(content, bytes) else content.encode()))


def load_dataset(path, name=None, *, split, revision=None):
    """What `datasets.load_dataset` is asked for, from the same rows as in `folder`."""
    if path == "uoft-cs/cifar10":
        features = datasets.Features(img=datasets.Image(), label=datasets.ClassLabel(num_classes=10))
        files, labels = images({"train": 23, "test": 5}[split], {"train": 23, "test": 5}[split])
        return datasets.Dataset.from_dict({"img": files, "label": labels}, features=features)
    if (path, name) == ("Salesforce/wikitext", "wikitext-2-v1"):
        lines = text({"validation": "valid"}.get(split, split))
        return datasets.Dataset.from_dict({"text": [f"{line}\n" if line else "" for line in lines]})
    if (path, name, revision) == ("LTCB/enwik8", "enwik8-raw", "refs/convert/parquet"):
        return datasets.Dataset.from_dict({"text": ["wiki " * 1_000]})
    if path == "stanfordnlp/imdb":
        rows = reviews(60) if split == "train" else [(f"{text} indeed", label) for text, label in reviews(20)] + reviews(60)[:3]
        return datasets.Dataset.from_dict({"text": [text for text, _ in rows], "label": [label for _, label in rows]})
    if path == "bentrevett/multi30k":
        part = {"train": "train", "validation": "val", "test": "test_2016_flickr"}[split]
        return datasets.Dataset.from_dict({language: captions(part, language) for language in ("en", "de")})
    if (path, name) == ("PhilipMay/stsb_multi_mt", "en"):
        seed = ["train", "dev", "test"].index(split)
        first, second, scores = zip(*pairs([20, 6, 7][seed], seed), strict=True)
        return datasets.Dataset.from_dict({"sentence1": first, "sentence2": second, "similarity_score": scores})
    raise FileNotFoundError(f"{path} {name} {split} {revision}")
