"""How warps of ``blocks_mma`` share a block row: a model of ``blocks_mma/shares.cuh``, and the sums."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans.blocksparse.schedules.blocks_mma import SLOTS, shares_of

from ..kernels.index_functions import Table, check_tables

HEADER = "blocksparse/blocks_mma/shares.cuh"
WARPS, BLOCK_UNITS = (4, 8, 16), (1, 2, 4)
every_division = pytest.mark.parametrize("block_units", BLOCK_UNITS)


class Warp:
    """A warp: the entries of the units of each of its shares, and where these lie among its units."""

    def __init__(self, warps: int, block_units: int, round_units: int, count: int, warp: int) -> None:
        self.shares = shares_of(count * block_units)
        self.mine = range(warp, self.shares, warps)
        self.several = self.shares > warps
        apart = self.shares // block_units
        self.entries = [range(share // block_units, count, apart) for share in self.mine]
        self.length = max(map(len, self.entries), default=0)
        self.pitch = -(-self.length // round_units) * round_units
        self.units = self.pitch * len(self.mine) if self.several else self.length

    def in_order(self) -> list[int]:
        """The entry of each unit, -1 where there is none."""
        found = [-1] * self.units
        for at, some in enumerate(self.entries):
            found[at * self.pitch : at * self.pitch + len(some)] = some
        return found


def sums_of(warps: int, block_units: int, count: int) -> list[dict[str, list[tuple[int, int]]]]:
    """Return what each slot holds: the units of the share that was stored, and of the one added to it."""
    slots: dict[int, dict[str, list[tuple[int, int]]]] = {}
    half = shares_of(count * block_units) // 2
    for one in (Warp(warps, block_units, 4, count, warp) for warp in range(warps)):
        if one.several:  # the warp has stored the lower share itself
            assert {share % half for share in one.mine if share >= half} <= set(one.mine)
        for share, entries in zip(one.mine, one.entries, strict=True):
            units = [(entry, share % block_units) for entry in entries]
            slots.setdefault(share % half, {})["upper" if share >= half else "lower"] = units
    assert sorted(slots) == list(range(half))
    assert len(slots) <= SLOTS
    return [slots[slot] for slot in range(half)]


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
    counts, at = (0, 1, 2, 3, 5, 8, 9, 16, 17, 31, 33, 65, 70), 40
    tables = [Table("shares_of(i0)", [shares_of(units) for units in range(100)])]
    tables.append(Table("slices_of<4>(i0)", [min(max(-(-units // 128), 1), 4) for units in range(700)]))
    tables.append(Table("slices_of<1>(i0)", [1] * 300))
    for count, slices in itertools.product((5, 131), (1, 3, 4)):
        starts = [count * at // slices for at in range(slices + 1)]
        tables.append(Table(f"slice_start({count}, i0, {slices})", starts))
    for warps, round_units, count in itertools.product(WARPS, (1, 2, 8), counts):
        lines = [Warp(warps, block_units, round_units, count, warp) for warp in range(warps)]
        one = f"WarpShares<{warps}, {block_units}, {round_units}>::of(100, {count}, i0)"
        tables.append(Table(f"{one}.length", [line.length for line in lines]))
        tables.append(Table(f"{one}.pitch()", [line.pitch for line in lines]))
        tables.append(Table(f"{one}.units()", [line.units for line in lines]))
        entries = np.full((warps, at), -1)
        for warp, line in enumerate(lines):
            some = np.array(line.in_order()[:at], int)
            entries[warp, : len(some)] = np.where(some >= 0, some + 100, -1)
        tables.append(Table(f"{one}.entry_of(i1)", entries))
    check_tables(HEADER, {}, *tables)
