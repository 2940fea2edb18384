"""The benchmark of conversions: every row at every stage, what is done is kept, and the page says it. Nothing is timed here."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from benchmarks import converting, features, generated_text, pretrained, serving, studies
from benchmarks.pretrained import Pretrained

import subquad as sq
from subquad.conversion import Schedule
from tests.conversion import families

SHORT = Schedule(steps=2, every=1, held_out=0.5)


@pytest.fixture
def model():
    return families.model("llama").eval()


@pytest.fixture
def study(model):
    texts = [{"input_ids": torch.randint(3, families.WORDS, (2, 40))} for _ in range(4)]
    repair = studies.Repair(
        text=studies.Text("some tokens", lambda read, data, folder: texts),
        transfer=SHORT,
        finetune=studies.Finetune(schedule=SHORT, loss="distil", rank=2),
    )
    return replace(
        studies.STUDIES["stories15m"],
        name="tiny",
        title="A tiny model",
        load=lambda data: Pretrained(model, None),
        score=lambda read, data: {"nats": pretrained.nats(read.model, [batch["input_ids"][:1] for batch in texts])},
        rows={"softmax": sq.Softmax(), "local": sq.Local(window=3), "hedgehog": sq.Hedgehog()},
        repair=repair,
        longer={
            "hedgehog": replace(
                repair,
                align=studies.Changes(schedule=SHORT, rank=2, targets="all"),
                finetune=studies.Finetune(schedule=SHORT, loss="language", rank=2, targets="all"),
            )
        },
        unrepaired=("softmax",),
    )


@pytest.fixture
def run(monkeypatch, study, tmp_path):
    pytest.importorskip("peft")
    monkeypatch.setattr(converting, "STUDIES", {"tiny": study})

    def run(*more):
        out = tmp_path / "converting.json"
        converting.main(["--data", str(tmp_path), "--checkpoints", str(tmp_path / "kept"), "--out", str(out), *more])
        return json.loads(out.read_text())

    return run


def test_every_row_at_every_stage(run):
    found = run()["models"]["tiny"]
    assert {name: list(row["stages"]) for name, row in found["rows"].items()} == {
        "softmax": ["swapped"],
        "local": ["swapped", "finetune"],
        "hedgehog": ["swapped", "transfer", "align", "finetune"],
    }
    softmax, hedgehog = found["rows"]["softmax"]["stages"], found["rows"]["hedgehog"]["stages"]
    assert softmax["swapped"]["scores"]["nats"] == pytest.approx(found["original"]["nats"], abs=1e-5)
    assert softmax["swapped"]["error"] is None  # it is what it was
    assert hedgehog["swapped"]["error"] > hedgehog["transfer"]["error"] > 0
    assert hedgehog["transfer"]["step"] == 2
    learnt = {name: row["settings"].get("finetune", {}).get("targets") for name, row in found["rows"].items()}
    assert learnt == {"softmax": None, "local": "attention", "hedgehog": "all"}


def test_what_is_done_is_not_done_again(run, study, monkeypatch):
    first = run("--rows", "local")
    monkeypatch.setitem(converting.STUDIES, "tiny", replace(study, rows={**study.rows, "local": sq.Local(window=4)}))
    second = run("--rows", "local,softmax")
    assert list(second["models"]["tiny"]["rows"]) == ["local", "softmax"]
    assert second["models"]["tiny"]["rows"]["local"]["method"]["window"] == 4  # another row by now
    monkeypatch.setitem(converting.STUDIES, "tiny", replace(study, load=None, rows=converting.STUDIES["tiny"].rows))
    assert run("--rows", "local,softmax") == second != first


def test_the_page(run, study):
    found = run()
    text = converting.section(found)
    rows = found["models"]["tiny"]["rows"]
    assert text.startswith("### A tiny model")
    after = rows["hedgehog"]["stages"]["finetune"]["scores"]["nats"]
    [line] = [line for line in text.splitlines() if line.startswith("| `hedgehog` |")]
    assert f" | {after:.3f} | " in line
    [line] = [line for line in text.splitlines() if line.startswith("| `local(window=3)` |")]
    assert "|  |  |" in line  # nothing to transfer to, and not aligned
    assert all(line.count("|") == 9 for line in text.splitlines() if line.startswith("|"))
    assert "- `hedgehog`: repaired from some tokens; finetuning all maps at rank 2." in text


@pytest.mark.parametrize(
    ("more", "said"), [(["--only", "gpt"], "no model is called 'gpt'. Models: tiny"), (["--rows", "x"], "has no row 'x'")]
)
def test_what_is_not_there(run, capsys, more, said):
    with pytest.raises(SystemExit) as caught:
        run(*more)
    assert said in str(caught.value) + capsys.readouterr().err


@pytest.mark.parametrize("script", [converting, features, serving])
def test_real_text_is_asked_for(monkeypatch, capsys, script):
    monkeypatch.delenv("SUBQUAD_DATA", raising=False)
    with pytest.raises(SystemExit):
        script.main([])
    assert "pass --data DIR, or set SUBQUAD_DATA" in capsys.readouterr().err


def test_the_error_of_random_features_falls(monkeypatch, tmp_path):
    batches = [{"input_ids": torch.randint(3, families.WORDS, (4, 40))}]
    monkeypatch.setattr(pretrained, "minilm", lambda: Pretrained(families.model("bert").eval(), None))
    monkeypatch.setattr(pretrained, "sentences", lambda tokenizer, data: batches)
    out = tmp_path / "features.json"
    asked = ["--features", "8,512", "--divided", "1,8", "--draws", "2"]
    features.main(["--data", str(tmp_path), *asked, "--out", str(out)])
    found = json.loads(out.read_text())
    whole, smaller = (found["rows"][:2], found["rows"][2:])
    for few, many in (whole, smaller):
        assert max(many["errors"]) < min(few["errors"])
    assert smaller[0]["size"] == pytest.approx(whole[0]["size"] / 64, rel=1e-2)
    assert max(smaller[0]["errors"]) < min(whole[0]["errors"])
    lines = features.section(found).splitlines()
    assert any(line.startswith("Queries and keys divided by 8; the median") for line in lines)
    slopes = [float(line.split("|")[-2]) for line in lines if line.startswith("| 512 |")]
    assert len(slopes) == 2
    assert all(-1 < slope < -0.2 for slope in slopes)


def test_bytes_and_speed_at_the_end_of_a_text(monkeypatch, tmp_path, model):
    monkeypatch.setattr(pretrained, "smollm2", lambda: Pretrained(model, None))
    monkeypatch.setattr(pretrained, "war_and_peace", lambda data: "")
    monkeypatch.setattr(
        pretrained, "packed", lambda tokenizer, texts, length, batch: [{"input_ids": torch.full((1, length), 5)}]
    )
    rows = {"softmax": sq.Softmax(), "kernel": sq.Linear()}
    monkeypatch.setitem(serving.STUDIES, "smollm2", replace(studies.STUDIES["smollm2"], rows=rows))
    out = tmp_path / "serving.json"
    serving.main(["--data", str(tmp_path), "--position", "48", "--rounds", "3", "--tokens", "4", "--out", str(out)])
    found = json.loads(out.read_text())
    original, kernel = found["rows"]
    heads, channels, layers = 2, 4, 3
    assert original["bytes"] == 2 * 4 * heads * channels * layers * 48
    assert kernel["bytes"] < original["bytes"] / 4
    assert "| kernel | " in serving.section(found)


def test_what_a_model_tells_itself(model, tmp_path, monkeypatch):
    monkeypatch.setattr(generated_text, "PIECE", 4)
    read = Pretrained(model, SimpleNamespace(bos_token_id=1))
    first = generated_text.generate_text(read, 6, 12, tmp_path)
    assert first.shape == (6, 12)
    assert (first[:, 0] == 1).all()
    assert len({tuple(row) for row in first.tolist()}) == 6
    assert torch.equal(
        generated_text.generate_text(Pretrained(model, read.tokenizer), 5, 12, tmp_path), first[:5]
    )  # from what was written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generated-12-0.pt", "generated-12-1.pt"]


def test_what_a_model_tells_itself_is_drawn_from_its_distribution(model, tmp_path, monkeypatch):
    monkeypatch.setattr(generated_text, "PIECE", 20_000)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)  # far from uniform
        expected = model(torch.tensor([[1]])).logits[0, -1].softmax(-1)
    drawn = generated_text.generate_text(Pretrained(model, SimpleNamespace(bos_token_id=1)), 20_000, 2, tmp_path)[:, 1]
    shares = drawn.bincount(minlength=len(expected)) / len(drawn)
    assert expected.max() > 4 * expected.mean()
    assert (shares - expected).abs().max() < 5 * (expected.max() / len(drawn)) ** 0.5
