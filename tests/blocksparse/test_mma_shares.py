"""How warps of ``blocks_mma`` share a block row: a model of ``blocks_mma/shares.cuh``, and the sums."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans.blocksparse.schedules.blocks_mma import SLOTS

from ..kernels.index_functions import Table, check_tables

HEADER = "blocksparse/blocks_mma/shares.cuh"
WARPS, BLOCK_UNITS = (4, 8, 16), (1, 2, 4)
every_division = pytest.mark.parametrize("block_units", BLOCK_UNITS)


def shares_of(units: int) -> int:
    return 4 if units <= 16 else 8 if units <= 32 else 16


class Warp:
    """A warp, and the entries of its units in the order in which it takes them: -1 where there is none."""

    def __init__(self, warps: int, block_units: int, count: int, warp: int) -> None:
        self.shares, self.warp, self.warps = shares_of(count * block_units), warp, warps
        self.mine = range(warp, self.shares, warps)
        apart = self.shares // block_units
        of_share = [range(share // block_units, count, apart) for share in self.mine]
        self.length = len(of_share[0]) if of_share else 0
        self.entries = [one[at] if at < len(one) else -1 for one in of_share for at in range(self.length)]


def sums_of(warps: int, block_units: int, count: int) -> list[object]:
    """The sum of each slot as a term: a share is the list of its units, a pair is the sum of two terms."""
    shares, slots = shares_of(count * block_units), {}
    lines = [Warp(warps, block_units, count, warp) for warp in range(warps)]
    for one in lines:
        found = []  # the warp's shares, each when its last unit is multiplied
        for at, share in enumerate(one.mine):
            entries = one.entries[at * one.length : (at + 1) * one.length]
            found.append([(entry, share % block_units) for entry in entries if entry >= 0])
        if shares > warps:
            for share, term in zip(one.mine, found, strict=True):
                slot = share % (shares // 2)
                slots[slot] = term if share < shares // 2 else {"lower": slots[slot], "upper": term}
        elif one.warp < shares:
            slot, half = one.warp % (shares // 2), "upper" if one.warp >= shares // 2 else "lower"
            slots.setdefault(slot, {})[half] = found[0]
    assert sorted(slots) == list(range(shares // 2))
    assert len(slots) <= SLOTS
    return [slots[slot] for slot in range(shares // 2)]


@every_division
@given(count=st.integers(0, 40) | st.integers(0, 2000))
def test_sums_do_not_depend_on_the_number_of_warps(block_units, count):
    few, more, most = (sums_of(warps, block_units, count) for warps in WARPS)
    assert few == more == most
    units = [unit for slot in few for half in slot.values() for unit in half]
    assert sorted(units) == list(itertools.product(range(count), range(block_units)))
    assert all(half == sorted(half) for slot in few for half in slot.values())


@every_division
def test_the_kernel_has_the_models_shares(block_units):
    counts, at = (0, 1, 2, 3, 5, 8, 9, 16, 17, 31, 33, 70), 40
    tables = [Table("shares_of(i0)", [shares_of(units) for units in range(100)])]
    for warps, count in itertools.product(WARPS, counts):
        lines = [Warp(warps, block_units, count, warp) for warp in range(warps)]
        one = f"WarpShares<{warps}, {block_units}>(100, {count}, i0)"
        tables.append(Table(f"{one}.units", [len(line.entries) for line in lines]))
        tables.append(Table(f"{one}.length()", [line.length for line in lines]))
        entries = np.full((warps, at), -1)
        for line in lines:
            some = line.entries[:at]
            entries[line.warp, : len(some)] = [entry + 100 if entry >= 0 else -1 for entry in some]
        tables.append(Table(f"{one}.entry_of(i1)", entries))
        before = [[unit // line.length for unit in range(len(line.entries))] for line in lines]
        for line, wanted in zip(lines, before, strict=True):
            if wanted:
                name = one.replace("i0", str(line.warp))
                tables.append(Table(f"{name}.shares_before(i0)", wanted))
    check_tables(HEADER, {}, *tables)
