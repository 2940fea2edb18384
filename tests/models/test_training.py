"""Every mechanism learns in every model; precision and recomputation change nothing but rounding."""

import pytest
import torch

import subquad as sq
from subquad.models import (
    SubquadForCausalLM,
    SubquadForConditionalGeneration,
    SubquadForImageClassification,
    SubquadForMaskedLM,
    SubquadForSequenceClassification,
    SubquadForTokenClassification,
)
from subquad.training.trainer import recompute
from tests.models.small import CROSS, DECODABLE, METHODS, config, every, tokens

BIDIRECTIONAL = [method for method in METHODS if not sq.why_not(method, bidirectional=True)]
FIELDS = {
    "num_hidden_layers": 1,
    "initializer_range": 0.1,
    "num_labels": 3,
    "image_size": 4,
    "patch_size": 1,
    "num_channels": 2,
}


def batch_for(model):
    ids, mask = (
        x.flip(1) for x in tokens(length=9)
    )  # padded on the right: before a first token there is nothing to learn from
    if isinstance(model, SubquadForImageClassification):
        images = torch.rand(3, 2, 4, 4, generator=torch.Generator().manual_seed(1))
        return {"pixel_values": images.to(model.dtype), "labels": torch.tensor([0, 2, 1])}
    if isinstance(model, SubquadForSequenceClassification):
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 2, 1])}
    labels = ids % 3 if isinstance(model, SubquadForTokenClassification) else ids
    if isinstance(model, SubquadForConditionalGeneration):
        labels = ids.flip(1)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def built(model_class, method, *, dtype=torch.float32, **fields):
    torch.manual_seed(0)
    return model_class(config(method, **FIELDS, **fields)).to(dtype)


def fit(model):
    """The loss on one batch after at most 300 steps; fewer if it is near zero before."""
    batch = batch_for(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(300):
        loss = model(**batch).loss
        if loss < 0.02:
            break
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # or signed features, as rfa's, may throw it far off
        optimizer.step()
    return loss.item()


@every(DECODABLE)
def test_a_causal_model_learns_a_batch(method):
    assert fit(built(SubquadForCausalLM, method)) < 0.02


@every(DECODABLE)
def test_an_encoder_decoder_learns_a_batch(method):
    assert fit(built(SubquadForConditionalGeneration, method, cross_method="softmax")) < 0.02


@every(CROSS, "cross")
def test_every_cross_attention_learns_a_batch(cross):
    assert fit(built(SubquadForConditionalGeneration, "softmax", cross_method=cross)) < 0.02


@every(BIDIRECTIONAL)
@pytest.mark.parametrize(
    "model_class",
    [
        SubquadForMaskedLM,
        SubquadForSequenceClassification,
        SubquadForTokenClassification,
        SubquadForImageClassification,
    ],
)
def test_an_encoder_learns_a_batch(model_class, method):
    assert fit(built(model_class, method)) < 0.02


def loss_and_gradients(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("use_reentrant", [False, True])
@every(METHODS)
def test_gradient_checkpointing_changes_nothing(method, use_reentrant):
    model_class = SubquadForCausalLM if method in DECODABLE else SubquadForMaskedLM
    plain, thrifty = (built(model_class, method, dtype=torch.float64, dropout=0.2).train() for _ in range(2))
    recompute(thrifty, use_reentrant=use_reentrant)
    results = []
    for model in (plain, thrifty):
        torch.manual_seed(7)
        results.append(loss_and_gradients(model, batch_for(model)))
    (loss, gradients), (other_loss, other_gradients) = results
    assert torch.equal(loss, other_loss)
    assert gradients.keys() == other_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, other_gradients[name], rtol=1e-9, atol=1e-12, msg=name)
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), thrifty.buffers(), strict=True))


def test_gradient_checkpointing_of_an_encoder_decoder():
    plain, thrifty = (built(SubquadForConditionalGeneration, "linear", dtype=torch.float64).train() for _ in range(2))
    recompute(thrifty)
    loss, gradients = loss_and_gradients(plain, batch_for(plain))
    other_loss, other_gradients = loss_and_gradients(thrifty, batch_for(thrifty))
    assert torch.equal(loss, other_loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, other_gradients[name], rtol=1e-9, atol=1e-12)
    with pytest.raises(sq.InputError, match="gradient checkpointing computes states twice"):
        thrifty(**batch_for(thrifty), use_cache=True)


@every(METHODS)
def test_mixed_precision_gives_the_same_loss_within_rounding(method):
    model_class = SubquadForCausalLM if method in DECODABLE else SubquadForMaskedLM
    model = built(model_class, method)
    batch = batch_for(model)
    expected, _ = loss_and_gradients(model, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, gradients = loss_and_gradients(model, batch)
    assert found.dtype == torch.float32
    assert all(g.isfinite().all() for g in gradients.values())
    assert abs(found - expected) < 2**-7 * expected  # two units in bfloat16's last place


def test_the_loss_is_the_mean_over_labels_that_count():
    model = built(SubquadForCausalLM, "linear", dtype=torch.float64).eval()
    batch = batch_for(model)
    out = model(**batch)
    chosen = out.logits[:, :-1].log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
    counts = batch["labels"][:, 1:] != -100
    expected = -chosen[counts].mean()
    torch.testing.assert_close(out.loss.double(), expected, rtol=1e-6, atol=0)
    shared = model(**batch, num_items_in_batch=2 * counts.sum()).loss
    torch.testing.assert_close(shared, out.loss / 2)


def test_the_trainer_trains(tmp_path):
    from transformers import Trainer, TrainingArguments

    model = built(SubquadForCausalLM, "linear")
    batch = batch_for(model)
    rows = [{name: x[i] for name, x in batch.items()} for i in range(3)] * 8
    arguments = TrainingArguments(
        tmp_path, max_steps=30, per_device_train_batch_size=3, learning_rate=0.01, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    before = model(**batch).loss
    Trainer(model, arguments, train_dataset=rows).train()
    assert model(**batch).loss < before / 2
