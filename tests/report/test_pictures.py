"""Pictures: what stands in the terminal, and files that are whole or not there."""

import os
import sys
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

import subquad as sq
from subquad.report import attention_map, pictures, render, save


def printed(shown, *, width=80, **options):
    console = Console(width=width, **options)
    with console.capture() as capture:
        console.print(render(shown, console))
    return capture.get()


def test_a_pattern_in_half_blocks():
    lines = printed(attention_map("softmax", length=5, is_causal=True)).splitlines()
    assert [line.strip() for line in lines[2:7]] == ["┌─────┐", "│█▄   │", "│███▄ │", "│▀▀▀▀▀│", "└─────┘"]
    assert lines[0] == "softmax, 5 tokens, causal"
    assert "Pairs that attend: 60.0% of all, 100.0% of the causal ones." in lines


def test_a_large_pattern_is_reduced_and_says_so():
    text = printed(attention_map("softmax", length=512, is_causal=True))
    assert "A cell is 8 x 8 pairs, filled if any of them attends." in text
    assert f"│█▄{' ' * 62}│" in text.splitlines()[3]


@pytest.mark.parametrize("length", [1, 2, 37, 64, 127, 300])
@pytest.mark.parametrize("width", [20, 80, 200])
@pytest.mark.parametrize("name", ["softmax", "rfa", "plain"])
def test_the_terminal_is_never_too_narrow(name, width, length):
    picture = [line for line in printed(attention_map(name, length=length), width=width).splitlines() if line[:1] in "┌│└"]
    assert picture
    assert all(line.rstrip()[-1] in "┐│┘" for line in picture)
    assert max(map(len, picture)) <= width


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"color_system": "truecolor", "force_terminal": True, "no_color": True},
        {"color_system": "standard", "force_terminal": True, "no_color": False},
    ],
)
def test_weights_are_shades_where_colours_are_few(options):
    text = printed(attention_map("linear", length=16, is_causal=True), **options)
    assert {*"░█"} <= {*text}
    assert "▀" not in text


@pytest.mark.parametrize("colours", ["256", "truecolor"])
def test_weights_are_colours_where_there_are_many(colours):
    text = printed(attention_map("plain", length=16, is_causal=True), color_system=colours, force_terminal=True, no_color=False)
    assert "▀" in text
    assert not {*"░▒▓█"} & {*text}
    assert "red is below zero" in text


def test_colours_run_from_white_to_blue_and_red():
    assert [pictures._css(pictures._colour(x)) for x in (0.0, 1.0, 7.0, -1.0)] == ["#ffffff", "#08519c", "#08519c", "#a50f15"]


@pytest.mark.parametrize("name", ["softmax", "plain", "linear"])
def test_files_are_what_their_ending_says(name, tmp_path):
    shown = attention_map(name, length=17, is_causal=True)
    save(shown, tmp_path / "a.png")
    save(shown, tmp_path / "b.SVG")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    svg = ElementTree.fromstring((tmp_path / "b.SVG").read_text())
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    words = " ".join(svg.itertext())
    assert all(part in words for part in ("key j", "query i", shown.title, shown.caption[0], shown.groups[0].label))
    assert sorted(os.listdir(tmp_path)) == ["a.png", "b.SVG"]


def test_queries_run_downwards_in_a_square():
    (panel,) = pictures._chart(attention_map("softmax", length=3)).to_dict()["concat"]
    assert panel["encoding"]["x"]["scale"]["domain"] == [0, 3]
    assert panel["encoding"]["y"]["scale"]["domain"] == [3, 0]
    assert panel["width"] == panel["height"]


def test_cells_have_their_edges_and_weights():
    table = pictures._table(torch.tensor([[0.5, 0.0], [0.25, -1.0]]), step=4, length=7)
    assert table.splitlines() == ["i,i2,j,j2,weight", "0,4,0,4,0.5", "4,7,0,4,0.25", "4,7,4,7,-1.0"]


def test_a_cell_of_weights_is_their_mean_and_the_last_may_be_smaller():
    shown = attention_map("linear", length=131)
    cells = pictures._Cells.of(shown, 128)
    weights = shown.groups[0].weights
    assert cells.step == 2
    assert cells.panels[0][1].shape == (66, 66)
    torch.testing.assert_close(cells.panels[0][1][3, 5], weights[6:8, 10:12].mean())
    torch.testing.assert_close(cells.panels[0][1][65, 5], weights[130:, 10:12].mean())


def test_signed_weights_have_a_scale_with_two_ends():
    def domain(name):
        panel = pictures._chart(attention_map(name, length=16)).to_dict()["concat"][0]
        return panel["encoding"]["color"]["scale"]["domain"]

    low, middle, high = domain("plain")
    assert (low, middle) == (-high, 0)
    assert domain("linear")[0] == 0
    assert len(domain("linear")) == 2


def test_an_existing_file_is_replaced(tmp_path):
    (tmp_path / "a.svg").write_text("old")
    save(attention_map("linear", length=3), tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("name", ["a.jpg", "png", "a.png.gz"])
def test_other_endings_are_refused(name, tmp_path):
    with pytest.raises(sq.InputError, match=r"must end in \.png or \.svg; got"):
        save(attention_map("linear", length=3), tmp_path / name)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "why"), [("nowhere/a.svg", "No such file"), ("file/a.svg", "Not a directory"), ("full.svg", "Is a directory")]
)
def test_a_place_that_cannot_be_written(name, why, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "full.svg").mkdir()
    with pytest.raises(sq.InputError, match=rf"written to a writable directory; got .*{name}': {why}"):
        save(attention_map("linear", length=3), tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["file", "full.svg"]


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(source, target):
        raise OSError(28, "No space left on device")

    (tmp_path / "a.svg").write_text("old")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(sq.InputError, match="No space left"):
        save(attention_map("linear", length=3), tmp_path / "a.svg")
    assert os.listdir(tmp_path) == ["a.svg"]
    assert (tmp_path / "a.svg").read_text() == "old"


@pytest.mark.parametrize("missing", ["altair", "vl_convert"])
def test_a_missing_extra_says_what_to_install(missing, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    shown = attention_map("linear", length=3)
    with pytest.raises(sq.MissingExtraError, match=rf"subquad\[report\]; {missing} is not installed.*pip install altair"):
        save(shown, tmp_path / "a.png")
    assert printed(shown)
    assert not os.listdir(tmp_path)
