"""Repairs: they lower the loss they say, they go on where they were stopped, they leave the rest alone."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import subquad as sq
from subquad.conversion import Schedule, align, finetune, keep_softmax, transfer
from subquad.conversion.activations import recordable
from subquad.conversion.repair import chunked_loss, keep_search
from subquad.conversion.repair.alignment import Align
from tests.conversion import families

SHORT = Schedule(steps=12, lr=1e-2, every=4, held_out=0.2)


@pytest.fixture(scope="module")
def batches():
    """Of sequences that count upwards: there is something to learn."""
    torch.manual_seed(0)
    steps, starts = torch.randint(1, 4, (10, 8, 1)), torch.randint(90, (10, 8, 1))
    return [{"input_ids": ids} for ids in 3 + (starts + steps * torch.arange(24)) % 90]


def pair(name="llama", method="hybrid", **options):
    method = {"hybrid": sq.Hybrid(window=2)}.get(method, method)
    original = families.model(name)
    with torch.no_grad():  # spread the scores, so that there is something to lose
        for key, weight in original.named_parameters():
            if weight.dim() == 2 and "embed" not in key:
                weight.mul_(6)
    return original, sq.convert(original, method, copy=True, **options)


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("name", "method"), [("llama", "hybrid"), ("llama", sq.RFA()), ("bert", sq.Hedgehog())])
def test_transfer_learns_the_maps_and_nothing_else(name, method, batches):
    original, converted = pair(name, method)
    before, teacher = weights(converted), weights(original)
    progress = transfer(original, converted, batches, SHORT)
    assert progress.best[1] < progress.losses[0][1]
    changed = {name for name, value in weights(converted).items() if not torch.equal(value, before[name])}
    assert changed
    assert all(".subquad." in name for name in changed)
    assert all(torch.equal(value, teacher[name]) for name, value in weights(original).items())
    assert not hasattr(original.config, "subquad")


@pytest.mark.parametrize("loss", ["language", "distil", "embedding"])
def test_finetuning_lowers_its_loss_and_keeps_the_names(loss, batches):
    original, converted = pair()
    before = list(converted.state_dict())
    progress = finetune(original, converted, batches, replace(SHORT, lr=3e-3), loss=loss, rank=2)
    assert progress.best[1] < progress.losses[0][1]
    assert list(converted.state_dict()) == before
    assert all(weight.requires_grad for weight in converted.parameters())


@pytest.mark.parametrize("targets", ["attention", "all"])
@pytest.mark.parametrize("name", [name for name in families.NAMES if name not in families.SOFTMAX_ONLY])
def test_what_gives_the_same_is_aligned(name, targets):
    """So that each attention and each layer is handed what the original's is handed, in every family."""
    pytest.importorskip("peft")
    original = families.model(name)
    converted = sq.convert(original, sq.Local(window=64), copy=True)
    with recordable(original) as teacher:
        stage = Align(teacher, converted, targets=targets)
        stage.train(True)
        loss = stage.loss(families.inputs(name))
        assert len(stage.targets) == sum(found["name"] != "softmax" for found in converted.config.subquad["sites"].values())
        assert loss < 1e-10
        with torch.no_grad():
            for key, weight in stage.parameters().items():
                if "lora_B" in key:
                    weight.normal_()
        assert stage.loss(families.inputs(name)) > 1e-3


@pytest.mark.parametrize("targets", ["attention", "all"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "bart"])
def test_alignment_lowers_its_loss_and_leaves_the_rest(name, targets, batches):
    original, converted = pair(name, "linear", keep_softmax=[0])
    before, teacher = weights(converted), weights(original)
    progress = align(original, converted, batches, SHORT, rank=2, targets=targets)
    assert progress.best[1] < progress.losses[0][1]
    assert list(converted.state_dict()) == list(before)
    changed = {key for key, value in weights(converted).items() if not torch.equal(value, before[key])}
    maps = {key for key in before if re.search(r"(?:layers?|h)\.[1-9]\..*weight$", key) and before[key].dim() == 2}
    maps = {key for key in maps if "encoder_attn" not in key}  # cross-attention is still softmax
    assert changed <= {key for key in before if ".0." not in key}
    assert changed >= {key for key in maps if "att" in key}
    assert targets == "all" or all("att" in key for key in changed)
    assert all(torch.equal(value, teacher[key]) for key, value in weights(original).items())
    assert not hasattr(original.config, "subquad")


@pytest.mark.parametrize("stage", [transfer, align, finetune])
def test_mixed_precision_learns_as_much_within_rounding(stage, batches):
    found = {}
    for precision in ("fp32", "bf16"):
        original, converted = pair()
        found[precision] = stage(original, converted, batches, replace(SHORT, precision=precision)).losses
        assert {weight.dtype for weight in converted.parameters()} == {torch.float32}
    assert found["bf16"] != found["fp32"]
    gained = found["fp32"][0][1] - found["fp32"][-1][1]
    for (_, plain), (_, mixed) in zip(found["fp32"], found["bf16"], strict=True):
        assert mixed == pytest.approx(plain, abs=0.1 * gained)


@pytest.mark.parametrize("kind", ["cross_entropy", "divergence"])
@pytest.mark.parametrize("rows", [1, 4, 11, 100])
def test_the_loss_in_chunks_is_the_loss_of_all_rows(rows, kind, monkeypatch):
    torch.manual_seed(0)
    weight, words, others = torch.randn(7, 13), torch.randint(13, (11,)), torch.randn(11, 7)
    monkeypatch.setattr(chunked_loss, "_CHUNK", 13 * rows)
    seen = []

    def head(states):
        seen.append(len(states))
        return states @ weight

    states = torch.randn(11, 7, requires_grad=True)
    if kind == "cross_entropy":
        loss, whole = chunked_loss.cross_entropy(words), F.cross_entropy(states @ weight, words)
    else:
        loss, q = chunked_loss.divergence(others, head), (states @ weight).log_softmax(-1)
        whole = F.kl_div(q, (others @ weight).log_softmax(-1), reduction="batchmean", log_target=True)
    expected = torch.autograd.grad(3 * whole, states)[0]
    found = chunked_loss.mean_loss(states, head, 13, loss)
    assert max(seen) == min(rows, 11)
    assert torch.allclose(found, whole)
    assert torch.allclose(torch.autograd.grad(3 * found, states)[0], expected, atol=1e-7)
    with torch.no_grad():
        assert torch.allclose(chunked_loss.mean_loss(states, head, 13, loss), whole)


@pytest.mark.parametrize("targets", ["attention", "all"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "bart"])
def test_what_finetuning_changes(name, targets, batches):
    original, converted = pair(name, "linear")
    before = weights(converted)
    finetune(original, converted, batches, replace(SHORT, lr=3e-3), rank=2, targets=targets)
    changed = {key for key, value in weights(converted).items() if not torch.equal(value, before[key])}
    maps = {key for key in before if re.search(r"(?:layers?|h)\.\d+\..*weight$", key) and before[key].dim() == 2}
    assert changed == (maps if targets == "all" else {key for key in maps if "att" in key})


@pytest.mark.parametrize("stage", [transfer, align, finetune])
def test_a_stopped_repair_goes_on_to_the_same_weights(stage, batches, tmp_path):
    original, whole = pair()
    done = stage(original, whole, batches, SHORT)
    _, parts = pair()
    count = 0

    def after_six():
        nonlocal count
        count += 1
        return count == 6

    first = stage(original, parts, batches, SHORT, folder=tmp_path, is_stopping=after_six)
    assert (first.step, first.ended) == (6, "")
    _, parts = pair()
    second = stage(original, parts, batches, SHORT, folder=tmp_path)
    assert second.losses == done.losses
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in parts.state_dict().items())


def test_a_repair_with_other_settings_does_not_go_on(batches, tmp_path):
    original, converted = pair()
    transfer(original, converted, batches, SHORT, folder=tmp_path, is_stopping=lambda: True)
    with pytest.raises(sq.InputError, match="other settings"):
        transfer(original, converted, batches, replace(SHORT, lr=0.1), folder=tmp_path)
    (tmp_path / "transfer.pt").write_bytes(b"nothing")
    with pytest.raises(sq.InputError, match="cannot be read as the checkpoint of a repair"):
        transfer(original, converted, batches, SHORT, folder=tmp_path)


def test_it_stops_early_and_keeps_the_best(batches):
    original, converted = pair()
    progress = transfer(original, converted, batches, Schedule(steps=500, lr=30.0, every=1, patience=3, held_out=0.2))
    assert progress.ended.startswith("no better loss in 3 evaluations")
    assert progress.step < 500
    again = transfer(original, converted, batches, replace(SHORT, steps=1))
    assert again.losses[0][1] == pytest.approx(progress.best[1], rel=1e-6)


def test_minutes(batches):
    original, converted = pair()
    progress = transfer(original, converted, batches, replace(SHORT, minutes=1e-9))
    assert (progress.step, progress.ended) == (1, "1e-09 minutes have passed")


def test_keep_search_takes_the_best_layer_each_time(batches):
    original, converted = pair("llama", sq.Local(window=1))
    found = keep_softmax(original, converted, batches, 2)
    assert len(found.tried) == 3 + 2
    first = {layer: loss for kept, layer, loss in found.tried if kept == 0}
    assert found.layers[0] == min(first, key=first.get)
    assert found.losses[1] == first[found.layers[0]]
    assert found.losses[-1] == min(loss for kept, _, loss in found.tried if kept == 1)
    kinds = {i: layer.self_attn.subquad.method for i, layer in enumerate(converted.model.layers)}
    assert {layer for layer, kind in kinds.items() if kind == sq.Softmax()} == set(found.layers)
    again = sq.convert(original, sq.Local(window=1), copy=True, keep_softmax=found.layers)
    assert again.config.subquad == converted.config.subquad
    assert torch.equal(families.outputs(again, batches[0]), families.outputs(converted, batches[0]))


def test_an_interrupted_keep_search_leaves_every_mechanism(batches, monkeypatch):
    original, converted = pair("llama", sq.Local(window=1))
    before = families.outputs(converted, batches[0])
    losses = iter([1.0, 1.0])

    def interrupted(*_):
        try:
            return next(losses)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(keep_search, "_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        keep_softmax(original, converted, batches, 1)
    assert torch.equal(families.outputs(converted, batches[0]), before)


def test_refusals(batches):
    original, converted = pair("llama", "performer")
    with pytest.raises(sq.UnsupportedError, match="performer has none"):
        transfer(original, converted, batches, SHORT)
    with pytest.raises(sq.InputError, match="between 1 and 2 of the 3"):
        keep_softmax(original, converted, batches, 3)
    with pytest.raises(sq.InputError, match="at least 2; got 1"):
        finetune(original, converted, [{"input_ids": torch.randint(3, 97, (4, 24))}], SHORT)
    with pytest.raises(sq.InputError, match="at least 64 tokens"):
        finetune(original, converted, [{"input_ids": torch.arange(3, 9)[None]}] * 2, SHORT)
    with pytest.raises(sq.OptionError, match="must be one of language, distil, embedding; got 'other'"):
        finetune(original, converted, batches, SHORT, loss="other")
    with pytest.raises(sq.OptionError, match="must be one of attention, all; got 'heads'"):
        finetune(original, converted, batches, SHORT, targets="heads")
    with pytest.raises(sq.OptionError, match="rank of a change must be at most"):
        finetune(original, converted, batches, SHORT, rank=1000)
    with pytest.raises(sq.InputError, match="rank must be an integer of at least 1; got 0"):
        align(original, converted, batches, SHORT, rank=0)
    same = sq.convert(original, "softmax", copy=True)
    with pytest.raises(sq.UnsupportedError, match="not softmax, and all attention of this model is softmax"):
        align(original, same, batches, SHORT)
    assert not any("lora" in name for name in same.state_dict())
    bert, encoder = pair("bert", "linear")
    with pytest.raises(sq.InputError, match="Use embedding"):
        finetune(bert, encoder, batches, SHORT, loss="language")
    assert not any("lora" in name for name in encoder.state_dict())
    with pytest.raises(sq.InputError, match=r"must be a Schedule, such as Schedule\(steps=300\); got 5"):
        align(original, converted, batches, 5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"steps": 0}, "steps must be an integer of at least 1; got 0"),
        ({"steps": "9"}, "steps must be an integer of at least 1; got '9'"),
        ({"every": 0}, "every must be an integer of at least 1; got 0"),
        ({"patience": 0.5}, "patience must be an integer of at least 1; got 0.5"),
        ({"lr": "0.1"}, "lr must be a finite number above 0; got '0.1'"),
        ({"lr": float("nan")}, "lr must be a finite number above 0; got nan"),
        ({"minutes": -1}, "minutes must be a number above 0; got -1"),
        ({"held_out": 1}, "held_out must be a fraction from 0 to below 1; got 1"),
        ({"seed": 1.5}, "seed must be an integer from 0"),
        ({"precision": "fp8"}, "precision must be fp32 or bf16; got 'fp8'"),
    ],
)
def test_no_schedule(wrong, said):
    with pytest.raises(sq.InputError, match=re.escape(said)):
        Schedule(**wrong)


def test_a_stage_has_its_own_learning_rate_and_evaluations(batches):
    """Whatever else its schedule says."""
    few = Schedule(steps=1, held_out=0.2)
    found = {}
    for rank in (2, 8, 16):
        original, converted = pair()
        found[rank] = [transfer(original, converted, batches, few).lr]
        found[rank] += [stage(original, converted, batches, few, rank=rank).lr for stage in (align, finetune)]
    assert found == {2: [1e-2, 1e-3, 1e-3], 8: [1e-2, 1e-3, 1e-3], 16: [1e-2, 1e-3, 5e-4]}
    assert [Schedule(steps=steps).evaluate_every for steps in (1, 12, 299, 300, 5000)] == [1, 2, 49, 50, 50]


def test_what_gained_nothing_says_so(batches):
    original, converted = pair()
    before = weights(converted)
    progress = transfer(original, converted, iter(batches), replace(SHORT, lr=30.0))
    assert progress.ended == "all steps are done; nothing was gained, so the weights are unchanged"
    assert all(torch.equal(value, before[key]) for key, value in weights(converted).items())
    assert all(weight.grad is None for weight in converted.parameters())


@pytest.mark.parametrize("stage", [align, finetune])
def test_reverting_what_was_finetuned_warns(stage, batches, tmp_path):
    original, converted = pair()
    stage(original, converted, batches, SHORT, rank=2, folder=str(tmp_path / "checkpoints"))
    converted.save_pretrained(tmp_path / "model")
    loaded = type(converted).from_pretrained(tmp_path / "model")
    for model in (converted, loaded):
        with pytest.warns(UserWarning, match="revert does not undo that: the result is not the original model"):
            sq.revert(model)
    original, converted = pair()
    transfer(original, converted, batches, SHORT)
    assert all(torch.equal(value, original.state_dict()[key]) for key, value in sq.revert(converted).state_dict().items())
