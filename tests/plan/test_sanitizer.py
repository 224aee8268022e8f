"""compute-sanitizer on small problems of every kernel."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from sparse24_plans import EpilogueKind
from sparse24_plans.gemm.kernel_table import ENTRIES

from .cases import KERNELS, kernel_case

GEMM = [name for name, medium in KERNELS.items() if medium.row]
GATED = [row.name for row in ENTRIES if row.name in GEMM and EpilogueKind.BIAS_SWIGLU in row.epilogues]
SOFTMAX = [name for name in KERNELS if name.startswith("softmax")]
CONVOLUTIONS = [name for name in KERNELS if name.startswith("conv2d")]
BLOCKS = [name for name in KERNELS if name.startswith("blocks")]
PREPARE = [name for name in KERNELS if name not in (*GEMM, *SOFTMAX, *CONVOLUTIONS, *BLOCKS)]
SIZES = ((1, 1, 16), (3, 33, 48), (40, 72, 528), (130, 24, 48), (67, 9000, 16))
"""n, m and k, ragged in all the tiles there are."""
TIMEOUT = 240
"""Seconds after which a tool has met a kernel that waits for ever."""


def small_products(row: str, element: str, op: str) -> int:
    """How many problems have run, each inside its bound and its guards."""
    from sparse24_plans import GemmSparse24Descriptor

    from ..gemm.kernel_entries import tokens
    from ..support import make_case

    epilogue = "bias_gelu" if op == "forward" else "identity"
    for n, m, k in SIZES:
        desc = GemmSparse24Descriptor(
            n=tokens(row, n),
            m=min(m, 24) if op == "dgrad" else m,
            k=k,
            element=element,
            op=op,
            epilogue=epilogue,
        )
        case = make_case(desc, row=row, pad=3 if row == "inflate_strict" else 16)
        case.check(case.run())
    return len(SIZES)


def small_gated_products(row: str, element: str) -> int:
    """The same, where two rows of W make a result."""
    from sparse24_plans import GemmSparse24Descriptor

    from ..gemm.kernel_entries import tokens
    from ..support import make_case

    sizes = ((1, 16, 16), (40, 80, 528), (67, 9008, 16))
    for n, m, k in sizes:
        fields = {"element": element, "epilogue": "bias_swiglu"}
        if element == "s8":
            fields["out_element"] = "s8"
        desc = GemmSparse24Descriptor(n=tokens(row, n), m=m, k=k, **fields)
        case = make_case(desc, row=row, pad=3 if row == "inflate_strict" else 16)
        case.check(case.run())
    return len(sizes)


def small_weights(name: str, element: str, device: int | str = 0) -> int:
    sizes = ((8, 8), (72, 264), (136, 24))
    for m, k in sizes:
        kernel_case(name, device, m=m, k=k, element=element).run()
    return len(sizes)


def small_softmaxes(name: str, element: str, device: int | str = 0) -> int:
    from sparse24_plans import BlockSparseShape

    sizes = (1, 1, 1, 128, 1), (2, 2, 3, 16, 5), (1, 2, 90, 16, 85), (1, 3, 2, 64, 3)
    for heads, rows, cols, block, blocks in sizes:
        shape = BlockSparseShape(
            heads=heads, rows=rows * block, cols=cols * block, block=block, blocks=blocks
        )
        kernel_case(name, device, layout=shape, element=element).run()
    return len(sizes)


def small_convolutions(name: str, element: str, device: int | str = 0) -> int:
    from sparse24_plans import BlockSparseShape

    sizes = (1, 1, 1, 64, 2), (2, 3, 5, 64, 9), (3, 2, 8, 128, 4)
    for rows, channels, side, block, blocks in sizes:
        shape = BlockSparseShape(
            heads=1, rows=rows * block, cols=4 * channels * block, block=block, blocks=blocks
        )
        kernel_case(name, device, layout=shape, height=side, width=side, kernel=2, element=element).run()
    return len(sizes)


def small_blocks(name: str, element: str, device: int | str = 0) -> int:
    """Products of both ops. On a device the last product has more work tiles than the device has SMs."""
    from sparse24_plans import BlockSparseShape

    sizes = (1, 1, 1, 128, 1, 8), (2, 3, 2, 64, 5, 72), (1, 2, 5, 128, 7, 264), (70, 2, 2, 64, 200, 264)
    sizes = sizes[:-1] if device == "host" else sizes
    for heads, rows, cols, block, blocks, n in sizes:
        shape = BlockSparseShape(
            heads=heads, rows=rows * block, cols=cols * block, block=block, blocks=blocks
        )
        for op in ("dsd", "dds"):
            kernel_case(name, device, op=op, layout=shape, n=n, element=element).run()
    return len(sizes)


FORCED = {
    f"{backend} {op}": elements
    for backend, elements in (("inflate_cublas", "bf16,f32"), ("blocks_mma", "bf16,f16"))
    for op in ("sdd", "dsd", "dds")
}
"""Elements of each backend and op of products whose dense rows are no multiples of 16 bytes."""


def small_ragged_blocks(name: str, element: str, device: int | str = 0) -> int:
    """Products by a backend and op of FORCED, with all copies of dense operands."""
    from sparse24_plans import BlockSparseMatmulDescriptor, BlockSparseMatmulPlan

    from ..blocksparse.problems import random_operands
    from ..blocksparse.sample_layouts import random_layout
    from ..blocksparse.test_products import check

    backend, op = name.split()
    layout, sizes = random_layout(rows=5, cols=3), (2, 9, 63, 391 if backend == "inflate_cublas" else 40)
    preference = {} if device == "host" else {"prefer_backend": backend}
    for n, transposed in itertools.product(sizes, (False, True)):
        for epilogue in ("identity",) if op == "sdd" else ("identity", "bias"):
            fields = {"op": op, "n": n, "trans_a": transposed, "trans_b": transposed, "epilogue": epilogue}
            desc = BlockSparseMatmulDescriptor(layout=layout, element=element, batch=2, **fields)
            plan = BlockSparseMatmulPlan.select(desc, preference=preference, device=device)
            check(plan, random_operands(desc, layout, np.random.default_rng(n)))
    return len(sizes)


SANITIZED = """
import sys
from tests.plan.test_sanitizer import {function}
for element in sys.argv[2].split(","):
    {function}(sys.argv[1], element{more})
print("done")
"""


def run_under(tool: str, code: str, *arguments: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "done" in done.stdout
    assert re.search(r"SUMMARY: .*\b0 errors", done.stdout), done.stdout


tools = pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])


@pytest.mark.gpu
@tools
@pytest.mark.parametrize("row", GEMM)
def test_products(row, tool):
    element = KERNELS[row].desc.element.value
    both = row.startswith("inflate")
    elements = f"{element},f32" if both and tool == "memcheck" else element
    for op in ("forward", "dgrad") if both else ("forward",):
        run_under(tool, SANITIZED.format(function="small_products", more=f', "{op}"'), row, elements)


@pytest.mark.gpu
@tools
@pytest.mark.parametrize("row", GATED)
def test_gated_products(row, tool):
    element = KERNELS[row].desc.element.value
    run_under(tool, SANITIZED.format(function="small_gated_products", more=""), row, element)


@pytest.mark.gpu
@tools
@pytest.mark.parametrize("name", PREPARE)
def test_weights(name, tool):
    packs, elements = "pack" in name, "bf16"
    if (packs or tool == "memcheck") and name != "quantize":  # only floats are quantized
        elements += ",s8"
    if tool == "memcheck" and not packs:
        elements += ",f32"
    run_under(tool, SANITIZED.format(function="small_weights", more=""), name, elements)


@pytest.mark.gpu
@tools
@pytest.mark.parametrize("name", SOFTMAX)
def test_softmaxes(name, tool):
    run_under(tool, SANITIZED.format(function="small_softmaxes", more=""), name, "bf16,f32")


@pytest.mark.gpu
@tools
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name, tool):
    run_under(tool, SANITIZED.format(function="small_convolutions", more=""), name, "bf16")


@pytest.mark.gpu
@tools
@pytest.mark.parametrize("name", BLOCKS)
def test_products_of_blocks(name, tool, request):
    if (name, tool) == ("blocks_wgmma_sp", "racecheck"):
        why = (
            "the compiler drops __syncwarp() where a warp is in step, and racecheck then sees one lane report"
        )
        request.applymarker(pytest.mark.xfail(strict=True, reason=why))
    run_under(tool, SANITIZED.format(function="small_blocks", more=""), name, "bf16")


@pytest.mark.gpu
@tools
@pytest.mark.parametrize("name", FORCED)
def test_products_of_ragged_blocks(name, tool):
    run_under(tool, SANITIZED.format(function="small_ragged_blocks", more=""), name, FORCED[name])


def test_what_is_sanitized_runs_at_all():
    """On the host, so that a failure there isn't one of the test."""
    assert small_products("host_blas", "f32", "dgrad") == len(SIZES)
    assert small_gated_products("host_blas", "s8") == 3
    assert all(small_weights(name, "bf16", "host") == 3 for name in PREPARE)
    assert all(small_softmaxes(name, "bf16", "host") == 4 for name in SOFTMAX)
    assert all(small_convolutions(name, "bf16", "host") == 3 for name in CONVOLUTIONS)
    assert all(small_blocks(name, "bf16", "host") == 3 for name in BLOCKS)
    of_a_backend = [name for name in FORCED if name.startswith("blocks_mma")]  # the host has none of either
    assert all(small_ragged_blocks(name, "bf16", "host") == 4 for name in of_a_backend)
