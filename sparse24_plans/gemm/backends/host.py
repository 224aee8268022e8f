"""The host kernels, in NumPy: ``host_blas`` calls BLAS on a dense weight; ``host_strict`` is the oracle.

The strict mode computes the bits of ``gemm/inflate_strict.cu``: one float32 accumulator per result, one fma
per kept position in increasing order, then the kernels' epilogue. Both modes sum products of s8 exactly.

Tokens are computed in blocks, and a canonical weight is inflated some rows at a time. This bounds a run's
scratch memory to a few times 64 MiB, or to the memory for 128 tokens if that is more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...arithmetic import epilogue
from ...arithmetic.fma32 import fma_chain, fma_f32
from ...device.streams import Launch
from ...device.subnormals import check_subnormals
from ...device.tensors import TensorView
from ...plan.kernel import Choice
from ...plan.operands import Views
from ...vocab import CANONICAL_LAYOUT, ElementKind, GemmOp, ScaleKind
from ...weights import canonical, dense, threads
from ...weights.quantized_weight import Sparse24QuantizedWeight
from ...weights.weight import CanonicalWeight, PackedWeight
from ..groups import kept_bits, lines_of, part_problems
from ..kernel import GemmKernel

Array = np.ndarray[Any, Any]
Product = Callable[[Array], Array]
"""Function from the source [tokens, reduction] in float32 to the sums in float32, or in float64 for s8."""

_CELLS, _STRICT_CELLS = 1 << 24, 1 << 20
"""Cells of a block of tokens (source or result, whichever is larger) for BLAS and for strict sums."""
_MIN_TOKENS = 128
"""Tokens of a block for BLAS at least. With fewer, BLAS would spend its time reading the weight."""
_INFLATED_CELLS = 1 << 22
"""Cells of a canonical weight that are inflated at once."""
_EXACT_TERMS = {GemmOp.FORWARD: 2048, GemmOp.DGRAD: 1024}
"""Terms of an s8 sum that float32 holds exactly in any order: 1024 non-zero products of at most 2^14."""


class Kernel(GemmKernel):
    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        self._choice = choice
        self.details = "NumPy, emulated float32 fma" if self.entry.strict else "NumPy, BLAS"
        self._forward = self.descriptor.op is GemmOp.FORWARD

    def pack(self, weight: CanonicalWeight) -> PackedWeight:
        if self.entry.layout == CANONICAL_LAYOUT:
            return PackedWeight.canonical(weight)
        whole = weight.dequantize() if isinstance(weight, Sparse24QuantizedWeight) else weight
        return dense.pack(whole, weight.quantization)

    def launcher(self, views: Views, workspace: int) -> Launch:
        if self.descriptor.groups or self.descriptor.is_batched:
            return lambda stream: self._run_parts(views)
        return lambda stream: self._run(views)

    def _run_parts(self, views: Views) -> None:
        for problem, operands in part_problems(self.descriptor, views):
            Kernel(self._choice._replace(descriptor=problem))._run(operands)

    def _run(self, views: Views) -> None:
        check_subnormals()
        with np.errstate(all="ignore"):  # overflow, Inf and NaN are results here, not accidents
            product_of, fp8 = self._product_of(views), epilogue.Fp8Scale.of(views)
            for tokens in self._token_steps():
                product = product_of(_widened(lines_of(views["source"], tokens)))
                self._finish(product, tokens, views, fp8)

    def _token_steps(self) -> Iterator[slice]:
        desc = self.descriptor
        width = max(desc.m, desc.k, 1)
        step = _STRICT_CELLS // width if self.entry.strict else max(_CELLS // width, _MIN_TOKENS)
        return _steps(desc.n, max(step, 1))

    # The sums ---------------------------------------------------------------------------------------

    def _product_of(self, views: Views) -> Product:
        desc = self.descriptor
        if self.entry.strict and desc.element is not ElementKind.S8:
            kept = dense.widened(kept_bits(desc, views), desc.element)
            codes = canonical.from_metadata(views["metadata"].bits())
            columns = canonical.positions(codes.reshape(desc.m, desc.k // 4))
            if self._forward:
                return lambda source: _strict_forward(source, kept, columns)
            return lambda source: _strict_dgrad(source, kept, columns, desc.k)
        if "packed" in views:
            whole = dense.matrix(views["packed"], desc.m, desc.k)
            return lambda source: self._multiply(source, whole.T if self._forward else whole)
        return lambda source: self._multiply_inflated(source, views)

    def _multiply(self, left: Array, right: Array) -> Array:
        if self.descriptor.element is not ElementKind.S8:
            product: Array = left @ right
            return product
        most = _EXACT_TERMS[self.descriptor.op]
        total = (left[:, :most] @ right[:most]).astype(np.float64)
        for terms in _steps(right.shape[0], most, most):
            total += left[:, terms] @ right[terms]
        return total

    def _multiply_inflated(self, source: Array, views: Views) -> Array:
        """Multiply with a canonical weight, inflating some of its rows at a time."""
        desc = self.descriptor
        values, metadata = kept_bits(desc, views), views["metadata"].bits()
        step = max(_INFLATED_CELLS // max(desc.k, 1), 1)
        block = np.empty((min(step, desc.m), desc.k), np.float32)
        sums = np.float64 if desc.element is ElementKind.S8 else np.float32
        total = np.zeros((source.shape[0], desc.sums), sums)
        for rows in _steps(desc.m, step):
            part = block[: rows.stop - rows.start]
            dense.inflate(values[rows], metadata[rows], desc.element, part)
            if self._forward:
                total[:, rows] = self._multiply(source, part.T)
            else:
                total += self._multiply(source[:, rows], part)
        return total

    # The epilogue -----------------------------------------------------------------------------------

    def _finish(self, product: Array, tokens: slice, views: Views, fp8: epilogue.Fp8Scale) -> None:
        """Apply scales, epilogue and rounding to blocks of rows that fit the cache."""

        def finish(rows: slice) -> None:
            at = slice(tokens.start + rows.start, tokens.start + rows.stop)
            self._finish_rows(product[rows], at, views, fp8)

        threads.for_each(finish, canonical.row_steps(product.shape[0], product.shape[1], True))

    def _finish_rows(self, product: Array, tokens: slice, views: Views, fp8: epilogue.Fp8Scale) -> None:
        desc, scale_x = self.descriptor, None
        if "scale_x" in views:
            scale = views["scale_x"].array()
            scale_x = (scale[tokens] if desc.scale_x is ScaleKind.ROW else scale)[:, None]
        scale_w, bias = (views[name].array() if name in views else None for name in ("scale_w", "bias"))
        addend = None
        if "c" in views:
            addend = epilogue.addend_of(lines_of(views["c"], tokens).array(), desc.beta)
        result = lines_of(views["result"], tokens)
        result.bits()[...] = epilogue.finished(product, desc, scale_x, scale_w, bias, addend, fp8)


def _steps(count: int, step: int, first: int = 0) -> Iterator[slice]:
    for start in range(first, count, step):
        yield slice(start, min(start + step, count))


def _widened(view: TensorView) -> Array:
    """The matrix in float32; a float32 matrix is not copied."""
    if view.element is ElementKind.F32:
        own: Array = view.array()
        return own
    bits, wide = view.bits(), np.empty(view.shape, np.float32)
    threads.for_each(
        lambda rows: dense.widen(bits[rows], view.element, wide[rows]),
        canonical.row_steps(view.shape[0], view.shape[1], True),
    )
    return wide


# Strict accumulation ------------------------------------------------------------------------------


def _strict_forward(x: Array, kept: Array, columns: Array) -> Array:
    by_column = np.ascontiguousarray(x.T)

    def factors(steps: slice) -> tuple[Array, Array]:
        return by_column[columns[:, steps].T], kept[:, steps].T[..., None]

    return fma_chain(kept.shape[1], factors, np.zeros((kept.shape[0], x.shape[0]), np.float32)).T


def _strict_dgrad(dy: Array, kept: Array, columns: Array, k: int) -> Array:
    acc = np.zeros((dy.shape[0], k), np.float32)
    for i in range(kept.shape[0]):
        at = columns[i]
        acc[:, at] = fma_f32(dy[:, i : i + 1], kept[i], acc[:, at])
    return acc
