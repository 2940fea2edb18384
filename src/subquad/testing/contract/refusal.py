"""Point 12: what is not supported is refused with every reason; what is accepted has an effect."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from subquad.errors import UnsupportedError
from subquad.families.base import NEEDS
from subquad.registry import methods
from subquad.testing.cases import Case, inputs
from subquad.testing.contract.selection import Contract, requires

N = 20
TOGETHER = {"bidirectional", "cross", "key_padding_mask", "attn_mask", "scale", "dropout_p", "enable_gqa"}
ARGUMENTS = ("is_causal", "key_padding_mask", "attn_mask", "scale", "dropout_p", "global_mask")


def call(case: Case, needs: Iterable[str]) -> Any:
    """Run `case` with exactly these needs, through the function if that is one of them."""
    needs = set(needs)
    is_causal = bool(needs & {"is_causal", "decode"})
    x = inputs(N, N + 3 if "cross" in needs else N, heads=4, kv_heads=2 if "enable_gqa" in needs else 4)
    options: dict[str, Any] = {"is_causal": is_causal}
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
        options["global_mask"] = (torch.arange(N) % 7 == 3).expand(2, N)
    if "functional" in needs:
        return case.function(x, enable_gqa="enable_gqa" in needs, **options)
    return case.run(x, **options)


def with_direction(case: Case, need: str) -> set[str]:
    """`need`, and a direction that the mechanism supports."""
    needs = {need}
    if not needs & {"is_causal", "bidirectional", "cross", "decode"}:
        needs.add("is_causal" if case.directions == [True] else "bidirectional")
    return needs | ({"bidirectional"} if need == "cross" else set()) | ({"is_causal"} if need == "decode" else set())


def refuses_some(case: Case) -> str:
    return "" if case.mechanism.reasons(TOGETHER) else f"{case.info.name} refuses none of {', '.join(sorted(TOGETHER))}"


class Refusal(Contract):
    """12. Refused, or done."""

    @pytest.mark.parametrize("need", sorted(set(NEEDS) - {"decoder_cross"}))  # a promise about the output, not an argument
    def test_refused_or_done(self, case: Case, need: str) -> None:
        needs = with_direction(case, need)
        reasons = case.mechanism.reasons(sorted(needs))
        if not reasons:
            call(case, needs)
            return
        with pytest.raises(UnsupportedError) as caught:
            call(case, needs)
        assert all(reason in str(caught.value) for reason in reasons.values())
        assert all(name in str(caught.value) for name in methods(**dict.fromkeys(needs, True)))

    @requires(refuses_some)
    def test_every_reason_is_named_at_once(self, case: Case) -> None:
        with pytest.raises(UnsupportedError) as caught:
            call(case, TOGETHER)
        assert all(reason in str(caught.value) for reason in case.mechanism.reasons(TOGETHER).values())

    @torch.no_grad()
    def test_accepted_arguments_have_an_effect(self, case: Case) -> None:
        ignored = []
        for need in ARGUMENTS:
            needs = with_direction(case, need)
            without = with_direction(case, "bidirectional") if need == "is_causal" else needs - {need}
            if not case.mechanism.reasons(needs | without) and torch.equal(call(case, needs), call(case, without)):
                ignored.append(need)
        assert not ignored

    @requires(cross=True)
    @torch.no_grad()
    def test_queries_of_a_decoder_do_not_see_each_other(self, case: Case) -> None:
        x, other = inputs(N, N + 3), inputs(N, N + 3, seed=2)
        changed = replace(x, query=torch.cat([x.query[:, :, :7], other.query[:, :, 7:]], dim=2))
        is_independent = torch.equal(case.run(x)[:, :, :7], case.run(changed)[:, :, :7])
        assert is_independent == (not case.why_not(decoder_cross=True))

    def test_refuses_only_known_needs(self, case: Case) -> None:
        assert set(case.info.refuses) <= set(NEEDS)
        assert set(case.info.supports) == set(NEEDS) - set(case.info.refuses)
