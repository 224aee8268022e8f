"""Problems of every family, and plans with every operand in guarded memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from sparse24_plans import (
    BlockSparseAttentionDescriptor,
    BlockSparseAttentionPlan,
    BlockSparseConv2dDescriptor,
    BlockSparseConv2dPlan,
    BlockSparseLayout,
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
    BlockSparseShape,
    BlockSparseSoftmaxDescriptor,
    BlockSparseSoftmaxPlan,
    CompressSparse24Descriptor,
    CompressSparse24Plan,
    DecompressSparse24Descriptor,
    DecompressSparse24Plan,
    DequantizeSparse24Descriptor,
    DequantizeSparse24Plan,
    ElementKind,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    MaskSparse24Descriptor,
    MaskSparse24Plan,
    MatrixOrder,
    PackedWeight,
    PackSparse24Descriptor,
    PackSparse24Plan,
    PruneCompressSparse24Descriptor,
    PruneCompressSparse24Plan,
    PruneQuantizeSparse24Descriptor,
    PruneQuantizeSparse24Plan,
    PruneSparse24Descriptor,
    PruneSparse24Plan,
    QuantizeSparse24Descriptor,
    QuantizeSparse24Plan,
    Sparse24Error,
    Sparse24QuantizedWeight,
    Sparse24Weight,
    TensorView,
    TilePruneSparse24Descriptor,
    TilePruneSparse24Plan,
)
from sparse24_plans.plan.descriptor import Descriptor
from sparse24_plans.plan.operands import Operand, Role
from sparse24_plans.plan.plan import Plan
from sparse24_plans.vocab import CANONICAL_LAYOUT
from sparse24_plans.weights.packed_layouts import Quantization, layout_of, memory_element, stored_width
from sparse24_plans.weights.packing import pack

from ..support import Guarded, place_of, plan_of_row, scratch, synchronize

PLANS: dict[type[Descriptor], type[Plan]] = {
    GemmSparse24Descriptor: GemmSparse24Plan,
    PruneSparse24Descriptor: PruneSparse24Plan,
    CompressSparse24Descriptor: CompressSparse24Plan,
    PruneCompressSparse24Descriptor: PruneCompressSparse24Plan,
    DecompressSparse24Descriptor: DecompressSparse24Plan,
    PackSparse24Descriptor: PackSparse24Plan,
    TilePruneSparse24Descriptor: TilePruneSparse24Plan,
    MaskSparse24Descriptor: MaskSparse24Plan,
    QuantizeSparse24Descriptor: QuantizeSparse24Plan,
    PruneQuantizeSparse24Descriptor: PruneQuantizeSparse24Plan,
    DequantizeSparse24Descriptor: DequantizeSparse24Plan,
    BlockSparseMatmulDescriptor: BlockSparseMatmulPlan,
    BlockSparseSoftmaxDescriptor: BlockSparseSoftmaxPlan,
    BlockSparseAttentionDescriptor: BlockSparseAttentionPlan,
    BlockSparseConv2dDescriptor: BlockSparseConv2dPlan,
}

M, K = 16, 32
GEMM = (
    GemmSparse24Descriptor(n=5, m=M, k=K, element="f32", epilogue="bias"),
    GemmSparse24Descriptor(n=5, m=M, k=K, element="bf16", op="dgrad"),
    GemmSparse24Descriptor(n=5, m=M, k=K, element="s8", out_element="f16", scale_x="row", scale_w="tensor"),
)
PREPARE = (
    PruneSparse24Descriptor(m=M, k=K, element="bf16"),
    PruneSparse24Descriptor(m=M, k=K, element="s8", scores="f32"),
    CompressSparse24Descriptor(m=M, k=K, element="f32"),
    PruneCompressSparse24Descriptor(m=M, k=K, element="fp8_e4m3"),
    DecompressSparse24Descriptor(m=M, k=K, element="u8"),
    PackSparse24Descriptor(m=M, k=K, element="f16"),
    PackSparse24Descriptor(m=M, k=K, element="bf16", direction="unpack"),
    TilePruneSparse24Descriptor(m=M, k=K, element="bf16", rule="optimal"),
    MaskSparse24Descriptor(m=M, k=K, element="f16"),
    MaskSparse24Descriptor(m=M, k=K, element="f32", layout="tiles"),
    QuantizeSparse24Descriptor(m=M, k=K, element="bf16"),
    QuantizeSparse24Descriptor(m=M, k=K, element="f32", out_element="s8", static_scale=True),
    PruneQuantizeSparse24Descriptor(m=M, k=K, element="bf16", scores="f32"),
    PruneQuantizeSparse24Descriptor(
        m=M, k=K, element="f16", dense_element="f32", stored="s8", group=0, rule="least_squares", sparse=True
    ),
    DequantizeSparse24Descriptor(m=M, k=K, element="bf16", group=32),
    DequantizeSparse24Descriptor(m=M, k=K, element="f16", stored="fp8_e4m3", scale_element="f32"),
)
SHAPE = BlockSparseShape(heads=2, rows=32, cols=48, block=16, blocks=7)
LARGE = BlockSparseShape(heads=2, rows=64, cols=128, block=64, blocks=3)
"""Blocks of a size that all kernels for tensor cores serve."""
FILTER = BlockSparseShape(heads=1, rows=128, cols=4 * 64, block=64, blocks=5)
"""Blocks of a filter of 2 x 2."""
CONVOLUTION = {"layout": FILTER, "batch": 2, "height": 5, "width": 6, "kernel": 2, "padding": 1}
BLOCKSPARSE: tuple[Any, ...] = (
    BlockSparseMatmulDescriptor(op="sdd", layout=SHAPE, n=5, batch=2, element="f32", alpha=0.5),
    BlockSparseMatmulDescriptor(op="dsd", layout=SHAPE, n=5, element="bf16", trans_a=True, epilogue="bias"),
    BlockSparseMatmulDescriptor(op="dds", layout=SHAPE, n=5, element="s8", out_element="f16", trans_a=True),
    BlockSparseMatmulDescriptor(
        op="dsd", layout=LARGE, n=8, element="bf16", batch=2, inner="sparse24", epilogue="bias"
    ),
    BlockSparseMatmulDescriptor(op="dds", layout=SHAPE, n=5, element="f32", batch=2, packed=True),
    BlockSparseMatmulDescriptor(op="dsd", layout=LARGE, n=7, element="bf16", packed=True, epilogue="bias"),
    BlockSparseSoftmaxDescriptor(
        layout=SHAPE, element="f32", batch=2, rpe=True, key_padding_mask="add", attn_mask="mul", causal=True
    ),
    BlockSparseSoftmaxDescriptor(layout=SHAPE, element="f16", op="backward", scale=0.5),
    BlockSparseAttentionDescriptor(
        layout=SHAPE, element="bf16", head_size=8, batch=2, kv_heads=1, causal=True, lengths=True
    ),
    BlockSparseAttentionDescriptor(layout=SHAPE, element="f32", head_size=4, op="backward"),
    BlockSparseAttentionDescriptor(layout=LARGE, element="bf16", head_size=64, kv_heads=1, lengths=True),
    BlockSparseAttentionDescriptor(layout=LARGE, element="f16", head_size=64, causal=True),
    BlockSparseAttentionDescriptor(layout=LARGE, element="bf16", head_size=64, op="backward", lengths=True),
    BlockSparseConv2dDescriptor(**CONVOLUTION, element="bf16", epilogue="bias_relu", stride=2),
    BlockSparseConv2dDescriptor(**CONVOLUTION, element="f16", op="dgrad", stride=2, dilation=(1, 2)),
    BlockSparseConv2dDescriptor(**CONVOLUTION, element="bf16", op="wgrad", out_element="f32"),
    BlockSparseConv2dDescriptor(**CONVOLUTION, element="f32"),
)


def is_on_host_alone(desc: Any) -> bool:
    """Whether no kernel of a GPU serves such problems: a test that is given one skips them."""
    if isinstance(desc, (PruneQuantizeSparse24Descriptor, DequantizeSparse24Descriptor)):
        return True
    if isinstance(desc, BlockSparseAttentionDescriptor):
        large = desc.layout.block >= 64 and desc.head_size % 8 == 0 and desc.head_size <= 256
        return desc.element is ElementKind.F32 or not large
    if isinstance(desc, BlockSparseConv2dDescriptor):
        return desc.element is ElementKind.F32
    return False


PROBLEMS: tuple[Any, ...] = (*GEMM, *PREPARE, *BLOCKSPARSE)
"""Problems of every family and kind of operand. The host serves all, Hopper all others than these."""
ON_HOST_ALONE = tuple(desc for desc in PROBLEMS if is_on_host_alone(desc))


def name_of(desc: Any) -> str:
    return f"{desc.op}-{desc.element}"


def select(desc: Any, device: int | str, **options: Any) -> Any:
    if is_on_host_alone(desc) and device not in ("host", "cpu"):
        pytest.skip("no kernel of the device serves it")
    return PLANS[type(desc)].select(desc, device=device, **options)


def matrix(
    rng: np.random.Generator, shape: tuple[int, ...], element: ElementKind, mood: str = "normal"
) -> np.ndarray:
    """Bits of elements: random numbers; any bits; a few distinct ones, with -0 and NaN; or mostly zeros."""
    size = 8 * element.itemsize
    if mood == "any_bits":
        return rng.integers(0, 2**size, shape, dtype=np.uint64).astype(element.bits_dtype)
    if mood == "ties":
        sign = 1 << size - 1
        few = np.array([0, 1, 2, sign, sign | 1, sign - 1, 2 * sign - 1], np.uint64)
        return rng.choice(few, shape).astype(element.bits_dtype)
    values = rng.standard_normal(shape).astype(np.float32)
    if element.is_integer:
        limits = np.iinfo(element.dtype)
        values = np.clip(np.rint(values * 40) + (0 if limits.min else 128), limits.min, limits.max)
    bits = values.astype(element.dtype).view(element.bits_dtype)
    return np.where(rng.random(shape) < 0.3, bits, 0).astype(bits.dtype) if mood == "sparse" else bits


def parts_of(operand: Operand) -> list[Operand]:
    """The operand itself; of a weight in a layout of its own the buffers that it consists of."""
    if operand.role is not Role.WEIGHT or operand.packing.layout is None:
        return [operand]
    (m, k), by = operand.shape, operand.packing.quantization
    if operand.packing.layout == CANONICAL_LAYOUT:
        parts = {"values": ((m, k // 2), operand.element), "metadata": ((m, k // 8), ElementKind.U16)}
        if by is not None:
            parts["values"] = (m, stored_width(k, by)), memory_element(by.element)
            parts["scales"] = (m, by.scales_of_a_row(k)), by.scale_element
    else:
        parts = {"packed": (layout_of(operand.element).packed_shape(m, k), ElementKind.U8)}
    return [
        replace(operand, name=name, shape=shape, element=element) for name, (shape, element) in parts.items()
    ]


def layout_of_shape(shape: BlockSparseShape, rng: np.random.Generator) -> BlockSparseLayout:
    """Any layout of the shape."""
    kept = np.zeros((shape.heads, shape.block_rows, shape.block_cols), bool)
    kept.reshape(-1)[rng.permutation(kept.size)[: shape.blocks]] = True
    return BlockSparseLayout(kept, shape.block)


def random_inputs(desc: Any, seed: int = 0) -> dict[str, Any]:
    """Bits of everything that is read, by the operand's name; a Sparse24Weight where the plan packs it."""
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {}
    for operand in desc.operands():
        if operand.role is Role.OUT:
            continue
        if operand.role is Role.TABLES:
            found[operand.name] = layout_of_shape(desc.layout, rng)
            continue
        if operand.role is Role.PACKED:
            found["layout"] = layout_of_shape(desc.layout, rng)
        bits = matrix(rng, operand.shape, operand.element)
        if operand.name == "metadata":  # of blocks: any bits aren't
            bits[...] = 0x44
        if operand.role in (Role.IN, Role.PACKED):
            found[operand.name] = bits
            continue
        weight = Sparse24Weight.prune_compress(bits, element=operand.element)
        if operand.packing.layout is None:
            found[operand.name] = weight
        elif operand.packing.quantization is not None:
            held = quantized_weight(weight, operand.packing.quantization)
            names = ("values", "metadata", "scales")
            found |= {name: view.bits() for name, view in zip(names, held.views, strict=True)}
        elif operand.packing.layout == CANONICAL_LAYOUT:
            found |= {"values": weight.values_view.bits(), "metadata": weight.metadata}
        else:
            found["packed"] = pack(weight).buffers[0].bits()
    return found


def quantized_weight(weight: Sparse24Weight, by: Quantization) -> Sparse24QuantizedWeight:
    fields = {"stored": by.element, "group": by.group, "scale_element": by.scale_element}
    return Sparse24QuantizedWeight.quantize(weight, **fields)


class PlanCase:
    """A plan and its operands: inputs as given, results poisoned, guard bytes round each.

    ``inputs``: bits of what is read, by the operand's name. ``without``: optional results to leave out.
    """

    def __init__(self, plan: Any, inputs: Mapping[str, Any], without: tuple[str, ...] = ()) -> None:
        self.plan, self.desc = plan, plan.descriptor
        self.device = "host" if plan.device.kind == "host" else plan.device.ordinal
        self.guarded: dict[str, Guarded] = {}
        self.written: list[str] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        given: dict[str, list[Any]] = {}
        for operand in self.desc.operands():
            for part in parts_of(operand):
                if part.name not in without:
                    given.setdefault(operand.argument, []).append(self._place(part, inputs))
        values = {name: self._whole(name, views) for name, views in given.items()}
        if any(operand.role is Role.PACKED for operand in self.desc.operands()):
            values["layout"] = None  # the packed operand brings its tables
        self.args = plan.args_type(self.desc)(**values)
        self.workspace = scratch(plan.workspace_size(), self.device)

    def _place(self, part: Operand, inputs: Mapping[str, Any]) -> Any:
        if part.role is Role.WEIGHT and part.packing.layout is None:
            return self.plan.pack(inputs[part.name].to(self.device))
        if part.role is Role.TABLES:
            return self.plan.pack(inputs[part.name])
        flat = (int(np.prod(part.shape)),)
        if part.lines is MatrixOrder.COLUMN:
            memory = Guarded(part.shape, part.element, self.device, part.shape[0], column=True)
        else:
            memory = Guarded(flat, part.element, self.device)
        if part.role is Role.OUT:
            self.written.append(part.name)
        else:
            bits = np.ascontiguousarray(inputs[part.name])
            memory.fill(bits if part.lines is MatrixOrder.COLUMN else bits.reshape(-1))
        self.guarded[part.name], self.shapes[part.name] = memory, part.shape
        if part.lines is MatrixOrder.COLUMN:
            return memory.view
        view = memory.view
        found = TensorView(view.address, part.shape, view.element, view.device, owner=view.owner)
        return self.plan.pack(inputs["layout"], found) if part.role is Role.PACKED else found

    def _whole(self, name: str, views: list[Any]) -> Any:
        """Return the operands as arguments take them: a weight is one object of several buffers."""
        (operand,) = (one for one in self.desc.operands() if one.argument == name)
        if operand.role is not Role.WEIGHT or operand.packing.layout is None:
            return views[0]
        if by := operand.packing.quantization:
            fields = {"stored": by.element, "group": by.group, "scale_element": by.scale_element}
            return Sparse24QuantizedWeight(*views, element=operand.element, validate=False, **fields)
        if operand.packing.layout == CANONICAL_LAYOUT:
            return Sparse24Weight(*views, element=operand.element, validate=False)
        return PackedWeight(
            operand.packing.layout, *operand.shape, operand.element, place_of(self.device), tuple(views)
        )

    @property
    def space(self) -> TensorView | None:
        return self.workspace and self.workspace.view

    def run(self, stream: Any = None) -> dict[str, np.ndarray]:
        self.plan.run(self.args, workspace=self.space, stream=stream)
        return self.fetch()

    def fetch(self) -> dict[str, np.ndarray]:
        """Bits of the results, by name; checks every guard."""
        synchronize(self.plan)
        if self.workspace is not None:
            self.workspace.numpy()
        contents = {name: memory.numpy() for name, memory in self.guarded.items()}
        return {
            name: contents[name].view(f"u{contents[name].itemsize}").reshape(self.shapes[name])
            for name in self.written
        }

    def poison(self) -> None:
        for name in self.written:
            bits = self.guarded[name].view.bits()
            bits[...] = bits.dtype.type(2 ** (8 * bits.itemsize) - 1)

    def untouched(self) -> bool:
        return all(self.guarded[name].untouched() for name in self.written)

    def tensors(self) -> list[str]:
        """Fields of the arguments that hold one tensor."""
        return [one.argument for one in self.desc.operands() if one.role in (Role.IN, Role.OUT)]


def case_of(desc: Any, device: int | str, seed: int = 0) -> PlanCase:
    return PlanCase(select(desc, device), random_inputs(desc, seed))


def rejected(case: PlanCase, args: object, kind: type[Sparse24Error], *words: str) -> Sparse24Error:
    """``run``, ``bind`` and ``can_implement`` refuse alike, and nothing is written. Returns the error."""
    with pytest.raises(kind) as caught:
        case.plan.run(args, workspace=case.space)
    error = caught.value
    assert isinstance(error, Sparse24Error)
    for word in words:
        assert word in str(error)
    with pytest.raises(kind) as bound:
        case.plan.bind(args, workspace=case.space)
    verdict = case.plan.can_implement(args)
    assert not verdict
    for other in (bound.value, verdict.error):
        assert (type(other), str(other)) == (type(error), str(error))
    assert case.untouched()
    return error


def changed(view: TensorView, **fields: Any) -> TensorView:
    """A view of the same memory with other fields. Strides are kept only if they are given."""
    kept = {"address": view.address, "shape": view.shape, "element": view.element, "device": view.device}
    return TensorView(**{**kept, "owner": view.owner, **fields})


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


# Kernels of the device ------------------------------------------------------------------------------


class _Medium(NamedTuple):
    """A problem of a size at which a kernel has many blocks."""

    desc: Any
    row: str | None = None
    """Name of the kernel entry, for products."""


def _gemm(row: str, **change: Any) -> _Medium:
    fields = {"n": 70, "m": 1024, "k": 512, "element": "bf16", "epilogue": "bias_gelu", **change}
    return _Medium(GemmSparse24Descriptor(**fields), row)


_SIZE: dict[str, Any] = {"m": 264, "k": 520, "element": "bf16"}
_BLOCKS = BlockSparseShape(heads=2, rows=320, cols=2048, block=32, blocks=400)
_FILTER = BlockSparseShape(heads=1, rows=256, cols=9 * 256, block=64, blocks=40)
_IMAGES: dict[str, Any] = {
    "layout": _FILTER,
    "batch": 5,
    "height": 20,
    "width": 19,
    "kernel": 3,
    "padding": 1,
}
_LARGE_BLOCKS = BlockSparseShape(heads=2, rows=640, cols=1024, block=64, blocks=60)
KERNELS: dict[str, _Medium] = {
    "inflate_cublas": _gemm("inflate_cublas"),
    "inflate_strict": _gemm("inflate_strict"),
    "mma_sp": _gemm("mma_sp", n=16),
    "mma_sp_many": _gemm("mma_sp_many"),
    "wgmma_sp": _gemm("wgmma_sp"),
    "wgmma_sp_invariant": _gemm("wgmma_sp_invariant"),
    "wgmma_sp_s8": _gemm("wgmma_sp_s8", element="s8", out_element="bf16"),
    "wgmma_sp_fp8": _gemm("wgmma_sp_fp8", element="fp8_e4m3"),
    "prune": _Medium(PruneSparse24Descriptor(**_SIZE)),
    "compress": _Medium(CompressSparse24Descriptor(**_SIZE)),
    "prune_compress": _Medium(PruneCompressSparse24Descriptor(**_SIZE)),
    "decompress": _Medium(DecompressSparse24Descriptor(**_SIZE)),
    "pack": _Medium(PackSparse24Descriptor(**_SIZE)),
    "unpack": _Medium(PackSparse24Descriptor(**_SIZE, direction="unpack")),
    "tile_prune": _Medium(TilePruneSparse24Descriptor(**_SIZE)),
    "mask": _Medium(MaskSparse24Descriptor(**_SIZE)),
    "mask_tiles": _Medium(MaskSparse24Descriptor(**_SIZE, layout="tiles")),
    "quantize": _Medium(QuantizeSparse24Descriptor(**_SIZE)),
    "blocks_wgmma_sp": _Medium(
        BlockSparseMatmulDescriptor(
            op="dsd", layout=_LARGE_BLOCKS, n=520, element="bf16", batch=2, inner="sparse24"
        )
    ),
    "softmax": _Medium(
        BlockSparseSoftmaxDescriptor(
            layout=_BLOCKS, element="bf16", batch=2, rpe=True, key_padding_mask="add", causal=True
        )
    ),
    "softmax_backward": _Medium(BlockSparseSoftmaxDescriptor(layout=_BLOCKS, element="f32", op="backward")),
    "conv2d": _Medium(BlockSparseConv2dDescriptor(**_IMAGES, element="bf16", epilogue="bias_silu")),
    "conv2d_dgrad": _Medium(BlockSparseConv2dDescriptor(**_IMAGES, element="f16", op="dgrad", stride=2)),
    "conv2d_wgrad": _Medium(BlockSparseConv2dDescriptor(**_IMAGES, element="bf16", op="wgrad")),
}
"""One problem for each kernel of the package's own."""


def kernel_case(name: str, device: int | str = 0, seed: int = 0, **change: Any) -> PlanCase:
    """``change``: other sizes and types. On the host: whatever row serves there."""
    desc, row = KERNELS[name]
    if change:
        desc = type(desc)(**{**desc.model_dump(exclude_unset=True), **change})
    kind = plan_of_row(row) if row and device != "host" else PLANS[type(desc)]
    return PlanCase(kind.select(desc, device=device), random_inputs(desc, seed))
