import json
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import subquad as sq
from subquad import cli
from subquad.cli import app, terminal
from subquad.cli.generate import for_terminal
from subquad.cli.terminal import as_text, print_table
from subquad.report.tables import Cell, Table


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *args: CliRunner().invoke(app, args)


@pytest.fixture
def refused(monkeypatch, capsys):
    """What a refused command line says."""

    def message(*args):
        monkeypatch.setattr(sys, "argv", ["subquad", *args])
        monkeypatch.setenv("COLUMNS", "1000")
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code == 2
        return capsys.readouterr().err

    return message


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


def test_list_shows_the_kernels_in_80_columns(run):
    done = run("list", "--kernels", "--causal")
    assert done.exit_code == 0, done.output
    assert all(name in done.stdout for name in sq.methods(is_causal=True))
    assert torch.backends.cpu.get_cpu_capability() in done.stdout
    assert "kernelized" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_list_says_why_there_are_no_kernels(run):
    with sq.ops.disabled():
        found = json.loads(run("list", "--kernels", "--cross", "--decode", "--json").stdout)
    assert [record["name"] for record in found["mechanisms"]] == sq.methods(cross=True, decode=True)
    linear = next(record for record in found["mechanisms"] if record["name"] == "linear")
    [operator] = linear["operators"]
    assert operator["operator"] == "subquad::kernelized"
    assert operator["body"] == "pytorch"
    assert "turned off" in operator["reasons"][0]
    assert (found["file"] is None) == (found["why_missing"] is not None)


@pytest.mark.parametrize(
    "example",
    [
        "subquad list --causal --decode",
        "subquad list --kernels",
        "subquad show performer --length 64 --out performer.png",
        "subquad advise --length 4096 --causal --decode",
        "subquad train digits --method linear,softmax --epochs 1 --out digits",
    ],
)
def test_help_has_an_example_that_works(run, example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = example.split()[1:]
    assert f"Example: {example}" in run(command[0], "--help").stdout
    assert run(*command).exit_code == 0


DIRECTIONS = [(name, []) for name in sq.methods()] + [(name, ["--causal"]) for name in sq.methods(is_causal=True)]


@pytest.mark.parametrize(("name", "direction"), DIRECTIONS)
def test_show_draws_every_method_in_80_columns(run, name, direction):
    done = run("show", name, *direction)
    assert done.exit_code == 0
    assert done.stdout.startswith(f"{name}, ")
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_registered_mechanism_is_listed_and_shown(run, third_party):
    assert "checked_squares" in run("list").stdout
    assert run("show", "checked_squares").stdout.startswith("checked_squares, ")


def test_show_json_is_the_figures(run, tmp_path):
    out = tmp_path / "a.svg"
    facts = json.loads(run("show", "softmax", "--causal", "--length", "7", "--heads", "2", "--json", "--out", str(out)).stdout)
    assert facts == {
        "method": "softmax",
        "options": {},
        "length": 7,
        "is_causal": True,
        "seed": 0,
        "share_of_pairs": 28 / 49,
        "share_of_causal_pairs": 1.0,
        "relative_error": None,
        "groups": [{"heads": [0, 1], "share_of_pairs": 28 / 49, "relative_error": None}],
        "out": str(out),
    }
    assert out.read_text().startswith("<svg")


def test_show_says_where_the_file_is(run, tmp_path):
    out = tmp_path / ("long" * 20 + ".png")
    assert f"Written to {out}." in run("show", "linear", "--length", "3", "--out", str(out)).stdout


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("0.5", 0.5),
        ("1e-3", 1e-3),
        ("True", True),
        ("false", False),
        ("None", None),
        ("1,2,4", (1, 2, 4)),
        ("2,", (2,)),
    ]
    + [(word, word) for word in ("none", "favor++", "split", "", "[1]", "{}", "{[]}", "1 2", "b'x'")],
)
def test_values_of_options(text, value):
    read = terminal._value(text)
    assert read == value
    assert type(read) is type(value)


def test_show_takes_options(run):
    options = ["--option", "kind=favor++", "--option", "features=32", "--option", "p=0.5"]
    facts = json.loads(run("show", "performer", "--length", "5", "--json", *options).stdout)
    assert facts["options"] == {"kind": "favor++", "features": 32, "p": 0.5}


@pytest.mark.parametrize(
    ("args", "rule"),
    [
        (["perfomer"], "did you mean 'performer'"),
        (["performer", "--length", "0"], "length must be an integer of at least 1; got 0"),
        (["performer", "--length", "5000"], "at most 4096 tokens; got 5000"),
        (["performer", "--option", "feature=8"], "has no option 'feature'; did you mean 'features'"),
        (["performer", "--option", "features=many"], "Performer.features must be an integer of at least 1; got 'many'"),
        (["performer", "--option", "features"], "an option must be name=value, each name once; got 'features'"),
        (["performer", "--option", "seed=1", "--option", "seed=2"], "each name once; got 'seed=2'"),
        (["linear", "--length", "3", "--out", "picture.gif"], "must end in .png or .svg; got 'picture.gif'"),
        (
            ["linear", "--length", "3", "--out", "no/such/place.svg"],
            "written to a writable directory; got 'no/such/place.svg'",
        ),
    ],
)
def test_show_refuses(refused, args, rule, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert rule in refused("show", *args)
    assert not list(tmp_path.iterdir())


def test_show_without_the_extra_refuses_files_only(refused, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "altair", None)
    assert run("show", "linear", "--length", "3").exit_code == 0
    assert "pip install altair vl-convert-python" in refused("show", "linear", "--length", "3", "--out", "a.png")


def test_version(run):
    assert run("--version").stdout == f"subquad {sq.__version__}\n"


def test_unknown_command(run):
    assert run("lst").exit_code == 2


def test_refusals_are_a_message_and_exit_code_2(monkeypatch, capsys):
    def refuse():
        raise sq.InputError("the rule; what came; what to do")

    monkeypatch.setattr(sys.modules[cli.main.__module__], "app", refuse)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "error: the rule; what came; what to do" in capsys.readouterr().err


def test_text_of_files_is_printed_and_not_obeyed(capsys):
    console = Console(highlight=False, force_terminal=True, color_system=None)
    console.print(as_text("[/red] [bold]x \x1b]0;title\x07\x9b31m"), end="")
    assert capsys.readouterr().out == "[/red] [bold]x \ufffd]0;title\ufffd\ufffd31m"
    print_table(console, Table("t", "", ["[/a] \x1b[1m"], [[Cell("[/b] \x1b[1m")]]))
    printed = capsys.readouterr().out
    assert "[/a]" in printed
    assert "[/b]" in printed
    assert "\x1b" not in printed


@pytest.mark.parametrize("is_terminal", [True, False])
def test_generated_text_does_not_control_a_terminal(monkeypatch, is_terminal):
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: is_terminal))
    assert for_terminal("a\tb\n\x1b]0;title\x07") == ("a\tb\n\ufffd]0;title\ufffd" if is_terminal else "a\tb\n\x1b]0;title\x07")
