"""What the points rely on: a record that is complete, and options that survive a file."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import FrozenInstanceError

import pytest

from subquad import reference
from subquad.registry import from_record, resolve, to_record
from subquad.testing.cases import Case
from subquad.testing.contract.selection import Contract


class Record(Contract):
    """The record, the registration, and the reference."""

    def test_the_record_is_complete_and_frozen(self, case: Case) -> None:
        info = case.info
        assert all([info.name, info.family, info.engine, info.idea, info.paper, info.time, info.memory])
        assert "\n" not in info.idea
        assert bool(info.state) == ("decode" in info.supports)
        assert vars(pickle.loads(pickle.dumps(info))) == vars(copy.deepcopy(info)) == vars(info)
        with pytest.raises(FrozenInstanceError):
            info.name = "other"  # type: ignore[misc]
        with pytest.raises(TypeError):
            info.refuses["decode"] = "no"  # type: ignore[index]

    def test_it_supports_a_direction(self, case: Case) -> None:
        assert case.directions

    def test_it_has_a_reference(self, case: Case) -> None:
        has_own = type(case.mechanism).reference is not None
        assert has_own or case.info.name in reference.FUNCTIONS, f"set {type(case.mechanism).__name__}.reference"

    def test_it_is_registered(self, case: Case) -> None:
        assert type(resolve(case.info.name)) is type(case.mechanism)

    def test_options_survive_a_file(self, case: Case) -> None:
        assert from_record(json.loads(json.dumps(to_record(case.mechanism)))) == case.mechanism
