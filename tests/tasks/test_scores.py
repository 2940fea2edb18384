"""Scores against figures computed by hand, from models whose answers are known."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import sacrebleu
import torch
from torch.nn.utils.rnn import pad_sequence

from subquad.models.inputs import IGNORED
from subquad.tasks import TASKS, Splits
from subquad.tasks.rows import Columns, sort_by_length, stack_rows
from subquad.tasks.stsb import correlation, ranks
from tests.tasks import made_up
from tests.tasks.test_tasks import tiny


class Known:
    """A model that answers with what a function says."""

    device = torch.device("cpu")

    def __init__(self, answer, generate=None):
        self.answer, self.generate = answer, generate

    def __call__(self, **batch):
        return SimpleNamespace(logits=self.answer(batch))


def test_accuracy_and_loss_of_classes():
    rows = Columns(x=torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 1.0]]), labels=torch.tensor([1, 0, 0]))
    splits = Splits(rows, rows, rows, stack_rows)
    figures = TASKS["digits"]().score(Known(lambda batch: batch["x"]), rows, splits, replace(tiny("digits"), batch=2))
    losses = [math.log(2), math.log(1 + math.exp(-3)), math.log(1 + math.e)]
    assert figures == {"accuracy": pytest.approx(1 / 3), "loss": pytest.approx(sum(losses) / 3)}


def even(size):
    return Known(lambda batch: torch.zeros(*batch["input_ids"].shape, size))


def test_bits_per_byte_of_a_model_that_knows_nothing(local, small):
    task, settings = TASKS["pycode"](), tiny("pycode")
    splits = task.load(None, settings)
    figures = task.score(even(256), splits.valid, splits, settings)
    assert figures == {"bits_per_byte": pytest.approx(8), "loss": pytest.approx(8 * math.log(2))}


def test_perplexity_is_per_word_whatever_the_tokens(local, small):
    for tokens in ("word", "bpe"):
        task, settings = TASKS["wikitext2"](), tiny("wikitext2", options=(("tokens", tokens),))
        splits = task.load(local, settings)
        figures = task.score(even(task.vocabulary), splits.test, splits, settings)
        predicted, words = len(splits.test.text) - 1, sum(len(line.split()) + 1 for line in made_up.text("test")) - 1
        assert figures["perplexity"] == pytest.approx(task.vocabulary ** (predicted / words), rel=1e-4)
        assert figures["loss"] == pytest.approx(math.log(task.vocabulary))
        assert (predicted == words) == (tokens == "word")


def test_recall_counts_questions_only(small):
    task, settings = TASKS["recall"](), tiny("recall")
    splits = task.load(None, settings)

    def values_of_even_keys(batch):
        """Answers questions about even keys, and talks nonsense everywhere else."""
        ids = batch["input_ids"]
        logits = torch.zeros(*ids.shape, 600)
        for row, tokens in enumerate(ids.tolist()):
            known = dict(zip(tokens[:8:2], tokens[1:8:2], strict=True))
            for place in range(8, len(tokens)):
                if tokens[place] in known and tokens[place] % 2 == 0:
                    logits[row, place, known[tokens[place]]] = 50
        return logits

    asked = [
        int(row["input_ids"][place - 1])
        for row in (splits.test[i] for i in range(len(splits.test)))
        for place in (row["labels"] != IGNORED).nonzero().flatten()
    ]
    share = sum(key % 2 == 0 for key in asked) / len(asked)
    figures = task.score(Known(values_of_even_keys), splits.test, splits, settings)
    assert figures["accuracy"] == pytest.approx(share)
    assert figures["loss"] == pytest.approx((1 - share) * math.log(600), rel=1e-4)


def test_correlations():
    x = torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=torch.float64)
    assert correlation(x, 3 * x + 1) == pytest.approx(1)
    assert correlation(x, torch.tensor([4.0, 3.0, 2.0, 0.0], dtype=torch.float64)) == pytest.approx(-1)
    assert correlation(x, torch.ones(4, dtype=torch.float64)) == 0
    assert ranks(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1, 3.5, 2]
    y = torch.tensor([1.0, 3.0, 2.0, 4.0], dtype=torch.float64)
    assert correlation(ranks(x), ranks(y)) == pytest.approx(1 - 6 * 2 / (4 * 15))  # 1 - 6 sum d^2 / (n (n^2 - 1))


def test_likeness_of_sentences(local, small):
    task, settings = TASKS["stsb"](), tiny("stsb")
    splits = task.load(local, settings)
    order = sort_by_length(range(7), splits.test.lengths)
    scores = torch.tensor([score for *_, score in made_up.pairs(7, 2)])[order]  # as they are asked for
    said = iter([(scores**3)[:5], (scores**3)[5:]])
    figures = task.score(Known(lambda batch: next(said)), splits.test, splits, settings)
    assert figures["spearman"] == pytest.approx(1)
    assert 0.5 < figures["pearson"] < 0.999
    assert figures["loss"] == pytest.approx(float(((scores**3 - scores) ** 2).mean()), rel=1e-5)


def test_the_likeness_model_sees_no_pads_and_is_symmetric(local, small):
    task, settings = TASKS["stsb"](), tiny("stsb")
    splits = task.load(local, settings)
    model = task.model("linear", settings).eval()
    rows = [splits.test[i] for i in range(5)]
    together = splits.collate(rows)
    alone = torch.cat([model(**splits.collate([row])).logits for row in rows])
    assert torch.allclose(model(**together).logits, alone, atol=1e-5)
    turned = together | {"first": together["second"], "second": together["first"]}
    turned |= {"first_mask": together["second_mask"], "second_mask": together["first_mask"]}
    assert torch.allclose(model(**turned).logits, model(**together).logits, atol=1e-5)


@pytest.mark.parametrize("part", ["valid", "test"])
def test_bleu_of_known_translations(part, local, small):
    task, settings = TASKS["multi30k"](), replace(tiny("multi30k"), length=64)
    splits = task.load(local, settings)
    rows = getattr(splits, part)
    targets = {tuple(rows[i]["input_ids"].tolist()): rows[i]["target"] for i in range(len(rows))}
    searches = []

    def translate(ids, attention_mask, cut, **search):
        searches.append(search)
        known = [targets[tuple(row[mask].tolist())] for row, mask in zip(ids, attention_mask, strict=True)]
        return pad_sequence([torch.cat([torch.tensor([1]), row[: -1 - cut], row[-1:]]) for row in known], batch_first=True)

    def score(cut):
        model = Known(
            lambda batch: torch.zeros(*batch["decoder_input_ids"].shape, 300),
            lambda ids, attention_mask, **search: translate(ids, attention_mask, cut, **search),
        )
        return task.score(model, rows, splits, settings)

    assert score(cut=0) == {"bleu": pytest.approx(100), "loss": pytest.approx(math.log(300), rel=1e-4)}
    assert all(search["num_beams"] == (4 if part == "test" else 1) for search in searches)
    shorter = [task.tokenizer.decode(rows[i]["target"].tolist()[:-2]).strip() for i in range(len(rows))]
    references = [rows[i]["reference"] for i in range(len(rows))]
    assert score(cut=1)["bleu"] == pytest.approx(sacrebleu.corpus_bleu(shorter, [references]).score)


def test_real_data_is_what_the_records_say(real):
    """Counts of the published sets."""
    counts = {}
    for name in ("wikitext2", "multi30k", "stsb", "imdb", "enwik8"):
        task = TASKS[name]()
        if not (real / task.info.folder).is_dir():
            pytest.skip(f"needs {task.info.source} in {real / task.info.folder}")
        options = (
            (("tokens", "word"),) if name == "wikitext2" else (("scored", "all"),) if "scored" in task.info.options else ()
        )
        splits = task.load(real, replace(task.info.defaults, options=options))
        counts[name] = [len(getattr(p, "text", p)) for p in (splits.train, splits.valid, splits.test)]
    assert counts == {
        "wikitext2": [2_088_628, 217_646, 245_569],
        "multi30k": [29_000, 1_014, 1_000],
        "stsb": [5_749, 1_500, 1_379],
        "imdb": [19_924, 2_490, 2_490],
        "enwik8": [19_500_000, 500_000, 5_000_000],
    }


def test_real_images(real):
    folder = real / "cifar10"
    if not folder.is_dir():
        pytest.skip(f"needs uoft-cs/cifar10 in {folder}")
    images, labels = TASKS["cifar10"]().split("test", real)
    assert images.shape == (10_000, 3, 32, 32)
    assert labels.bincount().tolist() == [1_000] * 10
    assert 0.4 < images.float().mean() / 255 < 0.55
