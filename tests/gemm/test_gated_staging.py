"""Kernels stage gated results where TMA reads them in shared memory; no GPU is needed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sparse24_plans import GemmSparse24Descriptor
from sparse24_plans.gemm.schedules import wgmma_sp as schedules
from sparse24_plans.gemm.wgmma import result_box

from ..kernels.index_functions import Table, check_tables
from . import column_major_model as model

RESULTS = [("row", "s8"), *itertools.product(("row", "column"), ("bf16", "f32"))]


@pytest.mark.parametrize(
    ("order", "out", "tokens"),
    [
        (*result, tokens)
        for i, result in enumerate(RESULTS)
        for tokens in ((8, 64), (24, 32), (40, 16))[i % 3]
    ],
)
def test_gated_results_are_staged_where_tma_reads_them(order, out, tokens):
    element = "s8" if out == "s8" else "bf16"
    fields = {"element": element, "out_element": out, "y_order": order, "epilogue": "bias_swiglu"}
    desc = GemmSparse24Descriptor(n=tokens, m=64, k=64, **fields)
    schedule = schedules.WgmmaSpSchedule(1, 1, tokens)
    layouts = schedules.OperandLayouts.of(desc)
    box, step = result_box(desc, schedule, layouts), schedule.step_tokens(layouts)
    assert box.lines * box.pitch <= schedules._STAGED_BYTES // layouts.buffers // 2
    assert (box.lines, box.elements) == ((32, step) if order == "column" else (step, 32))
    addresses = model.addresses(box, desc.out_element.itemsize)
    of_token = addresses.T if order == "column" else addresses
    check_tables(
        "gemm/wgmma_sp/epilogue_store.cuh",
        model.defines(desc, schedule),
        Table("EpilogueStore<Config::Out>::staged_at(i0, i1)", of_token),
        Table("EpilogueStore<Config::Out>::gated_at(i0, 8 * i1, i2)", _of_threads(desc, of_token)),
    )


def _of_threads(desc: GemmSparse24Descriptor, addresses: np.ndarray) -> np.ndarray:
    """Return the addresses that threads use, from those of [tokens, outputs].

    The result is [threads, groups of 8 tokens, stores]. A warp has 8 outputs: lane 4g + t has the sums of
    output g and tokens 2t and 2t + 1. stmatrix takes from lane l the address of row l % 8 of the 8x8 matrix.
    """
    of_warp = addresses.reshape(-1, 8, 4, 8).transpose(2, 0, 1, 3)  # [warps, groups, tokens, outputs]
    if desc.out_element.itemsize == 2:
        of_row = of_warp[:, :, 0, :] if desc.y_order == "column" else of_warp[:, :, :, 0]
        of_lane = np.tile(of_row, 4)[..., None]
    else:
        pairs = of_warp.reshape(4, -1, 4, 2, 8)  # [warps, groups, t, i, g]
        of_lane = pairs.transpose(0, 1, 4, 2, 3).reshape(4, -1, 32, 2)
    return of_lane.transpose(0, 2, 1, 3).reshape(128, -1, of_lane.shape[-1])
