"""Which rows a state keeps, and that two continuations of one state do not overwrite each other."""

import torch

from subquad.engines.token_buffer import append_rows, drop_rows
from subquad.state import rows


def grown(length, dim=3):
    number = torch.arange(length).expand(2, 1, -1).unsqueeze(-1)
    key = torch.randn(2, 1, length, dim)
    return append_rows({}, {"number": number, "key": key}, recorded=False), key


def test_few_rows_are_not_dropped():
    state, _ = grown(100)
    assert drop_rows(state, ("number", "key"), lambda number: number < 0, 10) is state


def test_kept_rows_stay_in_their_order():
    state, key = grown(200)
    keep = torch.zeros(2, 1, 200, dtype=torch.bool)
    keep[0, 0, [3, 50, 199]] = True
    keep[1, 0, [7]] = True
    state = drop_rows(state, ("number", "key"), lambda number: keep, 4)
    assert rows(state["number"])[:, 0, :, 0].tolist() == [[3, 50, 199, -1], [7, -1, -1, -1]]
    assert torch.equal(rows(state["key"])[0, 0, :3], key[0, 0, [3, 50, 199]])
    assert torch.equal(rows(state["key"])[1, 0, :1], key[1, 0, [7]])


def test_two_continuations_are_independent():
    state, key = grown(10)
    one, other = (append_rows(state, {"key": torch.full((2, 1, 1, 3), fill)}, recorded=False) for fill in (1.0, 2.0))
    assert torch.equal(rows(one["key"])[:, :, :10], key)
    assert (rows(one["key"])[:, :, 10] == 1).all()
    assert (rows(other["key"])[:, :, 10] == 2).all()
    assert rows(state["key"]).shape[2] == 10
