"""The table of gemm kernels: the problems that each serves, and its guarantee."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from ..arithmetic.epilogue import IN_STEPS, UNGATED
from ..errors import InvalidProblemError
from ..plan.cublaslt import needs_cublaslt
from ..plan.kernel import Choice, Kernel
from ..plan.kernel_table import KernelEntry, with_wgmma
from ..vocab import (
    CANONICAL_LAYOUT,
    CUSPARSELT_LAYOUT,
    DENSE_F32_LAYOUT,
    FP8,
    TILE64X64_LAYOUT,
    TILE64X64_PARTS_LAYOUT,
    TILE64X128_LAYOUT,
    TILE64X256_LAYOUT,
    ArchSku,
    ElementKind,
    EpilogueKind,
    GemmOp,
    GroupTokens,
    MatrixOrder,
    ScaleKind,
    Tier,
)
from ..weights.packed_layouts import QUANTIZED_LAYOUTS
from . import guarantees, limits
from .arithmetic.bf16_terms import MAX_TERMS
from .descriptor import GemmSparse24Descriptor, of_places
from .limits import BF16, E4M3, F16, F32, S8
from .routing import Regions


@dataclass(frozen=True)
class GemmEntry(KernelEntry):
    """A gemm kernel. ``limits`` may refuse some of the problems that the fields allow."""

    elements: tuple[ElementKind, ...] = (F32, F16, BF16)
    ops: tuple[GemmOp, ...] = (GemmOp.FORWARD, GemmOp.DGRAD)
    epilogues: tuple[EpilogueKind, ...] = tuple(EpilogueKind)
    column_order: bool = False
    """The kernel serves column-major X and Y."""
    scales: bool = False
    """The kernel takes scale_x and scale_w."""
    adds_c: bool = True
    """The kernel adds beta * C."""
    strict: bool = False
    """The host kernel adds one fma after the other, as inflate_strict does, instead of calling BLAS."""
    promoted: bool = False
    """Sums of fp8 products are promoted: float32 adds them outside of the tensor cores."""
    quantized: bool = False
    """The kernel takes quantized weights."""
    groups: bool = False
    """The kernel serves groups of tokens with weights of their own."""
    batches: bool = False
    """The kernel serves batches. A single batch is served by every kernel."""
    fp8_results: bool = True
    """The kernel rounds results to fp8."""
    only_groups: bool = False
    """The kernel serves no problem without groups."""
    split_terms: int = 0
    """Number of bf16 terms in which float32 is multiplied; 0: operands are multiplied as they are."""

    @property
    def module(self) -> str:
        if self.only_groups:
            return f"{self.backend}_grouped"
        return "f32_split" if self.split_terms else self.backend

    @property
    def least_groups(self) -> int:
        """Groups of the simplest problem that the kernel serves."""
        return int(self.only_groups)

    def layout_of(self, descriptor: GemmSparse24Descriptor) -> str:
        by = descriptor.quantization
        if self.layout == CUSPARSELT_LAYOUT and descriptor.is_batched and not descriptor.shared_weight:
            return f"{self.layout}_x{descriptor.batch_count}"  # a blob for each batch
        return self.layout if by is None or self.on_host else QUANTIZED_LAYOUTS[by.element]

    def least_capability(self, descriptor: GemmSparse24Descriptor) -> tuple[int, int]:
        return (
            max(self.min_compute_capability, limits.WITH_FP8)
            if descriptor.is_fp8
            else self.min_compute_capability
        )

    def refusal(self, descriptor: GemmSparse24Descriptor) -> str | None:
        if descriptor.op not in self.ops:
            return f"does not serve op {descriptor.op}"
        if descriptor.epilogue not in self.epilogues:
            return f"does not serve epilogue {descriptor.epilogue}"
        if not self.column_order and MatrixOrder.COLUMN in (descriptor.x_order, descriptor.y_order):
            return "serves x_order and y_order row"
        none = ScaleKind.NONE
        if not self.scales and (descriptor.scale_x, descriptor.scale_w) != (none, none):
            return "takes no scale_x or scale_w"
        if not self.fp8_results and descriptor.is_fp8:
            return f"serves no out_element {descriptor.out_element}"
        if not self.adds_c and descriptor.has_c:
            return f"adds no C, got beta {descriptor.beta}"
        if not self.quantized and descriptor.quantization is not None:
            return f"multiplies no weight of {descriptor.quantization}"
        if descriptor.groups and not self.groups:
            return "serves no groups"
        return (
            f"serves one batch, got {descriptor.batches}"
            if descriptor.is_batched and not self.batches
            else None
        )

    def ranks_last(self, descriptor: GemmSparse24Descriptor) -> bool:
        return self.split_terms > 0 and limits.has_small_batches(descriptor)

    def other_kind(self, descriptor: GemmSparse24Descriptor) -> str | None:
        return "serves groups only" if self.only_groups and not descriptor.groups else None

    def cuts_k_by_n(self, descriptor: GemmSparse24Descriptor) -> bool:
        """Whether K may be summed in as many pieces as suit n: its bits may depend on n, or are exact."""
        return descriptor.element is S8 or not self.guarantee(descriptor).batch_invariant

    def least_workspace(self, choice: Choice) -> int:
        descriptor: GemmSparse24Descriptor = choice.descriptor
        if descriptor.group_tokens is GroupTokens.COUNTS:
            numbers: tuple[int, ...] = (descriptor.step,)
        else:  # with 16 tokens the columns of a column-major X are multiples of 16 bytes
            numbers = descriptor.step, 16 * descriptor.step
        smallest = [choice._replace(descriptor=of_places(descriptor, n)) for n in numbers]
        return min(self.needed_workspace(one) for one in smallest)

    def needed_workspace(self, choice: Choice) -> int:
        routing = 0 if self.on_host else sum(Regions.of(choice.descriptor))
        return super().needed_workspace(choice) + routing

    def kernel_for(self, descriptor: GemmSparse24Descriptor) -> type[Kernel[GemmSparse24Descriptor]]:
        return self._kernel_of("routed") if descriptor.is_routed else self.kernel

    def shard_refusal(self, descriptor: GemmSparse24Descriptor, whole_m: int) -> str | None:
        if descriptor.op is not GemmOp.FORWARD:
            return f"whole_m is for op forward: {descriptor.op} sums over M"
        if descriptor.m > whole_m:
            return f"m = {descriptor.m} exceeds whole_m = {whole_m}"
        if descriptor.m < whole_m and self.whole_of(descriptor, whole_m) is None:
            return f"no weight of such a problem has whole_m = {whole_m} rows"
        if not self.guarantee(descriptor).batch_invariant:
            return "is not batch invariant, so its bits depend on M: whole_m asks for those of the whole"
        return None

    def whole_of(self, descriptor: GemmSparse24Descriptor, whole_m: int) -> GemmSparse24Descriptor | None:
        if descriptor.op is GemmOp.FORWARD and descriptor.m < whole_m:
            with suppress(InvalidProblemError):
                return descriptor.model_copy(update={"m": whole_m})
        return None


# This kernel serves any n. It is chosen without wgmma if batch invariance is required.
_MMA_SP_MANY = GemmEntry(
    name="mma_sp_many",
    backend="mma_sp",
    tier=Tier.SPARSE_TENSOR_CORE,
    arch=ArchSku.SM80,
    guarantee=guarantees.mma_sp,
    elements=(F16, BF16),
    ops=(GemmOp.FORWARD,),
    layout=TILE64X128_LAYOUT,
    column_order=True,
    batches=True,
    limits=limits.mma_sp,
)

_WGMMA_SP = replace(
    with_wgmma(_MMA_SP_MANY),
    name="wgmma_sp",
    backend="wgmma_sp",
    guarantee=guarantees.wgmma_sp,
    limits=limits.wgmma_sp,
    min_workspace=limits.wgmma_sp_workspace,
    quantized=True,
)

_WGMMA_SP_8BIT = replace(
    _WGMMA_SP, layout=TILE64X256_LAYOUT, column_order=False, scales=True, quantized=False
)


_WGMMA_SP_GROUPED = replace(
    _WGMMA_SP,
    name="wgmma_sp_grouped",
    column_order=False,
    groups=True,
    only_groups=True,
    batches=False,
    adds_c=False,
    limits=limits.wgmma_sp_grouped,
)
_WGMMA_SP_GROUPED_8BIT = replace(_WGMMA_SP_GROUPED, layout=TILE64X256_LAYOUT, scales=True, quantized=False)


def _f32_split(name: str, backend: str, terms: int) -> GemmEntry:
    """A kernel that multiplies float32 in ``terms`` bf16 terms."""
    return replace(
        _WGMMA_SP,
        name=name,
        backend=backend,
        guarantee=partial(guarantees.split, terms),
        elements=(F32,),
        layout=TILE64X64_LAYOUT if terms == MAX_TERMS else TILE64X64_PARTS_LAYOUT,
        limits=partial(limits.f32_split, terms),
        column_order=False,
        for_a_bound=terms < MAX_TERMS,
        split_terms=terms,
        quantized=False,
    )


def _invariant(entry: GemmEntry) -> GemmEntry:
    guarantee = partial(guarantees.split_invariant, entry.split_terms)
    return replace(entry, name=f"{entry.name}_invariant", guarantee=guarantee)


_F32_SPLIT3 = _f32_split("f32_split3", "f32_split3", 2)
_F32_SPLIT6 = _f32_split("f32_split6", "f32_split6", MAX_TERMS)

_HOST_ELEMENTS = (F32, F16, BF16, S8, *FP8)

_CUSPARSELT = GemmEntry(
    name="cusparselt",
    backend="cusparselt",
    tier=Tier.SPARSE_TENSOR_CORE,
    arch=ArchSku.SM80,
    guarantee=guarantees.cusparselt,
    elements=(F16, BF16, S8),
    ops=(GemmOp.FORWARD,),
    # The library has no SiLU, and its GELU is the tanh approximation.
    epilogues=tuple(kind for kind in UNGATED if kind.activation in limits.CUSPARSELT_ACTIVATIONS),
    layout=CUSPARSELT_LAYOUT,
    column_order=True,
    scales=True,
    adds_c=False,
    batches=True,
    fp8_results=False,
    limits=limits.cusparselt,
    missing=limits.needs_cusparselt,
    exportable=False,
)

_STRICT = GemmEntry(
    name="inflate_strict",
    backend="inflate_strict",
    tier=Tier.INFLATE,
    guarantee=guarantees.strict,
    groups=True,
    batches=True,
    limits=limits.strict,
)

ENTRIES: tuple[GemmEntry, ...] = (
    _WGMMA_SP,
    # The next kernel serves where batch invariance is required.
    replace(_WGMMA_SP, name="wgmma_sp_invariant", guarantee=guarantees.mma_sp),
    replace(_WGMMA_SP_8BIT, name="wgmma_sp_s8", guarantee=guarantees.wgmma_sp_s8, elements=(S8,)),
    replace(_WGMMA_SP_8BIT, name="wgmma_sp_fp8", guarantee=guarantees.wgmma_sp_fp8, elements=FP8),
    replace(
        _WGMMA_SP_8BIT,
        name="wgmma_sp_fp8_invariant",
        guarantee=guarantees.mma_sp_fp8,
        elements=FP8,
    ),
    replace(
        _WGMMA_SP_8BIT,
        name="wgmma_sp_fp8_promoted",
        guarantee=guarantees.wgmma_sp_fp8_promoted,
        elements=FP8,
        promoted=True,
    ),
    _WGMMA_SP_GROUPED,
    replace(_WGMMA_SP_GROUPED, name="wgmma_sp_grouped_invariant", guarantee=guarantees.mma_sp),
    replace(
        _WGMMA_SP_GROUPED_8BIT,
        name="wgmma_sp_grouped_s8",
        guarantee=guarantees.wgmma_sp_s8,
        elements=(S8,),
    ),
    replace(
        _WGMMA_SP_GROUPED_8BIT,
        name="wgmma_sp_grouped_fp8",
        guarantee=guarantees.wgmma_sp_fp8,
        elements=FP8,
    ),
    replace(
        _WGMMA_SP_GROUPED_8BIT,
        name="wgmma_sp_grouped_fp8_invariant",
        guarantee=guarantees.mma_sp_fp8,
        elements=FP8,
    ),
    # The faster kernel comes first; it is chosen where its error bound is enough.
    _F32_SPLIT3,
    _invariant(_F32_SPLIT3),
    _F32_SPLIT6,
    _invariant(_F32_SPLIT6),
    # The next kernels serve devices without wgmma.
    replace(_MMA_SP_MANY, name="mma_sp", limits=limits.mma_sp_few),
    GemmEntry(
        name="inflate_cublas",
        backend="inflate_cublas",
        tier=Tier.INFLATE,
        guarantee=guarantees.cublas,
        epilogues=UNGATED,
        column_order=True,
        fp8_results=False,
        limits=limits.cublas,
        min_workspace=lambda problem: sum(limits.cublas_regions(problem)),
        missing=needs_cublaslt,
        exportable=False,
    ),
    _MMA_SP_MANY,
    _STRICT,
    # cuSPARSELt comes after this package's own kernels, whose bits and layouts the package can guarantee. It
    # is chosen for problems that they don't serve, and on request.
    _CUSPARSELT,
    replace(_CUSPARSELT, name="cusparselt_fp8", min_compute_capability=limits.WITH_FP8, elements=(E4M3,)),
    # The next kernels serve fp8 on devices without wgmma, and what nothing before them serves.
    replace(
        _MMA_SP_MANY,
        name="mma_sp_fp8",
        arch=ArchSku.SM89,
        min_compute_capability=limits.WITH_FP8,
        guarantee=guarantees.mma_sp_fp8,
        elements=FP8,
        layout=TILE64X256_LAYOUT,
        column_order=False,
        scales=True,
        limits=limits.mma_sp_fp8,
    ),
    replace(
        _STRICT,
        name="inflate_strict_fp8",
        min_compute_capability=limits.WITH_FP8,
        elements=FP8,
        scales=True,
    ),
    GemmEntry(
        name="host_blas",
        backend="host",
        tier=Tier.HOST,
        guarantee=guarantees.host_blas,
        layout=DENSE_F32_LAYOUT,
        also_reads=(CANONICAL_LAYOUT,),
        elements=_HOST_ELEMENTS,
        column_order=True,
        scales=True,
        groups=True,
        batches=True,
        quantized=True,
    ),
    GemmEntry(
        name="host_strict",
        strict=True,
        backend="host",
        tier=Tier.HOST,
        guarantee=guarantees.strict,
        elements=_HOST_ELEMENTS,
        column_order=True,
        scales=True,
        groups=True,
        batches=True,
        quantized=True,
    ),
    # Computes the tensor cores' bits on the host, for audits. It is chosen if an arithmetic is required by
    # name.
    GemmEntry(
        name="host_tensor_core",
        backend="host_tensor_core",
        tier=Tier.HOST,
        guarantee=guarantees.host_tensor_core,
        elements=(F32, F16, BF16, *FP8),
        ops=(GemmOp.FORWARD,),
        epilogues=IN_STEPS,
        column_order=True,
        scales=True,
        groups=True,
        batches=True,
        quantized=True,
        on_request=True,
    ),
)


def find(name: str) -> GemmEntry | None:
    """Return the kernel of this name."""
    return next((entry for entry in ENTRIES if entry.name == name), None)
