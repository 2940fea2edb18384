"""What a state keeps of its rows, and that two continuations of one state do not meet."""

import torch

from subquad.engines import token_buffer as store


def grown(length, dim=3):
    number = torch.arange(length).expand(2, 1, -1).unsqueeze(-1)
    key = torch.randn(2, 1, length, dim)
    return store.append({}, {"number": number, "key": key}, recorded=False), key


def test_few_rows_are_left_as_they_are():
    state, _ = grown(100)
    assert store.forget(state, ("number", "key"), lambda number: number < 0, 10) is state


def test_only_the_kept_rows_stay_in_their_order():
    state, key = grown(200)
    keep = torch.zeros(2, 1, 200, dtype=torch.bool)
    keep[0, 0, [3, 50, 199]] = True
    keep[1, 0, [7]] = True
    state = store.forget(state, ("number", "key"), lambda number: keep, 4)
    assert store.rows(state["number"])[:, 0, :, 0].tolist() == [[3, 50, 199, -1], [7, -1, -1, -1]]
    assert torch.equal(store.rows(state["key"])[0, 0, :3], key[0, 0, [3, 50, 199]])
    assert torch.equal(store.rows(state["key"])[1, 0, :1], key[1, 0, [7]])


def test_two_continuations_do_not_meet():
    state, key = grown(10)
    one, other = (store.append(state, {"key": torch.full((2, 1, 1, 3), fill)}, recorded=False) for fill in (1.0, 2.0))
    assert torch.equal(store.rows(one["key"])[:, :, :10], key)
    assert (store.rows(one["key"])[:, :, 10] == 1).all()
    assert (store.rows(other["key"])[:, :, 10] == 2).all()
    assert store.rows(state["key"]).shape[2] == 10
