"""Compilations that plans ask for, recorded from the backends on invented devices."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest import mock

from sparse24_plans import (
    BlockSparseAttentionDescriptor,
    BlockSparseConv2dDescriptor,
    BlockSparseMatmulDescriptor,
    BlockSparseOp,
    BlockSparsePass,
    BlockSparseShape,
    BlockSparseSoftmaxDescriptor,
    DeviceProperties,
    EpilogueKind,
    GemmSparse24Descriptor,
    PlanPreference,
)
from sparse24_plans.blocksparse import device_tables
from sparse24_plans.blocksparse import kernel_table as blocks_table
from sparse24_plans.blocksparse.descriptor import FLOATS
from sparse24_plans.blocksparse.kernel_table import BlockSparseEntry, MatmulEntry
from sparse24_plans.blocksparse.schedules import blocks_wgmma
from sparse24_plans.blocksparse.schedules.blocks_mma import BlocksMmaSchedule
from sparse24_plans.blocksparse.schedules.blocks_wgmma import schedules_by_density
from sparse24_plans.device import pad_rows, transpose
from sparse24_plans.gemm import kernel_table as gemm_table
from sparse24_plans.gemm.backends import f32_split, wgmma_sp, wgmma_sp_grouped
from sparse24_plans.gemm.kernel_table import GemmEntry
from sparse24_plans.gemm.schedules import f32_split_heuristics, grouped, wgmma_heuristics
from sparse24_plans.plan.descriptor import Descriptor
from sparse24_plans.plan.kernel import Choice, Kernel
from sparse24_plans.plan.kernel_table import KernelEntry, consider
from sparse24_plans.prepare import kernel_table as prepare_table
from sparse24_plans.prepare.kernel_table import PrepareEntry
from sparse24_plans.weights import inflate

from ..prepare.prepare_cases import kernel_descriptors
from ..sample_devices import gpu_of

CAPABILITIES = {(8, 0): 108, (8, 6): 72, (8, 9): 142, (9, 0): 132, (10, 0): 148, (12, 0): 170}
"""SMs of the invented devices, by compute capability."""
HOPPER = (9, 0)

KINDS = (
    {"element": "bf16", "epilogue": "bias_gelu"},
    {"element": "f16", "epilogue": "bias"},
    {"element": "f32", "epilogue": "bias_relu"},
    {"element": "f32", "epilogue": "bias_gelu"},
    {"element": "f32", "epilogue": "bias_silu"},
    {"element": "bf16", "epilogue": "bias_silu", "out_element": "f32", "bias_element": "f32"},
    {"element": "f16", "epilogue": "bias_silu", "x_order": "column", "y_order": "column"},
    {"element": "bf16", "out_element": "f32", "x_order": "column"},
    {"element": "bf16", "epilogue": "bias", "out_element": "f32", "y_order": "column"},
    {"element": "f16", "op": "dgrad"},
    {"element": "f32", "op": "dgrad"},
    {"element": "s8", "epilogue": "bias_gelu", "out_element": "s8", "scale_x": "row", "scale_w": "row"},
    {"element": "s8"},
    {"element": "s8", "epilogue": "bias_silu", "out_element": "f16", "bias_element": "f32"},
    {"element": "fp8_e4m3", "epilogue": "bias_gelu", "scale_x": "tensor", "scale_w": "row"},
    {"element": "fp8_e4m3", "epilogue": "bias_silu", "out_element": "f32"},
    {"element": "bf16", "epilogue": "bias_swiglu"},
    {"element": "f16", "epilogue": "bias_geglu", "x_order": "column", "y_order": "column"},
    {"element": "bf16", "epilogue": "bias_geglu", "out_element": "f32", "bias_element": "f32"},
    {"element": "bf16", "epilogue": "bias_swiglu", "out_element": "f32", "y_order": "column"},
    {"element": "f32", "epilogue": "bias_swiglu"},
    {"element": "f32", "epilogue": "bias_geglu"},
    {"element": "s8", "epilogue": "bias_swiglu", "out_element": "s8", "scale_x": "row", "scale_w": "row"},
    {"element": "s8", "epilogue": "bias_geglu", "out_element": "bf16", "scale_w": "row"},
    {"element": "fp8_e4m3", "epilogue": "bias_swiglu", "scale_x": "tensor", "scale_w": "row"},
    {"element": "fp8_e4m3", "epilogue": "bias_geglu", "out_element": "f32"},
    {"element": "bf16", "epilogue": "bias_gelu_tanh"},
    {"element": "f32", "epilogue": "bias_gelu_tanh"},
    {"element": "bf16", "epilogue": "bias_geglu_tanh"},
    {"element": "f32", "epilogue": "bias_geglu_tanh"},
    {"element": "fp8_e4m3", "epilogue": "bias_geglu_tanh", "scale_x": "row", "scale_w": "row"},
    {"element": "f16", "epilogue": "bias_relu2"},
    {"element": "bf16", "epilogue": "bias_relu", "relu_threshold": 0.5, "relu_upper_bound": 6.0},
    *(
        {"element": element, "weight_element": stored, "weight_group": group, "weight_scale_element": scale}
        for element, stored, group, scale in (
            ("bf16", "s4", 128, "bf16"),
            ("bf16", "s4", 32, "f32"),
            ("f16", "s8", 64, "f16"),
            ("bf16", "s8", 0, "bf16"),
            ("bf16", "fp8_e4m3", 32, "bf16"),
            ("f16", "fp8_e4m3", 128, "f32"),
        )
    ),
    {"element": "bf16", "weight_element": "s4", "weight_group": 64, "epilogue": "bias_swiglu"},
    {"element": "bf16", "epilogue": "bias_gelu", "beta": 0.5},
    {"element": "bf16", "out_element": "f32", "beta": 1.0},
    {"element": "f16", "epilogue": "bias_silu", "y_order": "column", "c_element": "f32", "beta": 0.5},
    {"element": "f32", "epilogue": "bias_gelu", "beta": 0.5},
    {"element": "s8", "beta": 0.5},
    {"element": "s8", "epilogue": "bias_silu", "out_element": "s8", "scale_x": "row", "beta": 0.5},
    {"element": "fp8_e4m3", "epilogue": "bias_gelu", "c_element": "f32", "beta": 0.5},
    {"element": "fp8_e4m3", "x_element": "fp8_e5m2", "out_element": "fp8_e4m3", "epilogue": "bias_gelu"},
    {"element": "fp8_e5m2", "x_element": "fp8_e4m3", "out_element": "fp8_e5m2", "scale_x": "row"},
    {"element": "fp8_e5m2", "out_element": "fp8_e4m3", "epilogue": "bias_swiglu", "scale_w": "row"},
    {"element": "fp8_e4m3", "out_element": "fp8_e4m3", "epilogue": "bias_silu", "beta": 0.5},
    {"element": "fp8_e5m2", "op": "dgrad"},
    {"element": "bf16", "out_element": "fp8_e4m3", "epilogue": "bias_geglu"},
    {"element": "f16", "out_element": "fp8_e5m2", "epilogue": "bias_gelu", "y_order": "column"},
    {"element": "bf16", "out_element": "fp8_e4m3", "epilogue": "bias_gelu", "beta": 0.5},
)
SIZES = {
    # cuBLAS itself is asked for an algorithm only where there is a result.
    "inflate_cublas": [{"n": 0}],
    "inflate_strict": [{"n": 1}, {"n": 64}, {"n": 300}],
    "mma_sp": [{"n": n, "m": m} for m in (4096, 6144, 28672) for n in (1, 9, 17, 33, 65)],
    "mma_sp_many": [{"n": 300}],
    "mma_sp_fp8": [{"n": n} for n in (8, 16, 32)],
    "inflate_strict_fp8": [{"n": 1}],
    "wgmma_sp": [{"n": 8}],
    "wgmma_sp_invariant": [{"n": 8}],
    **{
        f"wgmma_sp_grouped{suffix}": [{"n": 64, "groups": 8}, {"n": 4096, "groups": 8}]
        for suffix in ("", "_s8", "_fp8")
    },
}
WGMMA_TOKENS = {
    "wgmma_sp": (8, 16, 48, 64, 128, 300, 1024),
    "wgmma_sp_invariant": (64, 300, 1024),
    "wgmma_sp_s8": (48, 64, 400),
    "wgmma_sp_fp8": (8, 1024),
    "wgmma_sp_fp8_invariant": (64, 300),
    "wgmma_sp_fp8_promoted": (64, 1024),
    "wgmma_sp_grouped": (256,),
    "wgmma_sp_grouped_s8": (256,),
    "wgmma_sp_grouped_fp8": (256,),
    "f32_split3": (8, 128, 4096),
    "f32_split6": (16, 24, 48, 4096),
}
"""Every schedule of these n is compiled."""
COLUMNS = {"element": "bf16", "epilogue": "bias_gelu", "x_order": "column", "y_order": "column"}
WGMMA_TOKENS_OF_COLUMNS = {"wgmma_sp": (24, 296), "wgmma_sp_invariant": (1024,)}
"""And of these, with X and Y in columns."""
GEMM_ENTRIES = [row for row in gemm_table.ENTRIES if not row.on_host and row.backend != "cusparselt"]
"""Entries of the package's own kernels; cuSPARSELt brings compiled ones."""
PREPARE_ENTRIES = [row for row in prepare_table.ENTRIES if not row.on_host]
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


class Request(NamedTuple):
    """One compilation, as a backend asks for it."""

    source: str
    function: str
    arch: str
    defines: tuple[tuple[str, int], ...]
    shared_bytes: int

    def __str__(self) -> str:
        return "-".join([self.source, self.arch, *(f"{name}{value}" for name, value in self.defines)])


def device_of(capability: tuple[int, int]) -> DeviceProperties:
    return gpu_of(*capability, multiprocessors=CAPABILITIES[capability], cusparselt=None)


def serves(row: KernelEntry, desc: Descriptor, preference: PlanPreference, device: DeviceProperties) -> bool:
    """Whether the row of the table can serve the problem."""
    (considered,) = consider((row,), desc, preference, device)
    return considered.reason is None


@contextmanager
def recorded_loads(kernel: type[Kernel]) -> Iterator[list[Request]]:
    """Record what the backend would compile and load in the block."""
    found: list[Request] = []

    def record(source, name, threads, device, defines, shared_bytes=0):
        found.append(Request(source, name, device.cuda_arch, tuple(sorted(defines.items())), shared_bytes))

    with ExitStack() as patches:
        for module in {sys.modules[base.__module__] for base in kernel.__mro__} | {
            inflate,
            pad_rows,
            transpose,
        }:
            if hasattr(module, "load"):
                patches.enter_context(mock.patch.object(module, "load", record))
        yield found


@functools.cache
def gemm_requests(row: GemmEntry, capability: tuple[int, int]) -> list[Request]:
    """Every size of one kind; on Hopper also every kind at one size, and every schedule.

    Elsewhere also every size of a kind with another epilogue, which is another on each architecture.
    """
    sizes = SIZES.get(row.name, [{}])
    kinds = [kind for kind in KINDS if kind["element"] in row.elements]
    quantized = [kind for kind in kinds if "weight_element" in kind]
    if not row.quantized:
        kinds = [kind for kind in kinds if kind not in quantized]
    if row.only_groups:
        kinds = [kind for kind in kinds if not {"x_order", "y_order", "op", "beta"} & set(kind)]
    cases = [(size, kinds[0]) for size in sizes]
    if capability == HOPPER:
        cases += [(sizes[0], kind) for kind in kinds[1:]]
    else:
        cases += [(sizes[0], kind) for kind in with_c(row)[:1]]
        others = by_epilogue(kinds)[1:] or kinds
        cases += [(size, others[-1 - turn_of(capability) % len(others)]) for size in sizes]
    device, preference = device_of(capability), PlanPreference(prefer_backend=row.backend)
    with recorded_loads(row.kernel) as found:
        for size, kind in cases:
            desc = GemmSparse24Descriptor(**{"n": 16, "m": 4096, "k": 4096, **size, **kind})
            if serves(row, desc, preference, device):
                row.kernel(Choice(desc, device, row, preference, {}))
        wide = kinds[0], *gated_kinds(row)[:1], *with_c(row)[:1], *(quantized[::3] if row.quantized else ())
        wide += tuple(kind for kind in kinds if kind.get("out_element", "").startswith("fp8"))[:3]
        tried = itertools.product(WGMMA_TOKENS.get(row.name, ()), wide)
        for n, kind in tried if capability == HOPPER else ():
            desc = GemmSparse24Descriptor(n=n, m=4096, k=4096, **kind)
            if row.split_terms:
                found += split_requests(row, desc, device)
                found += split_requests(row, desc.model_copy(update={"m": 1024}), device) if n <= 24 else []
                continue
            if row.only_groups:
                found += grouped_requests(row, desc.model_copy(update={"groups": 8}), device)
                continue
            for schedule in wgmma_heuristics.allowed_schedules(desc, row):
                row.kernel(Choice(desc, device, row, preference, schedule._asdict()))
        columns = COLUMNS, {**COLUMNS, "epilogue": "bias_swiglu"}, {**COLUMNS, "beta": 0.5}
        tried = itertools.product(WGMMA_TOKENS_OF_COLUMNS.get(row.name, ()), columns)
        for n, kind in tried if capability == HOPPER else ():
            desc = GemmSparse24Descriptor(n=n, m=4096, k=4096, **kind)
            row.kernel(Choice(desc, device, row, preference, {}))  # turns X into rows
            for schedule in wgmma_heuristics.allowed_schedules(desc, row):
                # Without room to: rows are compiled above.
                asked = preference.model_copy(update={"max_workspace_bytes": schedule.workspace_bytes()})
                row.kernel(Choice(desc, device, row, asked, schedule._asdict()))
        for kind in batched_kinds(row, capability):
            for n, batches in ((16, 4), (304, 2)) if capability == HOPPER else ((16, 4),):
                desc = GemmSparse24Descriptor(n=n, m=4096, k=4096, batches=batches, **kind)
                if row.batches and serves(row, desc, preference, device):
                    found += batched_requests(row, desc, device)
    return found


def turn_of(capability: tuple[int, int]) -> int:
    """Return a number of the architecture, by which each asks for something that the others don't."""
    return [one for one in CAPABILITIES if one != HOPPER].index(capability)


def by_epilogue(kinds: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the first kind of each epilogue."""
    found: dict[object, dict[str, object]] = {}
    for kind in kinds:
        found.setdefault(kind.get("epilogue"), kind)
    return list(found.values())


def gated_kinds(row: GemmEntry) -> list[dict[str, str]]:
    """Return the gated kinds that the kernel serves."""
    kinds = [(EpilogueKind(kind.get("epilogue", "identity")), kind) for kind in KINDS]
    found = [kind for epilogue, kind in kinds if epilogue.is_gated and epilogue in row.epilogues]
    return [kind for kind in found if kind["element"] in row.elements]


def with_c(row: GemmEntry) -> list[dict[str, object]]:
    """Return the kinds of the kernel's elements that add C."""
    return [kind for kind in KINDS if "beta" in kind and kind["element"] in row.elements and row.adds_c]


def batched_kinds(row: GemmEntry, capability: tuple[int, int]) -> list[dict[str, object]]:
    """Return kinds of batches: with C, with a gate, quantized, and with columns where a kernel has them."""
    kinds = [*with_c(row)[:1], *gated_kinds(row)[:1]]
    if capability == HOPPER:
        kinds += [kind for kind in KINDS if "weight_element" in kind and row.quantized][::3]
        kinds += [{**COLUMNS, "beta": 0.5}] if row.column_order else []
    return kinds


def batched_requests(row: GemmEntry, desc: GemmSparse24Descriptor, device: DeviceProperties) -> list[Request]:
    """Every schedule of batches, which no configuration can ask for."""
    preference = PlanPreference(prefer_backend=row.backend)
    with recorded_loads(row.kernel) as found, ExitStack() as patches:
        tried: list[object] = [None]
        if row.backend == "wgmma_sp":
            single = wgmma_heuristics.best_schedule(desc.one_batch, row)
            tried = list(wgmma_heuristics.batched_schedules(desc, row, single))
        for schedule in tried:
            if schedule is not None:
                one = mock.patch.object(wgmma_sp, "batched_schedule", lambda *_, one=schedule: one)
                patches.enter_context(one)
            row.kernel(Choice(desc, device, row, preference, {}))
    return found


def split_requests(row: GemmEntry, desc: GemmSparse24Descriptor, device: DeviceProperties) -> list[Request]:
    """Every schedule of float32 in parts, which no configuration can ask for."""
    with recorded_loads(row.kernel) as found:
        for schedule in f32_split_heuristics.allowed_schedules(desc, row):
            with mock.patch.object(f32_split, "best_schedule", lambda *_, one=schedule: one):
                row.kernel(Choice(desc, device, row, PlanPreference(), {}))
    return found


def grouped_requests(row: GemmEntry, desc: GemmSparse24Descriptor, device: DeviceProperties) -> list[Request]:
    """Every schedule of grouped products, which no configuration can ask for."""
    with recorded_loads(row.kernel) as found:
        for schedule in grouped.schedules_for(desc.n):
            with mock.patch.object(wgmma_sp_grouped, "best_schedule", lambda *_, one=schedule: one):
                row.kernel(Choice(desc, device, row, PlanPreference(), {}))
    return found


@functools.cache
def prepare_requests(row: PrepareEntry, capability: tuple[int, int]) -> list[Request]:
    """Every variant on Hopper, a few elsewhere."""
    device = device_of(capability)
    with recorded_loads(row.kernel) as found:
        for desc in kernel_descriptors(None if capability == HOPPER else turn_of(capability)):
            if capability < row.min_compute_capability:
                break
            if desc.element in row.elements and row.refusal(desc) is None:
                row.kernel(Choice(desc, device, row, PlanPreference(), {}))
    return found


@functools.cache
def block_problems(few: bool) -> tuple[BlockSparseMatmulDescriptor, ...]:
    return tuple(_block_problems(few))


def _block_problems(few: bool) -> Iterator[BlockSparseMatmulDescriptor]:
    """Products of every form, kind, size of block and schedule; or a few."""
    turns = [(False, False)] if few else [(a, b) for a in (False, True) for b in (False, True)]
    kinds = KINDS[1:3] if few else [kind for kind in KINDS[:4] if "op" not in kind]
    for block in (16, 64) if few else (16, 32, 64, 128):
        shape = BlockSparseShape(heads=1, rows=4096, cols=4096, block=block, blocks=100)
        for op in ("sdd", "dsd", "dds"):
            for turned in turns:
                for n in (255, 256) if few or turned != (False, False) else BLOCK_TOKENS:
                    yield _block_problem(op, shape, n, turned, {"element": "bf16"})
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
                for turned in turns:
                    yield _block_problem(op, shape, n, turned, {"element": "bf16", "inner": "sparse24"})
            for kind in kinds:
                if kind["element"] != "f32":
                    yield _block_problem(op, shape, 4096, (False, False), {**kind, "inner": "sparse24"})


def _block_problem(
    op: str, shape: BlockSparseShape, n: int, turned: tuple[bool, bool], kind: Mapping[str, object]
) -> BlockSparseMatmulDescriptor:
    return BlockSparseMatmulDescriptor(op=op, layout=shape, n=n, trans_a=turned[0], trans_b=turned[1], **kind)


def few_tokens(few: bool) -> Iterator[BlockSparseMatmulDescriptor]:
    """Products of few tokens of every form, kind and size of block, some with a copy of X; or a few."""
    turns = [(False, True)] if few else itertools.product((False, True), repeat=2)
    kinds = [kind for kind in KINDS[:8] if kind["element"] in ("f16", "bf16") and "op" not in kind]
    plain = [{name: word for name, word in kind.items() if "order" not in name} for kind in kinds]
    for block, turned, op in itertools.product((16, 32, 64, 128), turns, ("dsd", "dds")):
        shape = BlockSparseShape(heads=1, rows=16 * block, cols=20 * block, block=block, blocks=40)
        for n in (8, 64) if few else (1, 6, 9, 16, 30, 32, 64):
            yield _block_problem(op, shape, n, turned, {"element": "bf16"})
            for kind in plain if n == 16 else ():
                yield _block_problem(op, shape, n, turned, kind)


def short_sums(few: bool) -> Iterator[tuple[BlockSparseMatmulDescriptor, int]]:
    """Products ``sdd`` of every form, kind, size of block and schedule, with the SMs; or a few."""
    turns = [(False, True)] if few else itertools.product((False, True), repeat=2)
    for block, turned in itertools.product((16, 32, 64, 128), turns):
        shape = BlockSparseShape(heads=1, rows=64 * block, cols=64 * block, block=block, blocks=256)
        for n, sms in itertools.product((5, 64) if few else (1, 5, 8, 12, 31, 32, 40, 63, 64), (1, 32, 132)):
            yield _block_problem("sdd", shape, n, turned, {"element": "bf16"}), sms
            yield _block_problem("sdd", shape, n, turned, {"element": "f16", "out_element": "f32"}), sms


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
                    with mock.patch.object(BlocksMmaSchedule, "of", lambda *_, one=schedule: one):
                        row.kernel(Choice(desc, device, row, preference, {}))
    return found


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
                for one in schedules_by_density(desc) if row.backend == "blocks_wgmma" else ():
                    with mock.patch.object(blocks_wgmma, "best_schedule", lambda *_, one=one: one):
                        row.kernel(Choice(desc, device, row, preference, {}))
    return found


def attention_problems() -> Iterator[BlockSparseAttentionDescriptor]:
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
    """Every variant, on Hopper alone."""
    device, preference = device_of(capability), PlanPreference(prefer_backend=row.backend)
    with recorded_loads(row.kernel) as found:
        for desc in attention_problems():
            if serves(row, desc, preference, device):
                row.kernel(Choice(desc, device, row, preference, {}))
    return found


def convolutions() -> Iterator[BlockSparseConv2dDescriptor]:
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
    device, preference = device_of(capability), PlanPreference(prefer_backend=row.backend)
    with recorded_loads(row.kernel) as found:
        for desc in convolutions():
            if serves(row, desc, preference, device):
                row.kernel(Choice(desc, device, row, preference, {}))
    return found


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
    found: list[Request] = []

    def record(source, name, threads, device, defines, shared_bytes=0):
        found.append(Request(source, name, device.cuda_arch, tuple(sorted(defines.items())), shared_bytes))

    with mock.patch.object(device_tables, "load", record):
        for shape in shapes:
            device_tables.TableKernel(shape, device_of(capability))
    device_tables._function.cache_clear()
    return found


ASKED = list(
    dict.fromkeys(
        request
        for rows, requests in (
            (GEMM_ENTRIES, gemm_requests),
            (PREPARE_ENTRIES, prepare_requests),
            (BLOCKS_ENTRIES, blocks_requests),
            (ATTENTION_ENTRIES, attention_requests),
            (CONVOLUTION_ENTRIES, convolution_requests),
            (SOFTMAX_ENTRIES, softmax_requests),
            ((None,), lambda row, capability: table_requests(capability)),
        )
        for row in rows
        for capability in CAPABILITIES
        for request in requests(row, capability)
    )
)
"""Everything that is asked for here: ``covering`` says which of it is compiled."""
