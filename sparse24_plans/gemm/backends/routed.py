"""A product of groups among other launches, which sort, gather and add up rows.

``gemm/route_rows.cu`` finds the places of a router's choices, and ``gemm/gather_rows.cu`` writes their rows
of X to the workspace. Any kernel that serves groups multiplies these, and ``gemm/combine_rows.cu`` adds up
the results. Steps that the caller has already done are left out. The host does the same in NumPy.
"""

from __future__ import annotations

from typing import Any

from ...device.jit.enum_codes import ELEMENT_CODES
from ...device.jit.launcher import load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.streams import Launch
from ...device.tensors import TensorView
from ...plan.kernel import Choice, align_up, launch_in_order, nothing
from ...plan.operands import Alignment, Views, address_of
from ...vocab import ElementKind, GroupTokens
from ...weights.weight import CanonicalWeight, PackedWeight
from ..kernel import GROUPS, GemmKernel, group_parameters
from ..routing import (
    VECTOR_BYTES,
    Regions,
    add_up,
    gathered_bytes,
    indexed_views,
    placed_choice,
    placed_views,
    row_bytes,
)

_ROUTE, _GATHER, _COMBINE = "gemm/route_rows.cu", "gemm/gather_rows.cu", "gemm/combine_rows.cu"
_THREADS, _CTAS_PER_SM = 256, 8
_COUNTS_BYTES = 96 << 10
"""Most shared memory for the counts of route_rows.cu, which every GPU has."""


@kernel_params("gemm/params/route_rows.cuh")
class RouteRowsParams(KernelParams):
    """Parameters of ``gemm/route_rows.cu``."""

    experts = field("const int*", "Groups that rows chose: [n]. Any other number is no group.")
    offsets = field("int*", "Places where the groups begin, and the last one's end: [groups + 1].")
    rows = field("int*", "The row whose choice has each place: [n].")
    places = field("int*", "The place of each choice: [n].")
    n = field("i64", "Number of choices, and of places.")
    groups = field("u32", "Number of groups.")
    top_k = field("u32", "Choices of a row.")


@kernel_params("gemm/params/gather_rows.cuh")
class GatherRowsParams(KernelParams):
    """Parameters of ``gemm/gather_rows.cu``."""

    x = field("const void*", "X[x_rows, columns].")
    index = field("const int*", "Row of X of each place [n], clamped to the rows that there are.")
    scale_x = field("const float*", "Scales of X's rows [x_rows], or null.")
    out = field("void*", "The places' rows, with zeros behind each: [n, row_vectors * 16 bytes].")
    scales_out = field("float*", "The places' scales [n].")
    group_tokens, groups, group_places = GROUPS.values()
    n = field("i64", "Number of places.")
    x_rows = field("i64", "Number of rows of X.")
    columns = field("i64", "Number of columns of X.")
    x_stride = field("i64", "Elements from one row of X to the next.")
    row_vectors = field("i64", "Number of 16-byte vectors of a place's row.")


@kernel_params("gemm/params/combine_rows.cuh")
class CombineRowsParams(KernelParams):
    """Parameters of ``gemm/combine_rows.cu``."""

    results = field("const void*", "The places' results, whose rows begin at multiples of 16 bytes.")
    index = field("const int*", "Places that are added to each row of Y: [y_rows, top_k].")
    weights = field("const float*", "Factors of the places' results [y_rows, top_k], or null.")
    y = field("void*", "Y[y_rows, columns].")
    group_tokens, groups, group_places = GROUPS.values()
    top_k = field("u32", "Number of places of a row of Y.")
    n = field("i64", "Number of places.")
    y_rows = field("i64", "Number of rows of Y.")
    columns = field("i64", "Number of columns of Y.")
    y_stride = field("i64", "Elements from one row of Y to the next.")
    result_stride = field("i64", "Elements from one place's results to the next.")
    row_vectors = field("i64", "Number of 16-byte vectors that cover a row of Y.")


class Kernel(GemmKernel):
    sources = (_ROUTE, _GATHER, _COMBINE)
    workspace_alignment = 256

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device, inner = self.descriptor, choice.device, placed_choice(choice)
        self._product: GemmKernel = choice.entry.kernel(inner)
        self._sorts = desc.group_tokens is GroupTokens.EXPERTS
        self._gathers, self._adds = desc.x_rows is not None, desc.y_rows is not None
        before = "choices sorted" * self._sorts, "rows gathered" * self._gathers
        parts = *before, self._product.details, "results added up" * self._adds
        self.details = ", ".join(filter(None, parts))  # an empty product has no details
        if self.entry.on_host:
            return
        self._regions, self._ctas = Regions.of(desc), device.multiprocessors * _CTAS_PER_SM
        self._rows_at = align_up(self._product.workspace_size)
        self.workspace_size = self._rows_at + sum(self._regions)
        self.launches = self._product.launches + self._sorts + self._gathers + self._adds
        if self._sorts:
            # A count of each warp for each group, and for the choices before and behind them.
            warps = 32 if 32 * 4 * (desc.groups + 2) <= _COUNTS_BYTES else 16
            shared = warps * 4 * (desc.groups + 2)
            self._route = load(
                _ROUTE, "route_rows", 32 * warps, device, {"WARPS": warps}, shared_bytes=shared
            )
        if self._gathers:
            size = desc.x_element.itemsize
            self._gather = load(_GATHER, "gather_rows", _THREADS, device, {"BYTES": size})
        if self._adds:
            out = ELEMENT_CODES[desc.out_element]
            self._combine = load(_COMBINE, "combine_rows", _THREADS, device, {"OUT": out})

    @classmethod
    def compile(cls, choice: Choice) -> list[Any]:
        return [] if choice.entry.on_host else super().compile(choice)

    @classmethod
    def most_workspace(cls, choice: Choice) -> int:
        inner = placed_choice(choice)
        return align_up(choice.entry.kernel.most_workspace(inner)) + sum(Regions.of(choice.descriptor))

    @classmethod
    def arithmetic(cls, choice: Choice) -> str | None:
        named: str | None = choice.entry.kernel.arithmetic(placed_choice(choice))
        return named

    def alignment_of(self, operand: str) -> Alignment:
        """The product's, but for the operands that other launches read and write."""
        apart = ("source",) * self._gathers + ("result",) * self._adds
        return Alignment() if operand in apart else self._product.alignment_of(operand)

    def pack(self, weight: CanonicalWeight) -> PackedWeight:
        return self._product.pack(weight)

    def launcher(self, views: Views, workspace: int) -> Launch:
        if self.entry.on_host:
            return lambda stream: self._run(views, stream)
        return launch_in_order(*self._launches(views, workspace))

    def _run(self, views: Views, stream: int) -> None:
        desc, views = self.descriptor.indexed, indexed_views(self.descriptor, views)
        inner = placed_views(desc, views)
        self._product.launcher(inner, 0)(stream)
        if self._adds:
            add_up(desc, views, inner["result"].bits())

    def _launches(self, views: Views, workspace: int) -> list[Launch]:
        desc, found, at = self.descriptor, [], workspace + self._rows_at
        if self._sorts:
            views, launch = self._sorted(views, at)
            found.append(launch)
        at += self._regions.offsets + self._regions.x_index + self._regions.y_index
        inner = dict(views)
        rows = _room(at, (desc.n, desc.reduction), views["source"])
        scales = at + self._regions.source
        results = _room(scales + self._regions.scales, (desc.n, desc.outputs), views["result"])
        if self._gathers:
            inner["source"] = rows
            if self._regions.scales:
                inner["scale_x"] = TensorView(scales, (desc.n,), ElementKind.F32, rows.device)
            found.append(self._gathered(views, rows, scales))
        if self._adds:
            inner["result"] = results
        found.append(self._product.launcher(inner, workspace))
        if self._adds:
            found.append(self._added(views, results))
        return found

    def _sorted(self, views: Views, at: int) -> tuple[Views, Launch]:
        """The operands with offsets and indices at an address, and the launch that writes these."""
        desc, home, own = self.descriptor, views["source"].device, {}
        for name, count in (("offsets", desc.groups + 1), ("x_index", desc.n), ("y_index", desc.n)):
            own[name] = TensorView(at, (count,), ElementKind.I32, home)
            at += getattr(self._regions, name)
        parameters = RouteRowsParams(
            experts=views["experts"].address,
            offsets=own["offsets"].address,
            rows=own["x_index"].address,
            places=own["y_index"].address,
            n=desc.n,
            groups=desc.groups,
            top_k=desc.top_k,
        )
        return {**views, **own}, self._route.bind(1, parameters, overlapping=True)

    def _gathered(self, views: Views, rows: TensorView, scales: int) -> Launch:
        desc, x = self.descriptor, views["source"]
        vectors = gathered_bytes(desc) // VECTOR_BYTES
        parameters = GatherRowsParams(
            x=x.address,
            index=views["x_index"].address,
            scale_x=views["scale_x"].address if self._regions.scales else 0,
            out=rows.address,
            scales_out=scales,
            n=desc.n,
            x_rows=desc.x_rows,
            columns=desc.reduction,
            x_stride=x.strides[0],
            row_vectors=vectors,
            **group_parameters(desc.indexed, views),
        )
        return self._bound(self._gather, desc.n * vectors, parameters)

    def _added(self, views: Views, results: TensorView) -> Launch:
        desc, y = self.descriptor, views["result"]
        vectors = row_bytes(desc.outputs, desc.out_element) // VECTOR_BYTES
        parameters = CombineRowsParams(
            results=results.address,
            index=views["y_index"].address,
            weights=address_of(views, "y_weights"),
            y=y.address,
            top_k=desc.top_k,
            n=desc.n,
            y_rows=desc.y_rows,
            columns=desc.outputs,
            y_stride=y.strides[0],
            result_stride=results.strides[0],
            row_vectors=vectors,
            **group_parameters(desc.indexed, views),
        )
        return self._bound(self._combine, y.shape[0] * vectors, parameters)

    def _bound(self, function: Any, vectors: int, parameters: KernelParams) -> Launch:
        ctas = min(-(-vectors // _THREADS), self._ctas)
        return function.bind(ctas, parameters, overlapping=True) if ctas else nothing


def _room(at: int, shape: tuple[int, int], like: TensorView) -> TensorView:
    """The places' rows in the workspace, with the element of the operand whose place they take."""
    stride = row_bytes(shape[1], like.element) // like.element.itemsize
    return TensorView(at, shape, like.element, like.device, strides=(stride, 1))
