"""Contract 12: what is not supported is refused with every reason; what is accepted has an effect."""

from dataclasses import replace

import pytest
import torch

import subquad as sq
from subquad.families.base import NEEDS
from tests.harness import every_case, inputs

N = 20


def call(case, needs):
    """Run `case` with exactly these needs, through the function if that is one of them."""
    needs = set(needs)
    is_causal = bool(needs & {"is_causal", "decode"})
    x = inputs(N, N + 3 if "cross" in needs else N, heads=4, kv_heads=2 if "enable_gqa" in needs else 4)
    options = {"is_causal": is_causal}
    if "key_padding_mask" in needs:
        options["key_padding_mask"] = torch.rand(2, x.key.shape[2]) < 0.5
    if "attn_mask" in needs:
        options["attn_mask"] = torch.rand(N, x.key.shape[2]) < 0.5
    if "scale" in needs:
        options["scale"] = 0.77
    if "dropout_p" in needs:
        options["dropout_p"] = 0.5
    if "decode" in needs:
        options["return_state"] = True
    if "global_mask" in needs:
        options["global_mask"] = torch.arange(N) % 7 == 3
        options["global_mask"] = options["global_mask"].expand(2, N)
    if "functional" in needs:
        return case.function(x, enable_gqa="enable_gqa" in needs, **options)
    return case.run(x, **options)


def with_direction(case, need):
    """`need`, and a direction that the mechanism has a meaning for."""
    needs = {need}
    if not needs & {"is_causal", "bidirectional", "cross", "decode"}:
        needs.add("is_causal" if case.directions == [True] else "bidirectional")
    return needs | ({"bidirectional"} if need == "cross" else set()) | ({"is_causal"} if need == "decode" else set())


@every_case
@pytest.mark.parametrize("need", sorted(set(NEEDS) - {"decoder_cross"}))  # a promise about the output, not an argument
def test_refused_or_done(case, need):
    needs = with_direction(case, need)
    reasons = case.config.reasons(sorted(needs))
    if not reasons:
        call(case, needs)
        return
    with pytest.raises(sq.UnsupportedError) as caught:
        call(case, needs)
    assert all(reason in str(caught.value) for reason in reasons.values())
    assert all(name in str(caught.value) for name in sq.methods(**dict.fromkeys(needs, True)))


@every_case
@torch.no_grad()
def test_queries_of_a_decoder_do_not_see_each_other(case):
    case.skip_unless(cross=True)
    x, other = inputs(N, N + 3), inputs(N, N + 3, seed=2)
    changed = replace(x, query=torch.cat([x.query[:, :, :7], other.query[:, :, 7:]], dim=2))
    alike = torch.equal(case.run(x)[:, :, :7], case.run(changed)[:, :, :7])
    assert alike == (not case.why_not(decoder_cross=True))


@every_case
def test_every_reason_is_named_at_once(case):
    needs = {"bidirectional", "cross", "key_padding_mask", "attn_mask", "scale", "dropout_p", "enable_gqa"}
    reasons = case.config.reasons(needs)
    if not reasons:
        pytest.skip(f"{case.info.name} refuses none of these")
    with pytest.raises(sq.UnsupportedError) as caught:
        call(case, needs)
    assert all(reason in str(caught.value) for reason in reasons.values())


@every_case
@pytest.mark.parametrize("need", ["is_causal", "key_padding_mask", "attn_mask", "scale", "dropout_p", "global_mask"])
@torch.no_grad()
def test_accepted_arguments_have_an_effect(case, need):
    needs = with_direction(case, need)
    if case.config.reasons(needs):
        pytest.skip("refused")
    without = with_direction(case, "bidirectional") if need == "is_causal" else needs - {need}
    if case.config.reasons(without):
        pytest.skip("has only one direction")
    assert (call(case, needs) != call(case, without)).any()


@every_case
def test_refuses_only_known_needs(case):
    assert set(case.info.refuses) <= set(NEEDS)
    assert set(case.info.supports) == set(NEEDS) - set(case.info.refuses)
