"""How tables of documents show values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import geometric_mean


def ratio(value: float | None) -> str:
    """A ratio, or a dash without one."""
    return "-" if value is None else f"{value:.2f}"


def mean(values: Sequence[float]) -> str:
    """The geometric mean."""
    return f"{geometric_mean(values):.2f}" if values else "-"


def with_range(values: Sequence[float]) -> str:
    """The geometric mean, and the least and the largest in brackets."""
    return f"{mean(values)} ({min(values):.2f}-{max(values):.2f})" if values else "-"


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)]
