"""An attention map as text for the terminal, and as a PNG or SVG file.

A map larger than the picture is reduced: a cell shows whether any of its pairs attends, or their mean weight.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor

from subquad.errors import InputError, load_extra
from subquad.report.attention_map import AttentionMap
from subquad.runs.files import write_atomically

_ENDINGS = (".png", ".svg")
_TERMINAL_CELLS, _FILE_CELLS = 64, 128
_FILE_SIDE = 360  # pixels, approximately
_WHITE, _BLUE, _RED = (255, 255, 255), (8, 81, 156), (165, 15, 21)


@dataclass(frozen=True, eq=False)
class _Cells:
    """The matrices of a map, reduced to at most `most` x `most` cells."""

    step: int  # a cell is step x step pairs
    panels: list[tuple[str, Tensor]]
    limit: float  # the weight at the end of the colour scale
    is_signed: bool

    @staticmethod
    def of(shown: AttentionMap, most: int) -> _Cells:
        least = math.ceil(shown.length / most)
        step = next((s for s in range(least, 2 * least) if shown.length % s == 0), least)
        pool = F.max_pool2d if shown.exact is None else F.avg_pool2d
        panels = [(label, pool(weights[None], step, ceil_mode=True)[0]) for label, weights in shown.panels]
        # With the largest weight, such as one in the first rows of a causal map, the rest would be pale.
        limit = max(cells.abs().flatten().quantile(0.99).item() for _, cells in panels) or 1.0
        return _Cells(step, panels, limit, any(cells.min() < -1e-6 * limit for _, cells in panels))

    def caption(self, shown: AttentionMap) -> list[str]:
        lines = shown.caption
        if shown.exact is not None:
            lines.append(
                f"The colour scale ends at a weight of {self.limit:.2g}{'; red is below zero' if self.is_signed else ''}."
            )
        if self.step > 1:
            shows = "filled if any of them attends" if shown.exact is None else "their mean weight"
            lines.append(f"A cell is {self.step} x {self.step} pairs, {shows}.")
        return lines


def render(shown: AttentionMap, console: Console) -> RenderableType:
    """The map for a terminal, two rows per character: queries run downwards, keys to the right."""
    columns = min(2, len(shown.panels))
    cells = _Cells.of(shown, max(1, min(_TERMINAL_CELLS, console.width // columns - 3)))
    grid = Table.grid(padding=(0, 1, 0, 0))
    drawn = [
        Group(Text(label), Panel.fit(_text(c / cells.limit, shown, console), box=box.SQUARE, padding=0))
        for label, c in cells.panels
    ]
    for i in range(0, len(drawn), columns):
        grid.add_row(*drawn[i : i + columns])
    return Group(Text(shown.title, style="bold"), grid, Text("\n".join(cells.caption(shown)), style="dim"))


def _text(cells: Tensor, shown: AttentionMap, console: Console) -> Text:
    has_shades_of_colour = console.color_system in ("256", "truecolor") and not console.no_color
    glyph = _half_block if shown.exact is None else _two_colours if has_shades_of_colour else _shade
    rows = F.pad(cells, (0, 0, 0, len(cells) % 2)).tolist()
    lines = [Text.assemble(*map(glyph, top, bottom)) for top, bottom in zip(rows[::2], rows[1::2], strict=True)]
    return Text("\n").join(lines)


def _half_block(top: float, bottom: float) -> tuple[str, str]:
    return " ▄▀█"[2 * (top > 0) + (bottom > 0)], ""


def _two_colours(top: float, bottom: float) -> tuple[str, str]:
    return "▀", f"{_css(_colour(top))} on {_css(_colour(bottom))}"


def _shade(top: float, bottom: float) -> tuple[str, str]:
    return " ░▒▓█"[min(4, int((abs(top) + abs(bottom)) / 2 * 5))], ""


def _colour(x: float) -> tuple[int, ...]:
    """From white at 0 to blue at 1 and red at -1."""
    end, part = (_BLUE if x > 0 else _RED), min(1.0, abs(x))
    return tuple(round(w + (e - w) * part) for w, e in zip(_WHITE, end, strict=True))


def _css(colour: tuple[int, ...]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def small_pictures(shown: AttentionMap, most: int) -> tuple[list[tuple[str, bytes]], list[str]]:
    """Each matrix with its label as a PNG, one pixel per cell and at most `most` x `most`; and the caption."""
    cells = _Cells.of(shown, most)
    return [(label, _png((matrix / cells.limit).tolist())) for label, matrix in cells.panels], cells.caption(shown)


def _png(rows: list[list[float]]) -> bytes:
    """Rows of weights from -1 to 1 as a PNG: 8 bits, RGB, no filter."""
    lines = b"".join(b"\0" + bytes(channel for x in row for channel in _colour(x)) for row in rows)
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    chunks = [struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def save(shown: AttentionMap, path: str | os.PathLike[str]) -> None:
    """Write the map atomically as PNG or SVG, by the ending of `path`."""
    path = Path(path)
    if path.suffix.lower() not in _ENDINGS:
        raise InputError(f"the file of a picture must end in {' or '.join(_ENDINGS)}; got {str(path)!r}. Rename it.")
    picture = _rendered(_chart(shown), path.suffix.lower()[1:])
    try:
        write_atomically(path, picture)
    except OSError as error:
        raise InputError(
            f"a picture must be written to a writable directory; got {str(path)!r}: {error.strerror}. Choose another."
        ) from error


def _rendered(chart: Any, format: str) -> bytes:
    if format == "svg":
        text = io.StringIO()
        chart.save(text, format=format)
        return text.getvalue().encode()
    data = io.BytesIO()
    chart.save(data, format=format, scale_factor=2)
    return data.getvalue()


def _chart(shown: AttentionMap) -> Any:
    alt, _ = load_extra("report", "a picture in a file", "altair", "vl_convert")  # altair needs vl_convert for files
    cells = _Cells.of(shown, _FILE_CELLS)
    colour = alt.value(_css(_BLUE)) if shown.exact is None else _colours(alt, cells)
    across, down = (alt.Scale(domain=ends, nice=False) for ends in ([0, shown.length], [shown.length, 0]))
    pixels = max(1, round(_FILE_SIDE / len(cells.panels[0][1]))) / cells.step  # per token; an integer per cell leaves no seams
    charts = [
        alt.Chart(alt.InlineData(_table(matrix, cells.step, shown.length), format=alt.CsvDataFormat(type="csv")), title=label)
        .mark_rect(aria=False)  # no label for every cell
        .encode(
            x=alt.X("j:Q", title="key j", scale=across, axis=alt.Axis(grid=False)),
            x2="j2:Q",
            y=alt.Y("i:Q", title="query i", scale=down, axis=alt.Axis(grid=False)),
            y2="i2:Q",
            color=colour,
        )
        .properties(width=pixels * shown.length, height=pixels * shown.length)
        for label, matrix in cells.panels
    ]
    title = alt.TitleParams(shown.title, subtitle=cells.caption(shown), anchor="start", fontSize=15, subtitleFontSize=12)
    return alt.concat(*charts, columns=2, title=title).resolve_scale(color="shared").configure(background="white")


def _colours(alt: Any, cells: _Cells) -> Any:
    ends = [-cells.limit, 0, cells.limit] if cells.is_signed else [0, cells.limit]
    shades = [_css(_RED), _css(_WHITE), _css(_BLUE)][-len(ends) :]
    scale = alt.Scale(domain=ends, range=shades, interpolate="rgb", clamp=True)
    return alt.Color("weight:Q", scale=scale, legend=alt.Legend(gradientLength=200))


def _table(matrix: Tensor, step: int, length: int) -> str:
    """CSV, because altair checks records one by one: a row per cell, with its edges in tokens; white cells are left out."""
    edges = [*range(0, length, step), length]
    rows = [f"{edges[i]},{edges[i + 1]},{edges[j]},{edges[j + 1]},{matrix[i, j].item()}" for i, j in matrix.nonzero().tolist()]
    return "\n".join(["i,i2,j,j2,weight", *rows])
