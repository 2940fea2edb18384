"""The decode benchmark measures every cell, refuses what disagrees, and keeps what it has. Its timings are not tested."""

import json

import pytest
from benchmarks import decode

TINY = ["--positions", "16,64", "--layers", "1", "--hidden", "32", "--heads", "2", "--rounds", "2", "--tokens", "3"]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "decode.json"


def results(out, *arguments):
    decode.main([*TINY, *arguments, "--out", str(out)])
    return json.loads(out.read_text())


def test_every_cell_and_what_it_holds(out):
    found = results(out)
    assert found["finished"]
    cells = {(row["method"], row["position"]): row for row in found["cells"]}
    assert set(cells) == {(m, n) for m in ("softmax", "linear", "performer", "local") for n in (16, 64)}
    for row in cells.values():
        assert row["rounds"] == len(row["milliseconds_by_round"]) == 2
        low, high = row["tokens_per_second_80_percent"]
        assert 0 < low <= row["tokens_per_second"] <= high
    assert all(cells["softmax", n]["times_softmax"] == 1 for n in (16, 64))
    for method in ("linear", "performer"):
        sizes = [cells[method, n][name] for n in (16, 64) for name in ("cache_bytes", "cache_bytes_decoding")]
        assert len(set(sizes)) == 1
    positions = 2 * 8  # the model's and the layer's
    assert [cells["softmax", n]["cache_bytes"] - positions for n in (16, 64)] == [2 * n * 32 * 4 for n in (16, 64)]
    assert cells["softmax", 64]["cache_bytes_decoding"] > cells["softmax", 64]["cache_bytes"]


def test_a_stream(out):
    stream = results(out, "--methods", "linear", "--stream", "43")["stream"]
    assert [mark["tokens"] for mark in stream["marks"]] == [*range(0, 41, 4), 43]
    assert stream["tokens"] == 43
    assert len({mark["cache_bytes"] for mark in stream["marks"][1:]}) == 1
    assert stream["process_bytes_after_first_tenth"] > 0


def test_rounds_start_from_the_same_cache(out, monkeypatch):
    lengths = []

    def run(cell, tokens, run=decode.run):
        before = cell.cache.get_seq_length(), cell.cache.nbytes
        seconds = run(cell, tokens)
        assert before == (cell.position, cell.cache.nbytes) == (cell.cache.get_seq_length(), cell.cache.nbytes)
        lengths.append(before[0])
        return seconds

    monkeypatch.setattr(decode, "run", run)
    results(out, "--methods", "softmax;local")
    assert sorted(lengths) == [16] * 6 + [64] * 6  # two methods; to warm up, and two rounds


@pytest.mark.parametrize("method", ["softmax", "linear", "performer", "local"])
def test_disagreement_is_not_timed(out, monkeypatch, method):
    def forget_the_first(model, tokens, cache, keep=1, forward=decode.forward):
        if cache.get_seq_length() == 1:
            cache.reset()
        return forward(model, tokens, cache, keep)

    monkeypatch.setattr(decode, "forward", forget_the_first)
    with pytest.raises(SystemExit, match=f"{method}: one at a time is off by .*; not timed"):
        results(out, "--methods", method)
    assert not out.exists()


def test_interrupted_it_keeps_what_is_done(out, monkeypatch):
    calls = []

    def run(cell, tokens, run=decode.run):
        calls.append(cell)
        if len(calls) == 2 + 2 + 2:  # to warm up, one round, and in the second
            raise KeyboardInterrupt
        return run(cell, tokens)

    monkeypatch.setattr(decode, "run", run)
    with pytest.raises(SystemExit) as caught:
        results(out, "--methods", "linear")
    assert caught.value.code == 130
    found = json.loads(out.read_text())
    assert not found["finished"]
    assert [(row["position"], row["rounds"]) for row in found["cells"]] == [(16, 1), (64, 1)]


def test_an_interrupted_stream(out, monkeypatch):
    def put(watch, tokens, put=decode.Watch.put):
        put(watch, tokens)
        if watch.tokens == 18:
            raise KeyboardInterrupt

    monkeypatch.setattr(decode.Watch, "put", put)
    with pytest.raises(SystemExit):
        results(out, "--methods", "linear", "--stream", "100")
    found = json.loads(out.read_text())
    assert len(found["cells"]) == 2
    assert [mark["tokens"] for mark in found["stream"]["marks"]] == [0, 10, 18]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--positions", "16,x"], "whole numbers"),
        (["--rounds", "0"], "at least 1"),
        (["--out", "/nowhere/decode.json"], "directory that exists"),
    ],
)
def test_bad_arguments(arguments, reason, capsys):
    with pytest.raises(SystemExit):
        decode.main([*TINY, *arguments])
    assert reason in capsys.readouterr().err


def test_a_method_that_cannot_decode():
    with pytest.raises(SystemExit, match="nystrom cannot do this"):
        decode.main([*TINY, "--methods", "nystrom"])
