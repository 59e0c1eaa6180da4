"""Markdown tables with padded columns, which also read well as plain text."""

from collections.abc import Sequence

MIN_WIDTH = 3
"""Length of the shortest rule that Markdown takes for a column."""


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first column is text and whose others are numbers, aligned to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(MIN_WIDTH, *(len(line[column]) for line in lines)) for column in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [_padded(line, widths) for line in lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (padded[0], rule, *padded[1:])) + "\n"


def _padded(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *others = zip(cells, widths, strict=True)
    return [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
