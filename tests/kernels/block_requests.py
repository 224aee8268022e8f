"""Compilations that plans of block-sparse products, attention, convolutions and softmax ask for."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from unittest import mock

from benchmarks.measure_block_schedules import running
from sparse24_plans import (
    BlockSparseAttentionDescriptor,
    BlockSparseConv2dDescriptor,
    BlockSparseMatmulDescriptor,
    BlockSparseOp,
    BlockSparsePass,
    BlockSparseShape,
    BlockSparseSoftmaxDescriptor,
    PlanPreference,
)
from sparse24_plans.blocksparse import device_tables
from sparse24_plans.blocksparse import kernel_table as blocks_table
from sparse24_plans.blocksparse.descriptor import FLOATS
from sparse24_plans.blocksparse.kernel_table import BlockSparseEntry, MatmulEntry
from sparse24_plans.blocksparse.schedules import blocks_wgmma
from sparse24_plans.blocksparse.schedules.blocks_mma import BlocksMmaSchedule
from sparse24_plans.blocksparse.schedules.blocks_wgmma import BlocksWgmmaSchedule, schedules_by_density
from sparse24_plans.blocksparse.schedules.blocks_wgmma_cuts import NARROW, Cut, others
from sparse24_plans.plan.descriptor import Descriptor
from sparse24_plans.plan.kernel import Choice

from .gemm_requests import KINDS
from .requests import HOPPER, Request, device_of, recorded_loads, recorded_loads_of, serves

BLOCK_KINDS_OF_8_BITS = (
    {"element": "s8"},
    {"element": "s8", "epilogue": "bias_gelu", "out_element": "s8"},
    {"element": "fp8_e4m3", "epilogue": "bias_silu", "out_element": "f32"},
    {"element": "fp8_e4m3"},
)
BLOCK_TOKENS = (63, 64, 127, 128, 255, 256, 4095, 4096)
BLOCKS_ENTRIES = [row for row in blocks_table.MATMUL_ENTRIES if not row.on_host]
ATTENTION_ENTRIES = [row for row in blocks_table.ATTENTION_ENTRIES if not row.on_host]
CONVOLUTION_ENTRIES = [row for row in blocks_table.CONVOLUTION_ENTRIES if not row.on_host]
SOFTMAX_ENTRIES = [row for row in blocks_table.SOFTMAX_ENTRIES if not row.on_host]


@functools.cache
def block_problems(few: bool) -> tuple[BlockSparseMatmulDescriptor, ...]:
    return tuple(_block_problems(few))


def _block_problems(few: bool) -> Iterator[BlockSparseMatmulDescriptor]:
    """Products of every form, kind, size of block and schedule; or a few."""
    transposes = [(False, False)] if few else [(a, b) for a in (False, True) for b in (False, True)]
    kinds = KINDS[1:3] if few else [kind for kind in KINDS[:4] if "op" not in kind]
    for block in (16, 64) if few else (16, 32, 64, 128):
        shape = BlockSparseShape(heads=1, rows=4096, cols=4096, block=block, blocks=100)
        for op in ("sdd", "dsd", "dds"):
            for transposed in transposes:
                for n in (255, 256) if few or transposed != (False, False) else BLOCK_TOKENS:
                    yield _block_problem(op, shape, n, transposed, {"element": "bf16"})
            for kind in kinds:
                if op == "sdd":
                    kind = {name: word for name, word in kind.items() if "epilogue" not in name}
                for n in (4095, 4096):
                    yield _block_problem(op, shape, n, (False, False), kind)
            for kind in () if few else BLOCK_KINDS_OF_8_BITS:
                if op == "sdd":
                    kind = {name: word for name, word in kind.items() if "epilogue" not in name}
                for n in (63, 64, 4096):
                    yield _block_problem(op, shape, n, (n == 64, n == 64), kind)
            many = shape.model_copy(update={"blocks": (shape.rows // block) ** 2 // 10})  # panels in turn
            yield _block_problem(op, many, 8192, (False, False), {"element": "bf16"})
            if op == "sdd" or block < 64:
                continue
            for n in (256,) if few else BLOCK_TOKENS:
                for transposed in transposes:
                    yield _block_problem(op, shape, n, transposed, {"element": "bf16", "inner": "sparse24"})
            for kind in kinds:
                if kind["element"] != "f32":
                    yield _block_problem(op, shape, 4096, (False, False), {**kind, "inner": "sparse24"})


def _block_problem(
    op: str, shape: BlockSparseShape, n: int, transposed: tuple[bool, bool], kind: Mapping[str, object]
) -> BlockSparseMatmulDescriptor:
    return BlockSparseMatmulDescriptor(
        op=op, layout=shape, n=n, trans_a=transposed[0], trans_b=transposed[1], **kind
    )


def few_tokens(few: bool) -> Iterator[BlockSparseMatmulDescriptor]:
    """Products of few tokens of every form, kind and size of block, some with a copy of X; or a few."""
    transposes = [(False, True)] if few else itertools.product((False, True), repeat=2)
    kinds = [kind for kind in KINDS[:8] if kind["element"] in ("f16", "bf16") and "op" not in kind]
    plain = [{name: word for name, word in kind.items() if "order" not in name} for kind in kinds]
    for block, transposed, op in itertools.product((16, 32, 64, 128), transposes, ("dsd", "dds")):
        shape = BlockSparseShape(heads=1, rows=16 * block, cols=20 * block, block=block, blocks=40)
        for n in (8, 64) if few else (1, 6, 9, 16, 30, 32, 64):
            yield _block_problem(op, shape, n, transposed, {"element": "bf16"})
            for kind in plain if n == 16 else ():
                yield _block_problem(op, shape, n, transposed, kind)


def short_sums(few: bool) -> Iterator[tuple[BlockSparseMatmulDescriptor, int]]:
    """Products ``sdd`` of every form, kind, size of block and schedule, with the SMs; or a few."""
    transposes = [(False, True)] if few else itertools.product((False, True), repeat=2)
    for block, transposed in itertools.product((16, 32, 64, 128), transposes):
        shape = BlockSparseShape(heads=1, rows=64 * block, cols=64 * block, block=block, blocks=256)
        for n, sms in itertools.product((5, 64) if few else (1, 5, 8, 12, 31, 32, 40, 63, 64), (1, 32, 132)):
            yield _block_problem("sdd", shape, n, transposed, {"element": "bf16"}), sms
            yield _block_problem("sdd", shape, n, transposed, {"element": "f16", "out_element": "f32"}), sms


@functools.cache
def mma_requests(ops: tuple[BlockSparseOp, ...], capability: tuple[int, int]) -> list[Request]:
    """Every variant on Hopper, a few elsewhere, by the entry that serves any n."""
    row = next(one for one in blocks_table.MATMUL_ENTRIES if one.ops == ops and one.name.endswith("mma_any"))
    device, preference = device_of(capability), PlanPreference(prefer_backend=row.backend)
    few = capability != HOPPER
    with recorded_loads(row.kernel) as found:
        if ops == (BlockSparseOp.SDD,):
            for desc, sms in short_sums(few):
                one = device.model_copy(update={"multiprocessors": sms})
                if serves(row, desc, preference, one):
                    row.kernel(Choice(desc, one, row, preference, {}))
        for desc in few_tokens(few) if ops != (BlockSparseOp.SDD,) else ():
            if serves(row, desc, preference, device):
                for schedule in BlocksMmaSchedule.candidates(desc)[:: 4 if few else 1]:
                    with mock.patch.object(BlocksMmaSchedule, "of", lambda *_, one=schedule, **__: one):
                        row.kernel(Choice(desc, device, row, preference, {}))
    return found


def tiles_of(
    desc: BlockSparseMatmulDescriptor,
) -> Iterator[tuple[BlockSparseMatmulDescriptor, BlocksWgmmaSchedule]]:
    """Tiles of blocks_wgmma that depend on the density, each with the problem or one without long panels."""
    tiles = schedules_by_density(desc)
    yield from ((desc, one) for one in tiles)
    if desc.op != "sdd" and desc.layout.block < blocks_wgmma.PANEL_ROWS:
        yield desc.model_copy(update={"longest_panel": 1}), NARROW
        if tiles:
            yield desc, NARROW


def cuts_of(desc: BlockSparseMatmulDescriptor) -> list[Cut]:
    """The cuts that are tried of few tokens, and of more with a long panel; of even ones those in two."""
    if desc.op == "sdd":
        return []
    few = desc.model_copy(update={"n": blocks_wgmma.TOKENS[0], "batch": 1})
    longest = min(desc.layout.blocks, desc.reduction // desc.layout.block)
    more = few.model_copy(update={"n": 4096, "longest_panel": longest})
    found = {cut.name: cut for one in (few, more) for cut in others(one, Cut(NARROW))}
    return [cut for cut in found.values() if cut.cluster_slices <= 2]


@functools.cache
def blocks_requests(row: MatmulEntry, capability: tuple[int, int]) -> list[Request]:
    """Every variant on Hopper, a few elsewhere."""
    if row.backend == "blocks_mma":
        return mma_requests(row.ops, capability)
    device, preference = device_of(capability), PlanPreference(prefer_backend=row.backend)
    with recorded_loads(row.kernel) as found:
        for desc in block_problems(few=capability != HOPPER):
            if row.backend == "inflate_cublas":  # asks cuBLAS itself only where there is a result
                desc = desc.model_copy(update={"batch": 0})
            if False not in row.packed and desc.op != "sdd" and desc.inner == "dense":
                desc = desc.model_copy(update={"packed": True})
            if serves(row, desc, preference, device):
                row.kernel(Choice(desc, device, row, preference, {}))
                if row.invariant:
                    without = preference.model_copy(update={"max_workspace_bytes": 0})
                    row.kernel(Choice(desc, device, row, without, {}))
                for problem, one in tiles_of(desc) if row.backend == "blocks_wgmma" else ():
                    with mock.patch.object(blocks_wgmma.BlocksWgmmaSchedule, "of", return_value=one):
                        cut = Cut.of(problem, device.multiprocessors, invariant=row.invariant)
                    with running(cut):
                        row.kernel(Choice(problem, device, row, preference, {}))
                for cut in cuts_of(desc) if row.backend == "blocks_wgmma" else ():
                    with running(cut):
                        row.kernel(Choice(desc, device, row, preference, {}))
    return found


def _requests_of(
    row: BlockSparseEntry,
    capability: tuple[int, int],
    problems: Iterable[Descriptor],
    *,
    least_workspace: bool = False,
) -> list[Request]:
    device, preference = device_of(capability), PlanPreference(prefer_backend=row.backend)
    with recorded_loads(row.kernel) as found:
        for desc in problems:
            if least_workspace:
                least = row.min_workspace(desc)
                preference = preference.model_copy(update={"max_workspace_bytes": least})
            if serves(row, desc, preference, device):
                row.kernel(Choice(desc, device, row, preference, {}))
    return found


@functools.cache
def attention_problems() -> tuple[BlockSparseAttentionDescriptor, ...]:
    return tuple(_attention_problems())


def _attention_problems() -> Iterator[BlockSparseAttentionDescriptor]:
    """Problems of each op, element, block and mask, with and without dropout, and of each tile of head sizes.

    A few have a negative scale.
    """
    flags = (False, True)
    for block, head_size in itertools.product((64, 128), (128, 64, 40, 96, 192, 256)):
        shape = BlockSparseShape(heads=1, rows=1024, cols=1024, block=block, blocks=10)
        for element in ("f16", "bf16") if head_size == 128 else ("bf16",):
            fields = {"layout": shape, "head_size": head_size, "element": element}
            for op, causal, lengths in itertools.product(BlockSparsePass, flags, flags):
                fields |= {"op": op, "causal": causal, "lengths": lengths}
                yield BlockSparseAttentionDescriptor(**fields)
                yield BlockSparseAttentionDescriptor(**fields, dropout=0.1)
            yield BlockSparseAttentionDescriptor(
                layout=shape, head_size=head_size, element=element, scale=-1.0
            )


@functools.cache
def attention_requests(row: BlockSparseEntry, capability: tuple[int, int]) -> list[Request]:
    """Every variant, on Hopper alone: gradients with the workspace they like, and with the least."""
    found = _requests_of(row, capability, attention_problems())
    return found + _requests_of(row, capability, attention_problems(), least_workspace=True)


@functools.cache
def convolutions() -> tuple[BlockSparseConv2dDescriptor, ...]:
    return tuple(_convolutions())


def _convolutions() -> Iterator[BlockSparseConv2dDescriptor]:
    """Convolutions of every op, block size, element, result, number of phases and schedule."""
    for block, op in itertools.product((16, 32, 64, 128), ("forward", "dgrad", "wgrad")):
        shape = BlockSparseShape(heads=1, rows=512, cols=9 * 512, block=block, blocks=512 // block)
        for kind, batch in itertools.product(KINDS[:4], (1, 8, 64)):
            kind = {name: word for name, word in kind.items() if op == "forward" or "epilogue" not in name}
            for stride in (1, 2) if op == "dgrad" else (1,):
                yield BlockSparseConv2dDescriptor(
                    layout=shape, op=op, batch=batch, height=32, width=32, kernel=3, stride=stride, **kind
                )


@functools.cache
def convolution_requests(row: BlockSparseEntry, capability: tuple[int, int]) -> list[Request]:
    """Every variant, on Hopper alone."""
    return _requests_of(row, capability, convolutions())


def softmaxes(*, few: bool) -> Iterator[BlockSparseSoftmaxDescriptor]:
    """Every element, op, size of blocks and team of warps; all that can be added to scores, or nothing."""
    everything = {"rpe": True, "key_padding_mask": "add", "attn_mask": "mul", "causal": True}
    one_each = {"key_padding_mask": "mul"}, {"attn_mask": "add"}, {"causal": True}, {"rpe": True}
    for block, kept in ((32, 1), (128, 1), (128, 5), (16, 40), (64, 100))[: 1 if few else None]:
        shape = BlockSparseShape(heads=1, rows=block, cols=200 * block, block=block, blocks=kept)
        for element in FLOATS:
            fields = {"layout": shape, "element": element}
            yield BlockSparseSoftmaxDescriptor(**fields, op="backward")
            for added in ({}, everything, *(one_each if block == 32 and not few else ())):
                yield BlockSparseSoftmaxDescriptor(**fields, **added)


@functools.cache
def softmax_requests(row: BlockSparseEntry, capability: tuple[int, int]) -> list[Request]:
    """Every variant on Hopper, a few elsewhere."""
    device = device_of(capability)
    with recorded_loads(row.kernel) as found:
        for desc in softmaxes(few=capability != HOPPER):
            row.kernel(Choice(desc, device, row, PlanPreference(), {}))
    return found


def table_requests(capability: tuple[int, int]) -> list[Request]:
    """Kernels that make look-up tables, which no plan's kernel loads."""
    shapes = [BlockSparseShape(heads=1, rows=1024, cols=1024, block=one, blocks=9) for one in (64, 128)]
    device_tables._function.cache_clear()
    with recorded_loads_of([device_tables]) as found:
        for shape in shapes:
            device_tables.TableKernel(shape, device_of(capability))
    device_tables._function.cache_clear()
    return found
