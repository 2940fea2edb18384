"""The example programs run, and print what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def run(name, *options):
    """What a program prints; one thread, so that tests beside each other do not fight over cores."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *options]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def number(pattern, printed):
    found = re.search(pattern, printed, flags=re.MULTILINE)
    assert found, printed
    return float(found[1].replace(",", ""))


@pytest.mark.parametrize(
    "name", ["character_lm", "image_classifier", "translation", "save_qkv", "convert_minilm", "convert_smollm2"]
)
def test_help_shows_how_to_run_it(name):
    assert f"python examples/{name}.py" in run(name, "--help")


def test_character_lm(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be, or not to be: that is the question. " * 50)
    printed = run("character_lm", str(text), "--steps", "20", "--length", "32", "--sample", "7")
    assert 0 < number(r"^step +20  loss ([\d.]+)", printed) < 5
    assert 0 < number(r"^held-out loss ([\d.]+) nats per byte$", printed) < 5
    assert "sample:\n    def " in printed
    assert number(r"^cache: ([\d,]+) bytes after 14 tokens$", printed) > 0


def test_character_lm_repeats_itself_and_keeps_the_size_of_its_cache():
    options = ["--steps", "2", "--length", "16", "--method", "performer"]
    short, again, longer = (run("character_lm", *options, "--sample", n) for n in ("5", "5", "40"))

    def without_times(printed):
        return re.sub(r"  \d+ s$", "", printed, flags=re.MULTILINE)

    assert without_times(short) == without_times(again)
    cache = r"^cache: ([\d,]+) bytes"
    assert number(cache, short) == number(cache, longer)


@pytest.mark.parametrize("options", [[], ["--method", "nystrom", "--patch", "2"]], ids=["pixels", "patches"])
def test_image_classifier(options):
    pytest.importorskip("sklearn")
    printed = run("image_classifier", "--steps", "5", *options)
    assert 0 < number(r"^step +5  loss ([\d.]+)", printed) < 5
    assert 0 <= number(r"^test accuracy ([\d.]+) of 360 digits$", printed) <= 1


def test_image_classifier_says_what_to_install(tmp_path):
    (tmp_path / "sklearn.py").write_text("raise ImportError")
    command = [sys.executable, str(ROOT / "examples" / "image_classifier.py"), "--steps", "1"]
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env={**os.environ, "PYTHONPATH": path}, timeout=300)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("pip install scikit-learn")


@pytest.mark.parametrize("options", [[], ["--reverse", "--beams", "2"]], ids=["greedy", "beams from German"])
def test_translation(options):
    printed = run("translation", "--steps", "5", *options)
    assert 0 < number(r"^step +5  loss ([\d.]+)", printed) < 5
    assert len(re.findall(r"^sample \d+: .+ -> ", printed, flags=re.MULTILINE)) == 5
    assert 0 <= number(r"^exact match ([\d.]+) of 500 held out$", printed) <= 1


@pytest.mark.parametrize(
    ("n", "english", "german"),
    [
        (0, "zero", "null"),
        (1, "one", "eins"),
        (16, "sixteen", "sechzehn"),
        (24, "twenty four", "vierundzwanzig"),
        (70, "seventy", "siebzig"),
        (101, "one hundred one", "einhunderteins"),
        (1_000, "one thousand", "eintausend"),
        (21_031, "twenty one thousand thirty one", "einundzwanzigtausendeinunddreißig"),
        (101_700, "one hundred one thousand seven hundred", "einhunderteintausendsiebenhundert"),
    ],
)
def test_translation_knows_both_languages(monkeypatch, n, english, german):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import translation

    assert " ".join(translation.english(n)) == english
    assert "".join(translation.german(n)) == german


def test_save_qkv(tmp_path):
    from transformers import BertConfig, BertModel, BertTokenizerFast

    from subquad.bench.measure import saved_inputs

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "to", "be", "or", "not", "that", "is", "the", "question"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 20)
    out = tmp_path / "qkv.safetensors"
    assert "saved queries (1, 4, 50, 8) of layer 1" in run(
        "save_qkv", str(tmp_path), str(text), "--layer", "1", "--tokens", "50", "--out", str(out)
    )
    query, key, value = saved_inputs(out)
    assert query.shape == key.shape == value.shape == (1, 4, 50, 8)
