"""Gated results on their way out, as the kernels stage them in shared memory: models, without a GPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sparse24_plans import GemmSparse24Descriptor
from sparse24_plans.gemm.schedules import wgmma_sp as schedules
from sparse24_plans.gemm.wgmma import result_box

from . import column_major_model as model


def _stored_by_warps(desc: GemmSparse24Descriptor, tokens: int, results: np.ndarray) -> np.ndarray:
    """stage_gated and staged_at of kernels_cu/gemm/wgmma_sp/epilogue_store.cuh, written down again.

    ``results`` [32 outputs, tokens] as bits; what shared memory holds of them.
    """
    size, columns = desc.out_element.itemsize, desc.y_order == "column"
    box = result_box(desc, schedules.WgmmaSpSchedule(1, 1, tokens))
    shared = np.zeros(box.lines * box.pitch, np.uint8)
    chunks = box.pitch // 16

    def put(at: int, values: np.ndarray) -> None:
        assert at + values.nbytes <= shared.size
        shared[at : at + values.nbytes] = np.frombuffer(values.tobytes(), np.uint8)

    def staged_at(token: int, output: int) -> int:
        if columns:
            into = token * size
            return output * box.pitch + (into // 16 ^ output * chunks // 8 % chunks) * 16 + into % 16
        into = output % box.elements * size
        line = output // box.elements * box.lines + token
        return line * box.pitch + (into // 16 ^ token // (8 // chunks) % chunks) * 16 + into % 16

    for warp, first in itertools.product(range(4), range(0, results.shape[1], 8)):
        for lane in range(32):
            g, t = divmod(lane, 4)
            if size == 2 and lane < 8:  # the lane's line of an 8x8 matrix, 16 bytes
                if columns:
                    put(staged_at(first, 8 * warp + lane), results[8 * warp + lane, first : first + 8])
                else:
                    put(staged_at(first + lane, 8 * warp), results[8 * warp : 8 * warp + 8, first + lane])
            elif size != 2:
                for i in range(2):
                    token, output = first + 2 * t + i, 8 * warp + g
                    put(staged_at(token, output), results[output : output + 1, token])
    return shared


@pytest.mark.parametrize(
    ("order", "out"), [("row", "s8"), *itertools.product(("row", "column"), ("bf16", "f32"))]
)
@pytest.mark.parametrize("tokens", [8, 16, 24, 32, 40, 64])
def test_results_are_staged_as_the_copy_engine_reads_them(order, out, tokens):
    element = "s8" if out == "s8" else "bf16"
    fields = {"element": element, "out_element": out, "y_order": order, "epilogue": "bias_swiglu"}
    desc = GemmSparse24Descriptor(n=tokens, m=64, k=64, **fields)
    box = result_box(desc, schedules.WgmmaSpSchedule(1, 1, tokens))
    assert box.lines * box.pitch <= schedules._STEP_BYTES // 2
    step = schedules.WgmmaSpSchedule(1, 1, tokens).step_tokens(desc.out_element.itemsize)
    results = np.random.default_rng(tokens).integers(1, 100, (32, step)).astype(desc.out_element.bits_dtype)
    shared = _stored_by_warps(desc, tokens, results)
    want = results if order == "column" else results.T
    assert (box.lines, box.elements) == want.shape
    assert np.array_equal(model.copied_out(shared, 0, results.dtype, box), want)
