"""Contract 4, 5: what stands in pads never matters, nor who else is in the batch."""

import math

import pytest
import torch

from tests.harness import Inputs, assert_close, every_case, inputs

SIDES = {
    "right": [True] * 70 + [False] * 31,
    "left": [False] * 31 + [True] * 70,
    "holes": [i % 3 > 0 for i in range(101)],
}


def padded(x, real, fill):
    """`x` with `fill` in the pads of keys, values and tokens."""
    mask = ~real
    return Inputs(
        x.query,
        x.key.masked_fill(mask[:, None, :, None], fill),
        x.value.masked_fill(mask[:, None, :, None], fill),
        x.hidden.masked_fill(mask[:, :, None], fill),
    )


@every_case
@pytest.mark.parametrize("side", SIDES)
@torch.no_grad()
def test_equals_reference(case, side):
    case.skip_unless(key_padding_mask=True)
    x, real = inputs(101), torch.tensor([SIDES[side], [True] * 101])
    for is_causal in case.directions:
        options = {"is_causal": is_causal, "key_padding_mask": real}
        assert_close(case.run(x, **options), case.reference(x, **options))


@every_case
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("fill", [1e30, math.inf, math.nan])
def test_pad_content_changes_no_bit(case, side, fill):
    case.skip_unless(key_padding_mask=True)
    real = torch.tensor([SIDES[side], [True] * 101])
    for is_causal in case.directions:
        results = []
        for content in (0.0, fill):
            x = padded(inputs(101), real, content).map(lambda t: t.requires_grad_())
            out = case.run(x, is_causal=is_causal, key_padding_mask=real)
            grads = torch.autograd.grad(out.square().sum(), [*x], allow_unused=True)
            results.append([out, *(g for g in grads if g is not None)])
        for clean, dirty in zip(*results, strict=True):
            assert torch.equal(clean, dirty)


@every_case
@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_padded_equals_the_sequence_alone(case, side):
    case.skip_unless(key_padding_mask=True)
    real = torch.tensor([SIDES[side]] * 2)
    x = inputs(70)
    pad = inputs(31, seed=3).map(lambda t: torch.full_like(t, math.nan))
    first, second = (x, pad) if side == "right" else (pad, x)
    together = Inputs(*(torch.cat([a, b], dim=d) for a, b, d in zip(first, second, (2, 2, 2, 1), strict=True)))
    for is_causal in case.directions:
        out = case.run(together, is_causal=is_causal, key_padding_mask=real)
        found = out[:, :, :70] if side == "right" else out[:, :, 31:]
        assert_close(found, case.run(x, is_causal=is_causal))


@every_case
@torch.no_grad()
def test_batch_mates_do_not_matter(case):
    x = inputs(90, batch=3)
    x.key[1] *= 20
    real = torch.tensor([[True] * 90, [True] * 50 + [False] * 40, [i % 2 > 0 for i in range(90)]])
    for is_causal in case.directions:
        for mask in [None] if case.why_not(key_padding_mask=True) else [None, real]:
            together = case.run(x, is_causal=is_causal, key_padding_mask=mask)
            for row in range(3):
                one = slice(row, row + 1)
                alone = case.run(
                    x.map(lambda t, one=one: t[one]), is_causal=is_causal, key_padding_mask=None if mask is None else mask[one]
                )
                assert_close(alone, together[one])
