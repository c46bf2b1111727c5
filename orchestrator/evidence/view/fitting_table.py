"""The columns of a table, and how a terminal shows them: without lines, in no more than ASCII.

The report shows the same columns: orchestrator/evidence/report/html.py and markdown.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from isthmus.orchestrator.evidence.view.formats import UNKNOWN

T = TypeVar("T")
V = TypeVar("V")

_GAP = 2
_ASCII = str.maketrans({"→": "->", "±": "+-"})
"""Signs of our own, where the terminal has ASCII only."""
_MAX_TEXT_WIDTH = 28


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading, and a cell for each row."""

    heading: str
    cells: Sequence[str]
    is_text: bool = False
    """Left-aligned, and cut where it is very long; a number is never cut."""
    longest: int = _MAX_TEXT_WIDTH
    """Terminal cells of a text that is not cut."""

    @property
    def width(self) -> int:
        """Terminal cells that it takes."""
        width = max(cell_len(text) for text in (self.heading, *self.cells))
        return min(width, self.longest) if self.is_text else width


def figures(
    heading: str,
    rows: Iterable[T | None],
    value: Callable[[T], V | None],
    style: Callable[[V], str] = str,
    *,
    is_text: bool = False,
) -> Column:
    """Return a column of what is known of each row, in one of the styles of `formats`."""
    values = [None if row is None else value(row) for row in rows]
    cells = [UNKNOWN if each is None else style(each) for each in values]
    return Column(heading, cells, is_text=is_text)


def told(columns: Sequence[Column]) -> list[Column]:
    """Return the columns of which some row knows something."""
    return [each for each in columns if any(cell not in {UNKNOWN, ""} for cell in each.cells)]


def columns_of(
    headings: Sequence[str], rows: Sequence[Sequence[str]], num_text: int = 1
) -> list[Column]:
    """Return the columns of a table that is given by rows; the first `num_text` are words."""
    return [
        Column(heading, [row[at] for row in rows], is_text=at < num_text)
        for at, heading in enumerate(headings)
    ]


class FittingTable:
    """Renders the columns that fit, the first ones first, of those that are `told`."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = told(columns)

    @property
    def says_something(self) -> bool:
        """Whether there is anything beside the rows' names."""
        return len(self._columns) > 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        columns: list[Column] = []
        width = 0
        for column in self._columns:
            if options.ascii_only:
                shown = [cell.translate(_ASCII) for cell in column.cells]
                column = dataclasses.replace(column, cells=shown)
            width += column.width
            if columns and width > options.max_width:
                break
            width += _GAP
            columns.append(column)
            table.add_column(
                column.heading,
                justify="left" if column.is_text else "right",
                no_wrap=True,
                max_width=column.width,
            )
        for cells in zip(*(column.cells for column in columns), strict=True):
            table.add_row(*(Text(cell) for cell in cells))  # Text: a name may look like markup
        yield table
