"""The boxes of X end with its tokens, since TMA is slow to fill lines beyond them: ``token_boxes.cuh``."""

from __future__ import annotations

import re
from functools import partial

import pytest

from sparse24_plans import BlockSparseMatmulDescriptor, BlockSparseMatmulPlan, BlockSparseShape
from sparse24_plans._vendor.cuda_driver_abi import MapDescription
from sparse24_plans.blocksparse.backends import blocks_wgmma, blocks_wgmma_sp
from sparse24_plans.blocksparse.schedules.blocks_wgmma import BlocksWgmmaSchedule
from sparse24_plans.blocksparse.schedules.blocks_wgmma_cuts import Cut
from sparse24_plans.blocksparse.schedules.blocks_wgmma_sp import BlocksWgmmaSpSchedule
from sparse24_plans.device.devices import absent_gpu

from ..kernels.index_functions import Table, check_tables
from ..support import check_each
from .problems import recorded_launches

BACKENDS = {"dense": "blocks_wgmma", "sparse24": "blocks_wgmma_sp"}
every_kind = pytest.mark.parametrize("inner", BACKENDS)
every_op = pytest.mark.parametrize("op", ["dsd", "dds"])


def problem(inner: str, op: str, n: int, block: int = 64) -> BlockSparseMatmulDescriptor:
    shape = BlockSparseShape(heads=2, rows=2048, cols=2048, block=block, blocks=400)
    return BlockSparseMatmulDescriptor(op=op, layout=shape, n=n, element="bf16", inner=inner)


@every_kind
@every_op
def test_the_kernel_loads_the_tokens_that_there_are(inner, op):
    """If tokens are contiguous in X, it loads whole groups of 64."""
    desc, k_major = problem(inner, op, 4096), op == "dds"
    if inner == "sparse24":
        header, schedule = "blocksparse/blocks_wgmma_sp.cu", BlocksWgmmaSpSchedule.of(desc, 132)
        macros = blocks_wgmma_sp.defines(desc, schedule)
    else:
        header, schedule = "blocksparse/blocks_wgmma.cu", BlocksWgmmaSchedule.of(desc, 132)
        macros = blocks_wgmma.defines(desc, Cut(schedule), ())
    group = 1 if k_major else 64
    want = [
        [min(schedule.tokens, max(0, -(-(n - token) // group) * group)) for n in range(600)]
        for token in range(0, 600, 64)
    ]
    check_tables(header, macros, Table("Boxes::loaded(64 * i0, i1)", want))


def maps_of_x(plan: BlockSparseMatmulPlan) -> list[MapDescription | None]:
    """The maps with boxes for whole tiles, and for the last one."""
    found = recorded_launches(plan)[-1].parameters
    fields = type(found).right_map, type(found).right_tail_map
    return [MapDescription.of(bytes(found)[one.offset :]) for one in fields]


@every_op
@pytest.mark.parametrize(
    ("inner", "block"), [("dense", 16), ("dense", 32), ("dense", 64), ("dense", 128), ("sparse24", 64)]
)
def test_boxes_of_the_last_tile_have_its_tokens(inner, op, block):
    numbers = (1, 7, 64, 65, 134, 255, 256, 257, 282, 384, 391, 512, 1000)
    check_each(partial(check_boxes, inner, op, block), ({"n": n} for n in numbers))


def check_boxes(inner: str, op: str, block: int, n: int) -> None:
    """Boxes of tokens that are contiguous have 64 of them, or where blocks are small whole groups of 64."""
    wish = {"prefer_backend": BACKENDS[inner]}
    plan = BlockSparseMatmulPlan.select(
        problem(inner, op, n, block), preference=wish, device=absent_gpu("h200")
    )
    whole, tail = maps_of_x(plan)
    assert whole is not None
    tile = int(re.search(r"rows x (\d+) tokens", plan.explain().details)[1])
    if n % tile == 0:
        assert tail is None
        return
    assert tail is not None
    assert tail._replace(box=whole.box) == whole
    step, left = min(block, 64), n % tile
    if op == "dds":
        assert (whole.box, tail.box) == ((step, tile, 1), (step, left, 1))
    elif block < 64 and whole.sizes[0] == 64:
        assert (whole.box[2], tail.box[2]) == (tile // 64, -(-left // 64))
    else:
        assert whole.box == tail.box
        assert whole.box[0] == 64
