import json

import pytest
from typer.testing import CliRunner

import subquad as sq
from subquad import cli
from subquad.cli import app


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *args: CliRunner().invoke(app, args)


def test_list_shows_every_method_in_80_columns(run):
    done = run("list")
    assert done.exit_code == 0
    assert all(name in done.stdout for name in sq.methods())
    assert "arXiv:2009.14794" in done.stdout
    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_list_filters(run):
    names = [record["name"] for record in json.loads(run("list", "--causal", "--decode", "--json").stdout)]
    assert names == sq.methods(is_causal=True, decode=True)


def test_json_is_the_record(run):
    record = next(r for r in json.loads(run("list", "--json").stdout) if r["name"] == "linear")
    info = sq.info("linear")
    assert record["idea"] == info.idea
    assert record["refuses"] == dict(info.refuses)
    assert record["supports"] == list(info.supports)


def test_help_has_an_example(run):
    assert "Example: subquad list --causal --decode" in run("list", "--help").stdout


def test_version(run):
    assert run("--version").stdout == f"subquad {sq.__version__}\n"


def test_unknown_command(run):
    assert run("lst").exit_code == 2


def test_refusals_are_a_message_and_exit_code_2(monkeypatch, capsys):
    def refuse():
        raise sq.InputError("the rule; what came; what to do")

    monkeypatch.setattr(cli, "app", refuse)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "error: the rule; what came; what to do" in capsys.readouterr().err
