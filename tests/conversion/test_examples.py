"""The example programs that convert, on tiny models."""

import re

import pytest

from tests.test_examples import run

pytestmark = pytest.mark.slow


def figures(pattern, printed):
    return [float(found) for found in re.findall(pattern, printed)]


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "sentences.txt"
    path.write_text("\n".join(f"{i} men and {2 * i} women have {3 * i} children" for i in range(150)))
    return path


def test_convert_minilm(bert, sentences, tmp_path):
    printed = run("convert_minilm", str(bert), str(sentences), "--steps", "8", "--out", str(tmp_path / "new"))
    cosines = figures(r"embeddings ([\d.]+)", printed)
    assert len(cosines) == 3
    assert cosines[0] < cosines[-1] <= 1
    assert (tmp_path / "new" / "model.safetensors").exists()


def test_convert_smollm2(llama, sentences):
    options = ["--window", "4", "--length", "32", "--steps", "8", "--tokens", "9", "--prompt", "3 men"]
    printed = run("convert_smollm2", str(llama), str(sentences), *options)
    assert len(figures(r": perplexity ([\d.]+)", printed)) == 4
    assert re.search(r"^converted, [\d.]+ tokens per second, cache of [\d,]+ bytes:$", printed, flags=re.MULTILINE)
