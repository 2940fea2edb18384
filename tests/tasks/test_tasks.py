"""What every task owes: data from both sources, a model that learns on it, a score; the same again from the same seed."""

import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from subquad.errors import InputError, MissingExtraError, OptionError, UnsupportedError
from subquad.models.inputs import IGNORED
from subquad.tasks import TASKS
from subquad.tasks.rows import row_lengths

LENGTHS = {"digits": 64, "cifar10": 64, "imdb": 96, "recall": 32}
PUBLIC = [name for name, task in TASKS.items() if task.info.source]


def tiny(name, **changes):
    base = TASKS[name].info.defaults
    return replace(base, length=LENGTHS.get(name, 24), layers=2, dim=16, heads=2, batch=5, dropout=0.0, **changes)


def first_batch(splits):
    return next(iter(DataLoader(splits.train, batch_size=5, collate_fn=splits.collate)))


def equal(a, b):
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a.values(), b.values(), strict=True)
    )


@pytest.mark.parametrize("method", ["softmax", "linear"])
@pytest.mark.parametrize("name", TASKS)
def test_a_model_learns_and_is_scored(name, method, local, small):
    task, settings = TASKS[name](), tiny(name)
    splits = task.load(local, settings)
    model = task.model(method, settings)
    batch = first_batch(splits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert losses[-1] < losses[0]
    model.eval()
    for rows in (splits.valid, splits.test):
        figures = task.score(model, rows, splits, settings)
        assert {task.info.metric, "loss"} <= set(figures)
        assert all(isinstance(value, float) and value == value for value in figures.values())


@pytest.mark.parametrize(
    ("name", "options"), [("wikitext2", ()), ("wikitext2", (("tokens", "word"),)), ("multi30k", ()), ("stsb", ())]
)
def test_the_tokenizer_beside_a_model_writes_what_the_model_has_read(name, options, local, small, tmp_path):
    task, settings = TASKS[name](), tiny(name, options=options)
    splits = task.load(local, settings)
    task.text_tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    rows = [splits.train[i] for i in range(9)]
    column = "first" if name == "stsb" else "input_ids"
    ids = min((row[column] for row in rows), key=len)  # not cut inside a word
    text = loaded.decode(ids, skip_special_tokens=name == "multi30k")
    again = torch.tensor(loaded(text.upper() if name == "stsb" else text)["input_ids"])
    assert torch.equal(again, ids.long())


@pytest.mark.parametrize("name", ["digits", "cifar10"])
def test_a_length_that_the_data_does_not_have_is_refused(name, local):
    with pytest.raises(InputError, match=rf"--length of {name} must be 64, one token .*; got 10\. Pass 64"):
        TASKS[name]().load(local, replace(tiny(name), length=10))


@pytest.mark.parametrize("name", TASKS)
def test_labels_make_a_loss_and_change_no_logits(name, local, small):
    task, settings = TASKS[name](), tiny(name)
    batch = first_batch(task.load(local, settings))
    model = task.model("linear", settings).eval()
    without = model(**{column: x for column, x in batch.items() if column != "labels"})
    assert without.loss is None
    assert torch.equal(without.logits, model(**batch).logits)


@pytest.mark.parametrize("name", TASKS)
def test_rows_that_are_padded_say_their_lengths(name, local, small):
    splits = TASKS[name]().load(local, tiny(name))
    for rows in (splits.train, splits.valid, splits.test):
        batch = splits.collate([rows[i] for i in range(len(rows))])
        real = [mask for column, mask in batch.items() if column.endswith("_mask")]
        if name == "multi30k":
            real.append(batch["labels"] != IGNORED)
        lengths = row_lengths(rows)
        assert (lengths or []) == list(zip(*(mask.sum(1).tolist() for mask in real), strict=True))


@pytest.mark.parametrize("name", TASKS)
def test_the_same_settings_give_the_same_rows_and_weights(name, local, small):
    settings = tiny(name, seed=3)
    tasks = [TASKS[name](), TASKS[name]()]
    one, two = (task.load(local, settings) for task in tasks)
    for part in ("train", "valid", "test"):
        first, second = getattr(one, part), getattr(two, part)
        assert len(first) == len(second) > 0
        assert all(equal(first[i], second[i]) for i in (0, len(first) - 1))
    weights = []
    for task in tasks:
        torch.manual_seed(5)
        weights.append(task.model("performer", settings).state_dict())
    assert equal(*weights)


@pytest.mark.parametrize("name", ["digits", "imdb", "listops", "recall"])
def test_another_seed_gives_other_rows(name, local, small):
    batches = [first_batch(TASKS[name]().load(local, tiny(name, seed=seed))) for seed in (0, 1)]
    assert not torch.equal(batches[0]["labels"], batches[1]["labels"])


@pytest.mark.parametrize("name", PUBLIC)
def test_the_public_source(name, local, small, public):
    task, settings = TASKS[name](), tiny(name)
    splits = task.load(None, settings)
    model = task.model("softmax", settings)
    assert model(**first_batch(splits)).loss.isfinite()
    if name not in ("enwik8", "imdb"):  # whose local copies are parts
        copy = TASKS[name]().load(local, settings)
        for part in ("train", "valid", "test"):
            here, there = getattr(copy, part), getattr(splits, part)
            assert len(here) == len(there)
            assert all(equal(here[i], there[i]) for i in range(len(here)))


INPUTS = ("input_ids", "decoder_input_ids", "first", "second", "pixel_values")


@pytest.mark.parametrize("name", TASKS)
def test_no_row_is_longer_than_the_length(name, local, small):
    settings = tiny(name)
    splits = TASKS[name]().load(local, settings)
    for part in (splits.train, splits.valid, splits.test):
        batch = splits.collate([part[i] for i in range(len(part))])
        inputs = [value for key, value in batch.items() if key in INPUTS]
        assert inputs
        assert all(0 < value.shape[1] <= settings.length for value in inputs)


@pytest.mark.parametrize("name", TASKS)
def test_what_a_record_says(name):
    info = TASKS[name].info
    assert info.name == name
    assert bool(info.source) <= bool(info.folder)
    assert (info.defaults.steps is None) != (info.defaults.epochs is None)
    assert all(choices for choices in info.options.values())


@pytest.mark.parametrize("name", TASKS)
def test_methods_by_name_have_options_for_the_length(name, local, small):
    task, settings = TASKS[name](), tiny(name)
    task.load(local, settings)
    if task.info.kind == "bidirectional":
        assert task.model("linformer", settings).config.method.max_length == settings.length
    else:
        with pytest.raises(UnsupportedError, match="causal"):
            task.model("linformer", settings)
        assert task.model("sparse_fixed", settings).config.method.stride is not None
    mixed = task.model("linear, softmax every 2nd layer", settings)
    assert [config.info.name for config in mixed.config.self_methods] == ["linear", "softmax"]


@pytest.mark.parametrize(
    ("name", "option", "said"),
    [
        ("cifar10", ("tokens", "words"), "tokens of cifar10 must be one of 'patches', 'pixels'; got 'words'"),
        ("cifar10", ("token", "pixels"), "no option 'token'; did you mean 'tokens'"),
        ("digits", ("tokens", "pixels"), "no option 'tokens'.*Options: none"),
    ],
)
def test_unknown_options_are_refused(name, option, said, local):
    with pytest.raises(OptionError, match=said):
        TASKS[name]().options(tiny(name, options=(option,)))


@pytest.mark.parametrize(
    ("name", "module"), [("digits", "sklearn"), ("cifar10", "pyarrow"), ("wikitext2", "datasets"), ("multi30k", "sacrebleu")]
)
def test_a_missing_package_is_named(name, module, local, small, monkeypatch):
    settings = tiny(name)
    task = TASKS[name]()
    splits = task.load(local, settings)
    model = task.model("softmax", settings)
    for loaded in ("sklearn", "sklearn.datasets", "pyarrow", "pyarrow.parquet", "datasets", "sacrebleu"):
        if loaded.split(".")[0] == module:
            monkeypatch.setitem(sys.modules, loaded, None)

    def use():
        if name == "multi30k":
            task.score(model.eval(), splits.valid, splits, settings)
        else:
            task.load(None if name == "wikitext2" else local, settings)

    with pytest.raises(MissingExtraError, match=rf"needs the extra subquad\[train\]; {module}.* is not installed"):
        use()
