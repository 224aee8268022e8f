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
    return 4 if units <= 16 else 8 if units <= 64 else 16


def entries_of(block_units: int, count: int, share: int) -> range:
    """The entries of a share's units, in the order in which they are multiplied."""
    return range(share // block_units, count, shares_of(count * block_units) // block_units)


def sums_of(warps: int, block_units: int, count: int) -> list[dict[str, list[tuple[int, int]]]]:
    """What each slot holds in the end: the units of the share that was stored, and of the one added to it."""
    shares, slots = shares_of(count * block_units), {}
    half = shares // 2

    def units(share: int) -> list[tuple[int, int]]:
        return [(entry, share % block_units) for entry in entries_of(block_units, count, share)]

    for warp in range(warps):
        for share in range(warp, shares, warps):
            if shares > warps and share >= half:  # the warp has stored the lower share itself
                assert (share - half) % warps == warp
            slots.setdefault(share % half, {})["upper" if share >= half else "lower"] = units(share)
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
    for count in counts:
        shares = shares_of(count * block_units)
        found = [entries_of(block_units, count, share) for share in range(shares)]
        one = f"ShareUnits<{block_units}>(100, {count}, i0, {shares})"
        tables.append(Table(f"{one}.count()", [len(entries) for entries in found]))
        entries = np.full((shares, at), -1)
        for share, some in enumerate(found):
            entries[share, : len(some)] = 100 + np.array(some[:at])
        tables.append(Table(f"{one}.entry_of(i1)", entries))
    check_tables(HEADER, {}, *tables)
