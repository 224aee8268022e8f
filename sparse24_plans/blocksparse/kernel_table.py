"""The kernel table of block-sparse problems: what each kernel serves and what it guarantees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..arithmetic.epilogue import UNGATED
from ..plan.cublaslt import needs_cublaslt
from ..plan.kernel import Choice
from ..plan.kernel_table import KernelEntry, with_wgmma
from ..vocab import (
    BLOCKS_LAYOUT,
    DENSE_BLOCKS_LAYOUT,
    BlockSparseOp,
    BlockSparsePass,
    ElementKind,
    EpilogueKind,
    InnerPattern,
    Tier,
)
from . import guarantees, limits
from .descriptor import (
    FLOATS,
    HALVES,
    MATMUL_ELEMENTS,
    PATTERNED,
    PATTERNED_BLOCKS,
    BlockSparseMatmulDescriptor,
)
from .kernel_problem import TMA_BYTES
from .schedules.conv_wgmma import conv_workspace
from .shape import BLOCK_SIZES


@dataclass(frozen=True)
class BlockSparseEntry(KernelEntry):
    """A kernel entry of the family."""

    layout: str = BLOCKS_LAYOUT
    strict: bool = False
    """Whether the host computes every step in a defined order; otherwise BLAS multiplies."""


@dataclass(frozen=True)
class MatmulEntry(BlockSparseEntry):
    """A kernel entry of products."""

    blocks: tuple[int, ...] = BLOCK_SIZES
    ops: tuple[BlockSparseOp, ...] = tuple(BlockSparseOp)
    epilogues: tuple[EpilogueKind, ...] = UNGATED
    inners: tuple[InnerPattern, ...] = (InnerPattern.DENSE,)
    packed: tuple[bool, ...] = (False, True)
    """Whether the kernel serves operands that plans have not packed, and those that they have."""
    code: str = ""
    """The module of ``backends/`` that has the kernel, if its name isn't the backend's."""
    invariant: bool = False
    """Whether the kernel takes the same order of sums for every ``n``, if it has several."""

    @property
    def module(self) -> str:
        return self.code or self.backend

    def refusal(self, descriptor: BlockSparseMatmulDescriptor) -> str | None:
        served: dict[str, tuple[Any, ...]] = {
            "inner": self.inners,
            "packed": self.packed,
            "op": self.ops,
            "epilogue": self.epilogues,
        }
        for field, values in served.items():
            if (asked := getattr(descriptor, field)) not in values:
                return f"does not serve {field} {asked}"
        if descriptor.layout.block not in self.blocks:
            return f"serves blocks of {', '.join(map(str, self.blocks))}, not {descriptor.layout.block}"
        return None

    def least_workspace(self, choice: Choice) -> int:
        descriptor: BlockSparseMatmulDescriptor = choice.descriptor
        smallest = descriptor.model_copy(update={"batch": 1})
        if descriptor.op is BlockSparseOp.SDD:
            return self.min_workspace(smallest)
        # One token, or the fewest whose rows TMA can read.
        return min(self.min_workspace(smallest.model_copy(update={"n": n})) for n in (1, TMA_BYTES))


_HOST = ("host", Tier.HOST)
_BLOCKS_MMA = MatmulEntry(
    "blocks_mma",
    "blocks_mma",
    Tier.TENSOR_CORE,
    guarantees.blocks_mma,
    HALVES,
    limits=limits.blocks_mma,
    ops=(BlockSparseOp.DSD, BlockSparseOp.DDS),
)
_SDD_MMA = replace(
    _BLOCKS_MMA,
    name="sdd_mma",
    guarantee=guarantees.sdd_mma,
    limits=limits.sdd_mma,
    ops=(BlockSparseOp.SDD,),
    code="sdd_mma",
)
_BLOCKS_WGMMA = with_wgmma(
    MatmulEntry(
        "blocks_wgmma",
        "blocks_wgmma",
        Tier.TENSOR_CORE,
        guarantees.blocks_wgmma,
        (*HALVES, ElementKind.S8, ElementKind.FP8_E4M3),
        limits=limits.blocks_wgmma,
        min_workspace=limits.prepared_workspace,
        epilogues=UNGATED,
    )
)
_BLOCKS_WGMMA_SP = with_wgmma(
    MatmulEntry(
        "blocks_wgmma_sp",
        "blocks_wgmma_sp",
        Tier.SPARSE_TENSOR_CORE,
        guarantees.sparse_tensor_cores,
        PATTERNED,
        limits=limits.blocks_wgmma_any,
        min_workspace=limits.prepared_workspace,
        blocks=PATTERNED_BLOCKS,
        ops=(BlockSparseOp.DSD, BlockSparseOp.DDS),
        epilogues=UNGATED,
        inners=(InnerPattern.SPARSE24,),
    )
)
_BLOCKS_STRICT = MatmulEntry(
    "blocks_strict",
    "blocks_strict",
    Tier.INFLATE,
    guarantees.strict_matmul,
    (ElementKind.F32,),
    limits=limits.blocks_strict,
    epilogues=UNGATED,
)
_INFLATE_CUBLAS = MatmulEntry(
    "inflate_cublas",
    "inflate_cublas",
    Tier.INFLATE,
    guarantees.cublas,
    FLOATS,
    limits=limits.cublas,
    min_workspace=lambda problem: sum(limits.inflated_regions(problem)),
    missing=needs_cublaslt,
    exportable=False,
    epilogues=UNGATED,
    packed=(False,),
)
MATMUL_ENTRIES: tuple[MatmulEntry, ...] = (
    _BLOCKS_MMA,
    _SDD_MMA,
    _BLOCKS_WGMMA,
    _BLOCKS_STRICT,
    _BLOCKS_WGMMA_SP,
    # This entry serves devices without wgmma.
    replace(_BLOCKS_MMA, name="blocks_mma_many", limits=limits.blocks_mma_many),
    _INFLATE_CUBLAS,
    # This entry multiplies the dense copy that its plans pack.
    replace(_INFLATE_CUBLAS, name="packed_dense", layout=DENSE_BLOCKS_LAYOUT, packed=(True,)),
    # This entry serves requirements that inflating does not meet.
    replace(
        _BLOCKS_WGMMA,
        name="blocks_wgmma_any",
        guarantee=guarantees.blocks_wgmma_any,
        limits=limits.blocks_wgmma_any,
        invariant=True,
    ),
    # This entry serves what no entry above it serves.
    replace(
        _BLOCKS_STRICT,
        name="blocks_strict_any",
        elements=MATMUL_ELEMENTS,
        limits=limits.blocks_strict_any,
    ),
    # These entries serve if the preference names them, or rules the others out.
    replace(
        _BLOCKS_MMA,
        name="blocks_mma_any",
        guarantee=guarantees.blocks_mma_any,
        limits=limits.blocks_mma_any,
    ),
    replace(_SDD_MMA, name="sdd_mma_any", limits=limits.sdd_mma_any),
    MatmulEntry(
        "host_blas", *_HOST, guarantees.host_blas_matmul, MATMUL_ELEMENTS, inners=tuple(InnerPattern)
    ),
    MatmulEntry(
        "host_strict",
        *_HOST,
        guarantees.strict_matmul,
        MATMUL_ELEMENTS,
        strict=True,
        epilogues=UNGATED,
        inners=tuple(InnerPattern),
    ),
)
SOFTMAX_ENTRIES: tuple[BlockSparseEntry, ...] = (
    BlockSparseEntry(
        "softmax",
        "softmax",
        Tier.MEMORY,
        guarantees.fixed_order,
        FLOATS,
        limits=limits.softmax,
    ),
    BlockSparseEntry("host_strict", *_HOST, guarantees.strict, FLOATS, strict=True),
)
_ATTENTION_WGMMA = with_wgmma(
    BlockSparseEntry(
        "attention_wgmma",
        "attention_wgmma",
        Tier.TENSOR_CORE,
        guarantees.attention,
        HALVES,
        limits=partial(limits.attention, BlockSparsePass.FORWARD),
        min_workspace=lambda problem: limits.ATTENTION_COUNTER_BYTES,
    )
)
ATTENTION_ENTRIES: tuple[BlockSparseEntry, ...] = (
    _ATTENTION_WGMMA,
    replace(
        _ATTENTION_WGMMA,
        name="attention_backward_wgmma",
        backend="attention_backward_wgmma",
        limits=partial(limits.attention, BlockSparsePass.BACKWARD),
        min_workspace=limits.backward_workspace,
    ),
    BlockSparseEntry("host_blas", *_HOST, guarantees.host_blas, FLOATS),
    BlockSparseEntry("host_strict", *_HOST, guarantees.strict_attention, FLOATS, strict=True),
)
CONVOLUTION_ENTRIES: tuple[BlockSparseEntry, ...] = (
    with_wgmma(
        BlockSparseEntry(
            "conv_wgmma",
            "conv_wgmma",
            Tier.TENSOR_CORE,
            guarantees.convolution,
            HALVES,
            limits=limits.conv_wgmma,
            min_workspace=conv_workspace,
        )
    ),
    BlockSparseEntry("host_blas", *_HOST, guarantees.host_blas, FLOATS),
    BlockSparseEntry("host_strict", *_HOST, guarantees.strict_convolution, FLOATS, strict=True),
)
