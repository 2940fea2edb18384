"""A task that is learnt in a few steps: is the sum of the row's tokens even? Its options break things at will."""

import os
import resource
from dataclasses import replace
from pathlib import Path

import torch

from subquad.models import SubquadForCausalLM, SubquadForConditionalGeneration, SubquadForSequenceClassification
from subquad.tasks.base import Settings, Splits, Task, TaskInfo
from subquad.tasks.classes import Classification
from subquad.tasks.rows import Columns, Sequences, model_config, pad_rows, stack_rows

SETTINGS = Settings(length=7, layers=1, dim=12, heads=2, batch=8, lr=0.01, steps=12, dropout=0.1, seed=3)


class Fake(Classification):
    info = TaskInfo(
        name="fake",
        idea="parity of seven bits",
        kind="bidirectional",
        metric="accuracy",
        higher_is_better=True,
        source="",
        folder="",
        defaults=SETTINGS,
        options={"fault": ("none", "exit", "data", "full", "error"), "kind": ("a", "b")},
    )

    def load(self, folder, settings):
        if self.options(settings)["fault"] == "data":
            raise FileNotFoundError(folder) if folder is None else NoDataError(f"there is no data in {folder}")
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(2, (60, settings.length), generator=generator)
        rows = Columns(input_ids=ids, labels=ids.sum(1) % 2)
        train, valid, test = (rows.take(torch.arange(*ends)) for ends in ((0, 30), (30, 45), (45, 60)))
        return Splits(train=train, valid=valid, test=test, collate=stack_rows)

    def model(self, method, settings):
        fault = self.options(settings)["fault"]
        name = method if isinstance(method, str) else method.info.name
        if fault == "exit" and name == "linear":
            print("no way on", flush=True)
            os._exit(7)
        if fault == "error" and name == "linear":
            raise ZeroDivisionError("a bug in a mechanism")
        if fault == "full" and not Path(os.environ["ROOM"]).exists():
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))  # a disk with room for little
        return SubquadForSequenceClassification(model_config(method, settings, vocab_size=2, num_labels=2))


class FakeText(Task):
    """Language modelling over rows of which different shares count: what is averaged over processes shows."""

    info = TaskInfo(
        name="fake-text", idea="counting", kind="causal", metric="loss", higher_is_better=False, source="", folder="",
        defaults=SETTINGS, options={},
    )  # fmt: skip

    def load(self, folder, settings):
        start = torch.arange(48).unsqueeze(1)
        ids = (start + torch.arange(settings.length)) % 11
        labels = ids.masked_fill(torch.arange(settings.length) > 1 + start % 5, -100)
        rows = Columns(input_ids=ids, labels=labels)
        return Splits(train=rows, valid=rows, test=rows, collate=stack_rows)

    def model(self, method, settings):
        return SubquadForCausalLM(model_config(method, settings, vocab_size=11))

    def score(self, model, rows, splits, settings):
        with torch.no_grad():
            return {"loss": float(model(**splits.collate([rows[i] for i in range(len(rows))])).loss)}


class FakeRagged(Fake):
    """Rows of 1 to 7 bits."""

    info = replace(Fake.info, name="fake-ragged", options={})

    def load(self, folder, settings):
        generator = torch.Generator().manual_seed(0)
        ids = [torch.randint(2, (1 + i * 5 % settings.length,), generator=generator) for i in range(50)]
        rows = Sequences(torch.stack([row.sum() % 2 for row in ids]), input_ids=ids)
        return Splits(train=rows, valid=rows, test=rows, collate=pad_rows())

    def model(self, method, settings):
        return SubquadForSequenceClassification(model_config(method, settings, vocab_size=2, num_labels=2))


class FakePairs(Task):
    """Copying, by an encoder and a decoder: what the decoder reads is in the batch, or left to the model."""

    info = TaskInfo(
        name="fake-pairs", idea="copying", kind="encoder-decoder", metric="loss", higher_is_better=False, source="", folder="",
        defaults=SETTINGS, options={"reads": ("given", "labels")},
    )  # fmt: skip

    def load(self, folder, settings):
        ids = (torch.arange(48).unsqueeze(1) + torch.arange(settings.length)) % 9 + 2
        columns = {"input_ids": ids, "labels": ids}
        if self.options(settings)["reads"] == "given":
            columns["decoder_input_ids"] = torch.cat([torch.ones_like(ids[:, :1]), ids[:, :-1]], 1)
        rows = Columns(**columns)
        return Splits(train=rows, valid=rows, test=rows, collate=stack_rows)

    def model(self, method, settings):
        tokens = {"vocab_size": 11, "pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2}
        return SubquadForConditionalGeneration(model_config(method, settings, is_encoder_decoder=True, **tokens))

    def score(self, model, rows, splits, settings):
        return {"loss": 0.0}


class NoDataError(__import__("subquad").SubquadError):
    pass
