"""Promises of kernels about their numbers, requirements of callers, and the error bounds behind both."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal, SupportsFloat

import numpy as np
from pydantic import AfterValidator

from ..device.tensors import TensorView
from ..errors import InvalidProblemError, refusing, shown
from ..vocab import (
    INT64_MAX,
    ElementKind,
    ElementLike,
    EpilogueKind,
    Flag,
    Float64s,
    Integer,
    MathPrecision,
    Model,
    Number,
    element_kind,
    integer,
)
from ..weights.gates import GATE_GROUP
from . import tolerance
from .arithmetic import complaint_of


def _arithmetics_name(name: str) -> str:
    if (complaint := complaint_of(name)) is not None:
        raise ValueError(complaint)
    return name


ArithmeticName = Annotated[str, AfterValidator(_arithmetics_name)]
"""The name of an arithmetic in :mod:`sparse24_plans.plan.arithmetic`."""
MIN_IN_PARTS = 2.0**-108
"""The least magnitude that counts if float32 is split into bf16 terms (docs/guarantees.md)."""
FP8_ROUNDOFF = 2.0**-13
"""Largest relative error of one step of Hopper's tensor cores on fp8, which keep about 13 bits below the
largest addend."""


class PrecisionGuarantee(Model):
    """The promises of a kernel about its numbers. A promise that no test confirms is not made.

    ``math_precision``: precision of the operands as they enter the multiplier.
    ``accumulator``: type of the running sum.
    ``deterministic``: same plan, same inputs, same bits.
    ``bit_stable_on_same_hardware``: the same bits across processes, streams and load, for the same library
    versions.
    ``batch_invariant``: row i of Y depends on row i of X and on W alone, whatever n and i are.
    ``bit_stable_across_hardware``: the same bits on every device and on the host's strict mode.
    ``subnormals``: ``preserved``, or ``flushed`` to zero.
    ``nonfinite``: with ``skips_pruned`` an Inf or NaN in X at a pruned position doesn't reach Y;
    with ``propagates`` it does.
    """

    math_precision: MathPrecision
    accumulator: ElementKind
    deterministic: Flag
    bit_stable_on_same_hardware: Flag
    batch_invariant: Flag
    bit_stable_across_hardware: Flag
    subnormals: Literal["preserved", "flushed"]
    nonfinite: Literal["skips_pruned", "propagates"]
    unit_roundoff: Annotated[float, Number(least=0)]
    """Relative error of one step of the accumulation; 0 where integers are summed exactly."""
    terms_per_k: Annotated[float, Number(above=0)]
    """Steps that can round, for each unit of the reduction length."""
    promoted_every: Annotated[int, Integer(least=1, most=INT64_MAX)] | None = None
    """Columns of K whose sum leaves the tensor cores, to be added in float32; None: all of K."""
    product_roundoff: Annotated[float, Number(least=0)] = 0.0
    """Relative error of a product before it is added; 0 unless operands are split into terms."""
    tanh_error: Annotated[float, Number(least=0)] = 0.0
    """Absolute error of the hardware's tanh, if ``gelu_tanh`` is computed with it."""
    arithmetic: ArithmeticName | None = None
    """Name of the exact sequence of roundings behind every result (docs/guarantees.md), or None if it isn't
    known. For one problem and its operands, the same name means the same bits on any device."""

    def error_bound(self, k: int) -> float:
        """c in ``|y - y_exact| <= c * sum|x||w| + output rounding``, for a reduction of length k.

        |x| and |w| are what :meth:`magnitudes` gives.
        k is K for ``forward`` and M for ``dgrad``. The bound is the standard gamma_n = n*u / (1 - n*u)
        (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1); infinity where n*u >= 1.

        Raises InvalidProblemError for anything but a size.
        """
        k = _length(k)
        steps = self.product_roundoff
        steps += self.terms_per_k * min(k, self.promoted_every or k) * self.unit_roundoff
        if self.promoted_every:
            steps += -(-k // self.promoted_every) * ElementKind.F32.unit_roundoff
        return steps / (1 - steps) if steps < 1 else float("inf")

    def magnitudes(self, values: Float64s, element: ElementLike) -> Float64s:
        """|values| as the bound counts them, in float64. ``element`` is the type that stores the values.

        Tensor cores align the products of a step to the largest exponent that they find, and a subnormal
        operand counts there as the smallest normal number (arXiv 2511.10909). This function counts it so
        too, unless products are float32's or integers'. If operands are split into terms, magnitudes below
        2^-108 count as 2^-108, because their low terms are subnormal. CuPy's arrays stay on their device.
        Raises InvalidProblemError.
        """
        kind, found = element_kind(element, "element"), np.abs(_wide("values", values))
        if self.math_precision in (MathPrecision.F32, MathPrecision.INT8):
            return found
        least = MIN_IN_PARTS if self.product_roundoff else kind.smallest_normal
        raised: Float64s = np.maximum(found, least)
        return np.where(found == 0, 0.0, raised)

    def tolerance(
        self,
        k: int,
        exact: Float64s,
        abs_sum: Float64s,
        out: ElementLike,
        alpha: float = 1.0,
        *,
        epilogue: EpilogueKind | str = EpilogueKind.IDENTITY,
        bias: Float64s | None = None,
        scale_x: Float64s | float | None = None,
        scale_w: Float64s | float | None = None,
        beta: float = 0.0,
        c: Float64s | None = None,
        relu_threshold: float = 0.0,
        relu_upper_bound: float | None = None,
        scale_y: float = 1.0,
    ) -> Float64s:
        """The whole allowed error of a result, elementwise, as float64.

        ``exact`` is the exact product times alpha and the scales, ``abs_sum`` is sum|x||w| of
        :meth:`magnitudes`, without these factors. ``bias``, ``scale_x`` and ``scale_w`` are the operands, in
        shapes that broadcast to ``exact``; a bias is given exactly if the epilogue has one, and ``c`` exactly
        if ``beta`` isn't 0. Arrays are all NumPy's or all CuPy's, and so is the result. For a gated epilogue
        the last axis is in the order of W's rows, and the result's last axis is half as long. Overflow, Inf
        and NaN are not covered.

        Beyond ``error_bound`` the tolerance includes the roundings of the sum, of alpha, of C, of every step
        of the epilogue, of ``scale_y`` and of the result to ``out``, and the underflow of every step. An
        integer or fp8 result is compared with the exact value in its range. Raises InvalidProblemError.
        """
        k, out = _length(k), element_kind(out, "out")
        exact = _wide("exact", exact)
        alpha, beta = float(_wide("alpha", alpha, 0)), float(_wide("beta", beta, 0))
        most = float("inf") if relu_upper_bound is None else relu_upper_bound
        bounds = (("relu_threshold", relu_threshold), ("relu_upper_bound", most))
        kind = _epilogue_kind(epilogue)
        _check_given("bias", bias, kind.has_bias, f"epilogue {kind}")
        _check_given("c", c, beta != 0, f"beta {beta}")
        if kind.is_gated and (exact.ndim < 1 or exact.shape[-1] % GATE_GROUP):
            raise InvalidProblemError(
                f"exact: expected columns in groups of {GATE_GROUP} for epilogue {kind}, got {exact.shape}"
            )
        given = {"bias": bias, "scale_x": scale_x, "scale_w": scale_w, "c": c}
        wide = {name: _wide(name, one) for name, one in given.items() if one is not None}
        wide["abs_sum"] = _wide("abs_sum", abs_sum)
        for name, one in wide.items():
            _check_shape(name, one.shape, "exact", exact.shape)
        sums = tolerance.times(self.error_bound(k), wide["abs_sum"]) + k * ElementKind.F32.smallest_subnormal
        scales = [wide[name] for name in ("scale_x", "scale_w") if name in wide]
        lost = tolerance.of_factors(exact, sums, alpha, *scales)
        if beta:
            exact, lost = tolerance.of_addend(exact, lost, wide["c"], beta)
        v = exact + wide.get("bias", 0.0)
        with np.errstate(over="ignore", invalid="ignore"):
            relu = tolerance.ReluBounds(*(float(_wide(name, one, 0)) for name, one in bounds))
            size, lost = tolerance.of_epilogue(v, lost, kind, relu, self.tanh_error)
            if (scale := float(_wide("scale_y", scale_y, 0))) != 1:
                size, lost = tolerance.of_scale(size, lost, scale)
            return tolerance.of_rounding(size, lost, out)

    def summed_tolerance(
        self, exact: Float64s, tolerances: Float64s, out: ElementLike, weights: Float64s | None = None
    ) -> Float64s:
        """The whole allowed error of rows that are sums over places (``y_rows``), elementwise, as float64.

        ``exact`` [top_k, ...] are the places' exact results, zeros where nothing is added, ``tolerances``
        what :meth:`tolerance` allows for each, and ``weights`` the router's, in a shape that broadcasts.
        Arrays are all NumPy's or all CuPy's. Raises InvalidProblemError.
        """
        out, exact = element_kind(out, "out"), _wide("exact", exact)
        if exact.ndim < 1:
            raise InvalidProblemError(f"exact: expected a first axis of places, got shape {exact.shape}")
        tolerances = _wide("tolerances", tolerances)
        wide = None if weights is None else _wide("weights", weights)
        for name, one in (("tolerances", tolerances), ("weights", wide)):
            if one is not None:
                _check_shape(name, one.shape, "exact", exact.shape)
        total, lost = tolerance.of_sum(exact, tolerances, wide)
        return tolerance.of_rounding(np.abs(total), lost, out)

    def softmax_tolerance(self, k: int, scores: Float64s, sizes: Float64s, out: ElementLike) -> Float64s:
        """The whole allowed error of a softmax along the last axis, elementwise, as float64.

        ``scores`` are the exact exponents: scale * x, and what is added to it; -Inf where nothing is kept.
        ``sizes`` are the sums of the magnitudes of these terms. ``k`` is the descriptor's ``reduction``.
        Raises InvalidProblemError.
        """
        k, out = _length(k), element_kind(out, "out")
        scores, sizes = _scores(scores, sizes, dimensions=1)
        u, tiny = ElementKind.F32.unit_roundoff, ElementKind.F32.smallest_subnormal
        found = tolerance.of_softmax(scores, 6 * u * sizes + 6 * tiny, self.error_bound(k))
        return tolerance.of_rounding(found.weights, found.lost + tiny, out)

    def attention_tolerance(
        self,
        k: int,
        scores: Float64s,
        sizes: Float64s,
        values: Float64s,
        element: ElementLike,
        *,
        head_size: int,
        dropout: Float64s | None = None,
    ) -> tuple[Float64s, Float64s]:
        """The whole allowed errors of attention's results ``o`` and ``lse``, elementwise, as float64.

        ``scores`` [..., rows, cols] are exact: scale * Q K^T; -Inf where nothing is kept. ``sizes`` are
        |scale| * |Q| |K|^T of :meth:`magnitudes`, ``values`` [..., cols, head] are V. ``k`` is the
        descriptor's ``reduction``, and ``element`` the type of Q, K, V and O. ``dropout`` are the factors of
        the softmax's cells, 0 or 1 / (1 - p). Raises InvalidProblemError.
        """
        k, depth, kind = _length(k), _length(head_size), element_kind(element, "element")
        scores, sizes = _scores(scores, sizes, dimensions=2)
        values, signed = self.magnitudes(values, kind), _wide("values", values)
        if values.ndim < 2 or values.shape[-2] != scores.shape[-1]:
            raise InvalidProblemError(
                f"values: expected {scores.shape[-1]} rows (the columns of scores), got {values.shape}"
            )
        _check_shape("values", values.shape[:-2], "scores", scores.shape[:-2])
        f32, sums = ElementKind.F32, self.error_bound(k)
        u, tiny = f32.unit_roundoff, f32.smallest_subnormal
        moved = (self.error_bound(depth) + 3 * u) * sizes + (depth + 3) * tiny
        found = tolerance.of_softmax(scores, moved, sums)
        # The exponentials, the largest at least 1, enter the product as what the kernel multiplies.
        multiplied = ElementKind(self.math_precision.value)
        least = multiplied.smallest_subnormal + sums * multiplied.smallest_normal
        weights, lost, relative, most = found.weights, found.lost, sums + multiplied.unit_roundoff, 1.0
        if dropout is not None:
            factors = _wide("dropout", dropout)
            _check_shape("dropout", factors.shape, "scores", scores.shape)
            weights, lost, relative = weights * factors, lost * factors, relative + 3 * u
            most = factors.max(initial=0.0)
        lost = (lost + (weights + lost) * relative) @ values
        lost = lost + values.sum(axis=-2, keepdims=True) * least * most + k * tiny
        return tolerance.of_rounding(np.abs(weights @ signed), lost, kind), found.of_lse


def of_sums_in_float32(
    element: ElementKind,
    *,
    same_bits: bool,
    nonfinite: Literal["skips_pruned", "propagates"],
    terms_per_k: float,
    arithmetic: str | None = None,
) -> PrecisionGuarantee:
    """The guarantee of products summed in float32 (s8: exactly). ``same_bits``: on every device and batch."""
    integer = element is ElementKind.S8
    return PrecisionGuarantee(
        math_precision=MathPrecision.INT8 if integer else MathPrecision.F32,
        accumulator=ElementKind.I32 if integer else ElementKind.F32,
        deterministic=same_bits,
        bit_stable_on_same_hardware=same_bits,
        batch_invariant=same_bits,
        bit_stable_across_hardware=same_bits,
        subnormals="preserved",
        nonfinite=nonfinite,
        unit_roundoff=0.0 if integer else ElementKind.F32.unit_roundoff,
        terms_per_k=terms_per_k,
        arithmetic=arithmetic,
    )


def _check_given(argument: str, given: Any, wanted: bool, where: str) -> None:
    if (given is None) is wanted:
        raise InvalidProblemError(
            f"{argument}: expected {'an array' if wanted else 'None'} for {where}, got {shown(given)}"
        )


def _check_shape(argument: str, shape: tuple[int, ...], to: str, wanted: tuple[int, ...]) -> None:
    sides = zip(reversed(shape), reversed(wanted), strict=False)
    if len(shape) > len(wanted) or not all(one in (1, other) for one, other in sides):
        raise InvalidProblemError(
            f"{argument}: expected a shape that broadcasts to the {wanted} of {to}, got {shape}"
        )


def _scores(scores: Float64s, sizes: Float64s, *, dimensions: int) -> tuple[Float64s, Float64s]:
    """The scores of a softmax, which have at least ``dimensions`` axes, and their sizes."""
    scores, sizes = _wide("scores", scores), _wide("sizes", sizes)
    if scores.ndim < dimensions:
        raise InvalidProblemError(f"scores: expected at least {dimensions} axes, got shape {scores.shape}")
    _check_shape("sizes", sizes.shape, "scores", scores.shape)
    return scores, sizes


def _epilogue_kind(epilogue: object) -> EpilogueKind:
    with refusing("epilogue", f"one of {', '.join(EpilogueKind)}", epilogue):
        return EpilogueKind(epilogue)


def _length(k: object) -> int:
    length = integer(k)
    if length is None or not 0 <= length <= INT64_MAX:
        raise InvalidProblemError(f"k: expected an integer from 0 to 2^63 - 1, got {shown(k)}")
    return length


class GuaranteeRequirement(Model):
    """A filter: only kernels that promise all of this are considered.

    ``deterministic``, ``bit_stable_on_same_hardware``, ``batch_invariant``, ``bit_stable_across_hardware``:
    True asks for the promise of that name. ``subnormals``, ``nonfinite``, ``math_precision``,
    ``accumulator``, ``arithmetic``: the value that the guarantee's field must have; None takes any.
    """

    deterministic: Flag = False
    bit_stable_on_same_hardware: Flag = False
    batch_invariant: Flag = False
    bit_stable_across_hardware: Flag = False
    subnormals: Literal["preserved", "flushed"] | None = None
    nonfinite: Literal["skips_pruned", "propagates"] | None = None
    math_precision: MathPrecision | None = None
    accumulator: ElementKind | None = None
    arithmetic: ArithmeticName | None = None
    max_error_bound: Annotated[float, Number(above=0)] | None = None
    """Upper limit of ``error_bound`` for the descriptor's reduction length."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            deterministic: bool = ...,
            bit_stable_on_same_hardware: bool = ...,
            batch_invariant: bool = ...,
            bit_stable_across_hardware: bool = ...,
            subnormals: str | None = ...,
            nonfinite: str | None = ...,
            math_precision: MathPrecision | str | None = ...,
            accumulator: ElementLike | None = ...,
            arithmetic: str | None = ...,
            max_error_bound: SupportsFloat | None = ...,
        ) -> None: ...

    def unmet(self, guarantee: PrecisionGuarantee, reduction: int) -> str | None:
        """A message about the first requirement that the guarantee fails, or None if it meets all."""
        for name in FLAGS:
            if getattr(self, name) and not getattr(guarantee, name):
                return f"does not guarantee {name}"
        for name in _VALUES:
            wanted, given = getattr(self, name), getattr(guarantee, name)
            if wanted is not None and wanted != given:
                return f"{name} is {given}, required {wanted}"
        if self.max_error_bound is not None:
            bound = guarantee.error_bound(reduction)
            if bound > self.max_error_bound:
                return f"error_bound({reduction}) is {bound:.3g}, required <= {self.max_error_bound:.3g}"
        return None


_READ_BY_NUMPY = (np.ndarray, np.generic, int, float, list, tuple)


def _wide(argument: str, value: Any, dimensions: int | None = None) -> Float64s:
    cupy = sys.modules.get("cupy")
    if dimensions is None and cupy is not None and isinstance(value, cupy.ndarray):
        on_device: Float64s = value.astype(np.float64, copy=False)
        return on_device
    try:
        if not isinstance(value, _READ_BY_NUMPY):  # NumPy trusts protocols that lie
            value = TensorView.of(value, argument=argument).array()
        found = np.asarray(value, np.float64)
    except Exception as error:  # whatever a broken object raises
        raise InvalidProblemError(f"{argument}: expected numbers, got {shown(value)}") from error
    if dimensions not in (None, found.ndim):
        raise InvalidProblemError(f"{argument}: expected one number, got {shown(value)}")
    return found


FLAGS = ("deterministic", "bit_stable_on_same_hardware", "batch_invariant", "bit_stable_across_hardware")
"""The promises about bits that hold or don't."""
_VALUES = ("subnormals", "nonfinite", "math_precision", "accumulator", "arithmetic")
