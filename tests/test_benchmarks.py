"""The benchmarks measure every cell, refuse what disagrees, and keep what they have. Their timings are not tested."""

import json

import pytest
import torch
from benchmarks import decode, docs, generation, peers, roofline, steps
from benchmarks.implementations import Peer, Side, ours

import subquad as sq

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
    def put(watch, tokens, put=decode.StreamMonitor.put):
        put(watch, tokens)
        if watch.tokens == 18:
            raise KeyboardInterrupt

    monkeypatch.setattr(decode.StreamMonitor, "put", put)
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
        (["--out", "/nowhere/decode.json"], "in an existing directory"),
    ],
)
def test_bad_arguments(arguments, reason, capsys):
    with pytest.raises(SystemExit):
        decode.main([*TINY, *arguments])
    assert reason in capsys.readouterr().err


def test_a_method_that_cannot_decode():
    with pytest.raises(SystemExit, match="nystrom does not support this"):
        decode.main([*TINY, "--methods", "nystrom"])


SMALL = ["--peers", "transformers", "--lengths", "64", "--rounds", "1"]


@pytest.fixture
def compared(tmp_path):
    def compared(*arguments):
        out = tmp_path / "peers.json"
        peers.main([*SMALL, *arguments, "--out", str(out)])
        return json.loads(out.read_text())

    return compared


def stub(make, **options):
    return Peer("transformers", "stub", "linear", make, "ours", "theirs", **options)


def test_every_peer_of_a_package(compared):
    found = compared()
    assert found["finished"]
    assert found["left_out"] == {}
    assert set(found["versions"]) == {"transformers"}
    expected = {(p.name, c, w) for p in peers.PEERS if p.package == "transformers" for c in p.directions for w in peers.PASSES}
    assert {(r["peer"], r["is_causal"], r["pass"]) for r in found["time"]} == expected
    ran = [r for r in found["time"] if "failed" not in r]
    assert {r["method"] for r in ran} >= {"nystrom", "reformer"}
    for r in ran:
        low, high = r["times_peer_80_percent"]
        assert low <= r["times_peer"] <= high
        whole, net = r["peer_milliseconds"] / r["ours_milliseconds"], r["times_peer_without_projections"]
        assert r["times_peer"] == pytest.approx(whole, rel=0.01)
        assert net is None or net > 0
    failed = [r for r in found["time"] if r["method"] == "longformer"]
    assert all("multiple of 512" in r["failed"] for r in failed)
    shown = peers.section(found)
    assert "| `nystrom` | transformers, Nystromformer | no |" in shown
    assert "- `longformer`, transformers, Longformer, no global token, forward at 64: AssertionError" in shown


def test_what_is_not_installed_is_left_out_by_name(compared, monkeypatch):
    monkeypatch.setitem(peers.PACKAGES, "transformers", "transformers_of_nobody")
    found = compared("--methods", "nystrom")
    assert found["time"] == []
    assert "transformers_of_nobody" in found["left_out"]["transformers"]


def test_another_function_is_not_timed(compared, monkeypatch):
    def make(length, is_causal):
        mine, other = (ours(config, is_causal) for config in (sq.Linear(), sq.Taylor()))
        return mine, other

    monkeypatch.setattr(peers, "PEERS", (stub(make, same=(True,)),))
    rows = compared("--methods", "linear", "--passes", "forward")["time"]
    assert "times_peer" in rows[0]
    assert rows[1]["failed"].startswith("ValueError: not the same function")


def test_too_slow_a_peer_is_not_tried_again(compared, monkeypatch):
    calls = []

    def make(length, is_causal):
        mine = ours(sq.Linear(), is_causal)

        def slow(q, k, v):
            calls.append(length)
            return mine.call(q, k, v)

        return mine, Side(slow)

    monkeypatch.setattr(peers, "PEERS", (stub(make, directions=(False,)),))
    rows = compared("--methods", "linear", "--lengths", "32,64", "--limit", "0")["time"]
    assert all(r["failed"].startswith("TimeoutError") for r in rows)
    assert set(calls) == {32}


def test_projections_are_taken_off_both_sides():
    line = peers.Line(stub(None, directions=(False,)))
    line.seconds = {"ours": [3.0, 4.0], "ours_projections": [1.0, 2.0], "peer": [9.0, 11.0], "peer_projections": [1.0, 3.0]}
    found = peers.row(line, 64, False, "forward", [8.0, 8.0])
    assert found["times_peer"] == pytest.approx((9 / 3 + 11 / 4) / 2)
    assert found["times_peer_without_projections"] == 4
    line.seconds["ours_projections"] = [4.0, 5.0]
    assert peers.row(line, 64, False, "forward", [8.0, 8.0])["times_peer_without_projections"] is None


def test_memory_is_bounded_and_freed_again():
    with peers.bounded_memory():
        line = peers.Line(stub(None))
        peers.attempt(lambda line: torch.empty(2**46), line)
    assert "memory" in line.failed or "alloc" in line.failed
    torch.empty(2**20)


def test_the_docs_tables_are_written_between_their_marks(tmp_path):
    sections = {"one": lambda found: found["a"], "two": lambda found: found["a"] * 2}
    page = tmp_path / "page.md"
    for name in sections:
        (tmp_path / f"{name}.json").write_text('{"a": "new"}')
    text = "before\n<!-- made from benchmarks/{} -->\n{}\n<!-- end -->\nafter\n"
    old, new = (
        "".join(text.format(*pair) for pair in (("one.json", a), ("two.json", b))) for a, b in (("x", "y"), ("new", "newnew"))
    )
    page.write_text(old)
    assert docs.filled(page, sections, tmp_path) == new
    page.write_text(old + old)
    with pytest.raises(SystemExit, match=r"page\.md must have the marker"):
        docs.filled(page, sections, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lengths", "16,x"], "whole numbers"),
        (["--methods", "linear,nothing"], "got nothing"),
        (["--passes", "backward"], "got backward"),
        (["--peers", "nobody"], "got nobody"),
        (["--rounds", "0"], "at least 1"),
        (["--out", "/nowhere/peers.json"], "in an existing directory"),
    ],
)
def test_bad_arguments_to_peers(arguments, said, capsys):
    with pytest.raises(SystemExit):
        peers.main(arguments)
    assert said in capsys.readouterr().err


def test_a_share_of_the_limit_for_every_method(tmp_path):
    out = tmp_path / "roofline.json"
    roofline.main(["--lengths", "128", "--rounds", "2", "--out", str(out)])
    cells = {(c["method"], c["is_causal"]): c for c in json.loads(out.read_text())["cells"]}
    assert {m for m, _ in cells} == set(roofline.METHODS)
    assert all(c["share"] > 0 and c["limit_milliseconds"] > 0 for c in cells.values())
    assert cells["linear", True]["gigaflop"] == pytest.approx(8 * 128 * 4 * 64 * 64 / 1e9, abs=1e-3)
    assert cells["local", False]["gigaflop"] == pytest.approx(8 * 128 * 128 * 4 * 64 / 1e9, abs=1e-3)  # it sees all


def test_steps(tmp_path):
    out = tmp_path / "steps.json"
    arguments = ["--methods", "softmax,linear", "--positions", "8,40", "--most", "20", "--rounds", "2", "--steps", "3"]
    steps.main([*arguments, "--out", str(out)])
    found = json.loads(out.read_text())
    cells = {(c["method"], c["position"]): c for c in found["cells"]}
    assert set(cells) == {("softmax", 8), ("linear", 8), ("linear", 40)}
    assert cells["softmax", 8]["times_softmax"] == 1
    assert cells["linear", 8]["times_softmax"] > 0
    assert cells["linear", 40]["times_softmax"] is None
    assert cells["linear", 8]["state_bytes"] == cells["linear", 40]["state_bytes"]
    assert all(cell["microseconds_donated"] > 0 for cell in found["cells"])
    assert "state donated, at 8" in steps.section(found)
    assert "| `softmax` |" in steps.section(found)


def test_steps_of_every_mechanism_that_decodes(tmp_path):
    out = tmp_path / "steps.json"
    steps.main(["--positions", "8", "--rounds", "1", "--steps", "1", "--out", str(out)])
    names = {cell["method"] for cell in json.loads(out.read_text())["cells"]}
    assert names == {*sq.methods(is_causal=True, decode=True), "sparse_strided", "sparse_fixed"}


def test_generation_beside_llama(tmp_path):
    out = tmp_path / "generation.json"
    sizes = ["--layers", "1", "--hidden", "16", "--intermediate", "24", "--heads", "2"]
    generation.main([*sizes, "--positions", "5,9", "--rounds", "1", "--tokens", "2", "--out", str(out)])
    cells = json.loads(out.read_text())["cells"]
    assert {(c["model"], c["position"]) for c in cells} == {(m, p) for m in ("llama", "eager", "compiled") for p in (5, 9)}
    assert all(c["times_llama"] == 1 for c in cells if c["model"] == "llama")
    assert all(c["tokens_per_second"] > 0 for c in cells)
