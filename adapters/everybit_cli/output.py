"""Output of all commands: their options for it, their results, and tables for terminals of any width."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

LONGEST_NAME = 12
"""Characters of a row's name that are not broken to make room for numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Options of every command."""

    json: bool = False
    """Print the results as JSON on standard output; the table and the progress then go to standard error."""

    quiet: bool = False
    """Print neither table nor progress. Errors, and the results of --json, are still printed."""


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a command.

    Args:
        data: The results as data, for ``--json``.
        exit_code: The exit code of the process.
    """

    data: dict[str, Any]
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class Sheet:
    """Rows of text under headings.

    Args:
        headings: Of the columns; the first column is the row's name. A heading may have two lines; a hyphen at the end of the first is one
            of division, and leaves with the break.
        rows: A row has as many cells as there are headings, or one cell, which is a heading for the rows below it.
        caption: Printed below.
    """

    headings: Sequence[str]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    caption: str = ""


def counted(number: int, noun: str) -> str:
    """Return a number and a noun, which has an s but for one: ``1 rank``, ``8 ranks``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def show(sheet: Sheet, console: Console) -> None:
    """Print a table, or a block of lines for each row if the terminal is too narrow for the table."""
    if _width(sheet) <= console.width:
        console.print(_table(sheet), highlight=False)
    else:
        _print_blocks(sheet, console)
    if sheet.caption:
        console.print(Text(sheet.caption, style="italic"), highlight=False)


def _width(sheet: Sheet) -> int:
    """Columns of a terminal that the table needs. Long names of rows are broken, numbers never."""
    columns = zip(sheet.headings, *(row for row in sheet.rows if len(row) > 1), strict=True)
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    return min(widths[0], LONGEST_NAME) + sum(widths[1:]) + 2 * (len(widths) - 1)


def _table(sheet: Sheet) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(sheet.headings[0], overflow="fold", vertical="bottom")
    for heading in sheet.headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for row in sheet.rows:
        table.add_row(Text(row[0], style="bold" if len(row) == 1 else ""), *map(Text, row[1:]))
    return table


def _print_blocks(sheet: Sheet, console: Console) -> None:
    names = [" ".join(re.sub(r"-\n|(?<=[/_])\n", "", heading).split()) for heading in sheet.headings]
    for row in sheet.rows:
        console.print(Text(row[0], style="bold"), highlight=False)
        lines = Table.grid(padding=(0, 1, 0, 0))
        for name, cell in zip(names[1:], row[1:], strict=False):
            if cell:
                lines.add_row(Text(name), Text(cell))
        if len(row) > 1:
            console.print(Padding(lines, (0, 0, 0, 2)), highlight=False)
