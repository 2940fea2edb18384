"""Mechanisms that are wrong in one way each, for the tests of the soak test. Importing the module registers nothing."""

import os
import signal
import threading
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

import subquad as sq

HERE = os.getpid()
REFUSED = ("is_causal", "cross", "decode", "attn_mask", "scale", "dropout_p", "global_mask")
INFO = sq.Info(
    name="right_mean", family="exact", engine="kernelized", idea="the mean of all values", paper="nobody", time="O(N)", memory="O(1)",
    refuses=dict.fromkeys(REFUSED, "not written"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RightMean(sq.Mechanism):
    info: ClassVar[sq.Info] = INFO

    @staticmethod
    def reference(mechanism, query, key, value, *, allowed, **_):
        weights = allowed.to(value.dtype) + 0 * query[..., :1]
        return weights @ value / allowed.sum(-1, keepdim=True).clamp(min=1)

    def mean(self, call):
        value, real = call.value, call.key_padding_mask
        if real is not None:
            value = value.masked_fill(~real[:, None, :, None], 0)
        count = value.shape[2] if real is None else real.sum(1)[:, None, None, None].clamp(min=1)
        mean = value.double().sum(2, keepdim=True) / count
        mean = mean.repeat_interleave(call.query.shape[1] // call.key.shape[1], dim=1)
        return (mean + 0 * call.query[..., :1].double()).to(value.dtype)

    def run(self, call):
        return self.mean(call), None


def named(cls):
    """Give a class the record of `right_mean` under its own name."""
    name = "".join("_" + c.lower() if c.isupper() else c for c in cls.__name__).lstrip("_")
    cls.info = replace(cls.info, name=name)
    return dataclass(frozen=True, kw_only=True)(cls)


@named
class WrongMean(RightMean):
    def run(self, call):
        return self.mean(call) * 1.5, None


@named
class WrongGradient(RightMean):
    def run(self, call):
        out = self.mean(call)
        return out.detach() + 1.1 * (out - out.detach()), None


@named
class RoundedMean(RightMean):
    """In float32, it computes in half precision."""

    def run(self, call):
        return self.mean(call).to(torch.bfloat16).to(call.value.dtype), None


@named
class HiddenNan(RightMean):
    def run(self, call):
        return self.mean(call).nan_to_num(), None


@named
class NeedlessRefusal(RightMean):
    def run(self, call):
        raise sq.InputError("no")


@named
class BrokenPromise(RightMean):
    """Does what its record refuses: until it has run, it says that it can do everything."""

    has_run: ClassVar[list] = []

    def reasons(self, needs):
        return super().reasons(needs) if self.has_run else {}

    def run(self, call):
        self.has_run.append(True)
        return super().run(call)


@named
class ForeignError(RightMean):
    def run(self, call):
        return 1 // 0, None


@named
class Crash(RightMean):
    def run(self, call):
        os.kill(os.getpid(), signal.SIGSEGV)


@named
class UnsteadyMean(RightMean):
    """Another result in other threads and other processes."""

    def run(self, call):
        is_elsewhere = os.getpid() != HERE or threading.current_thread() is not threading.main_thread()
        return self.mean(call) + is_elsewhere, None


MECHANISMS = (
    RightMean,
    WrongMean,
    WrongGradient,
    RoundedMean,
    HiddenNan,
    NeedlessRefusal,
    BrokenPromise,
    ForeignError,
    Crash,
    UnsteadyMean,
)
