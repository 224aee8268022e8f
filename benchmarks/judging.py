"""A bound on a kind of record, and the values of a record that bounds hold.

A value is a ratio of microseconds, a share, or a figure of a record by itself; means are geometric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any

from sparse24_plans.bench.record import Record

Row = Mapping[str, Any]
Values = list[tuple[str, float]]
"""Cells by a short name, each with its value."""
FEW, MIDDLE, MANY, ALL = (1, 64), (65, 512), (513, 8192), (1, 8192)
"""Ranges of tokens."""


@dataclass(frozen=True)
class Bound:
    """A bound on a kind of record. A bound without a limit is only shown."""

    about: str
    values: Callable[[Record], Values]
    least: float | None = None
    most: float | None = None
    on_the_mean: bool = False
    """Whether the mean is bounded, or each cell."""


@dataclass(frozen=True)
class Verdict:
    """The comparison of a record with a bound. Every field is None if the record has no such cell."""

    bound: Bound
    mean: float | None = None
    worst: float | None = None
    at: str | None = None

    @property
    def figure(self) -> float | None:
        """The mean or the worst value, whichever the bound limits."""
        return self.mean if self.bound.on_the_mean else self.worst

    @property
    def is_missed(self) -> bool:
        bound, figure = self.bound, self.figure
        if figure is None:
            return False
        below = bound.least is not None and figure < bound.least
        return below or (bound.most is not None and figure > bound.most)


def judged(bound: Bound, record: Record) -> Verdict:
    """The mean and the worst cell of the bound's values."""
    values = bound.values(record)
    if not values:
        return Verdict(bound)
    worst = max if bound.most is not None else min
    at, value = worst(values, key=lambda one: one[1])
    found = [each for _, each in values]
    return Verdict(bound, geometric_mean(found) if min(found) > 0 else None, value, at)


# Values -------------------------------------------------------------------------------------------


def cell_of(row: Row) -> str:
    """A row's short name."""
    names: list[str] = [row[key] for key in ("op", "direction", "epilogue", "kind", "method") if key in row]
    if "m" in row:
        names.append(f"{row['m']}x{row['k']}")
    if "n" in row:
        names.append(f"N {row['n'] * row.get('tokens', 1)}")
    if "density" in row:
        names.append(f"{row['block']}: {row['density']:.0%}")
    return " ".join(names)


def chosen(rows: Iterable[Row], span: tuple[int, int] = ALL, /, **fields: Any) -> Iterator[Row]:
    """The rows with these fields (a tuple gives alternatives) and n in the span."""
    for row in rows:
        given = ((row.get(name), wanted) for name, wanted in fields.items())
        has_all = all(has in one if isinstance(one, tuple) else has == one for has, one in given)
        if has_all and span[0] <= row.get("n", 1) <= span[1]:
            yield row


def ratios(
    part: str, over: str, under: str = "us", *, span: tuple[int, int] = ALL, **fields: Any
) -> Callable[[Record], Values]:
    """``over / under`` of each row of a list that has both."""

    def values(record: Record) -> Values:
        rows = chosen(record[part], span, **fields)
        return [(cell_of(row), row[over] / row[under]) for row in rows if row.get(over) and row.get(under)]

    return values


def figure(part: str, name: str, **fields: Any) -> Callable[[Record], Values]:
    """A figure of each row of a list by itself."""
    return lambda record: [(cell_of(row), row[name]) for row in chosen(record[part], **fields)]


def expert_ratios(products: Iterable[Row], element: str) -> Iterator[tuple[Row, float, float]]:
    """Grouped products with a dense time: row, an active expert's mean tokens, and dense time over ours."""
    for row in chosen(products, element=element):
        if row["dense_us"]:
            yield row, row["tokens"] / row["active_experts"], row["dense_us"] / row["us"]


least_mean = partial(Bound, on_the_mean=True)
