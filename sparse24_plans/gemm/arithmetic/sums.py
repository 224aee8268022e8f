"""The sums of some results by a named arithmetic, with every product and rounding in its order.

``hopper_tc/slices=S``: K is cut into tiles of 128 columns (8-bit elements: 256). Slice s of S begins with
tile floor(tiles * s / S). Each slice is summed from +0 in increasing columns, one tensor-core step after the
other (tensor_core.py). K is padded with zeros, which change nothing. The slices' sums are added in float32,
to nearest, from the first to the last. ``promoted=C``: every C columns are a slice.
``hopper_tc_f32x6``, ``hopper_tc_f32x3``: operands are split into bf16 terms (bf16_terms.py). Products of
terms are added tile by tile of 64 columns, the small ones of a tile first. Each tile with six products, and
every four tiles of a slice with three, are one sum of the tensor cores. Such sums are added in float32, to
nearest, from the first to the last of a slice. With six products and one slice, the sums of every 64 tiles
form a blocked sum, and the blocked sums are added in the same way.
``fma32_in_order``: one float32 fma for each kept position, in increasing k (``dgrad``: m), from +0.
``exact_sum``: the exact sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...arithmetic.fma32 import fma_chain, fma_f32
from ...plan.arithmetic import EXACT_SUM, Arithmetic
from ...plan.operands import Views
from ...vocab import ElementKind, GemmOp
from ...weights import canonical, dense
from ...weights.packed_layouts import layout_of
from ..descriptor import GemmSparse24Descriptor
from ..groups import kept_bits
from . import bf16_terms, tensor_core
from .bf16_terms import SPLIT_GROUP, SPLIT_SUM, SPLIT_TILE

Array = np.ndarray[Any, Any]
AfterStep = Callable[[int, Array], Array]
"""Callback from a step's number and the float64 accumulator after it to the accumulator to go on with."""

_COLUMNS = 512
"""Dense columns that are decoded at a time: a multiple of every instruction's step."""


class Factors(NamedTuple):
    """The operands of a product, as bits on the host."""

    desc: GemmSparse24Descriptor
    source: Array
    """[N, reduction]"""
    values: Array
    """[M, K/2]"""
    codes: Array
    """[M, K/4]: the bytes of the metadata."""

    @classmethod
    def of(cls, desc: GemmSparse24Descriptor, views: Views) -> Factors:
        codes = canonical.from_metadata(views["metadata"].bits()).reshape(desc.m, desc.k // 4)
        return cls(desc, views["source"].bits(), kept_bits(desc, views), codes)


def sums(
    factors: Factors,
    arithmetic: Arithmetic,
    tokens: Array,
    outputs: Array,
    after_step: AfterStep | None = None,
) -> Array:
    """The sums of the results (tokens[i], outputs[i]): float32 [P], or exact float64 for ``exact_sum``."""
    if arithmetic.on_tensor_cores:
        return _on_tensor_cores(factors, arithmetic, tokens, outputs, after_step)
    terms = _forward_terms if factors.desc.op is GemmOp.FORWARD else _dgrad_terms
    if arithmetic.kind == EXACT_SUM:
        total = np.zeros(len(tokens), np.float64)
        for x, w, kept in terms(factors, tokens, outputs):
            total += np.where(kept, x.astype(np.float64) * w, 0.0).sum(axis=0)
        return total
    acc = np.zeros(len(tokens), np.float32)
    for x, w, kept in terms(factors, tokens, outputs):
        if kept.all():
            acc = fma_chain(len(x), partial(_part, x, w), acc)
            continue
        for j in range(len(x)):
            acc = np.where(kept[j], fma_f32(x[j], w[j], acc), acc)
    return acc


def _part(x: Array, w: Array, steps: slice) -> tuple[Array, Array]:
    return x[steps], w[steps]


class StepPlace(NamedTuple):
    """The position of a tensor-core step in the sum."""

    slice: int
    columns: tuple[int, int]
    """First column, and the column after the last."""
    terms: tuple[int, int] | None = None
    """Terms of X and of W, counted from the high one; None: the operands are multiplied as they are."""
    sum: int = 0
    """Number of the tensor-core sum in its slice."""
    group: int = 0
    """Number of the blocked sum in its slice."""

    @property
    def accumulator(self) -> tuple[int, int]:
        """The slice and the sum, which begin with a new accumulator."""
        return self.slice, self.sum


def step_places(desc: GemmSparse24Descriptor, arithmetic: Arithmetic) -> tuple[StepPlace, ...]:
    """The positions of all steps in their order. Promoted groups of columns count as slices."""
    width = tensor_core.STEPS[multiplied_element(desc, arithmetic)].columns
    starts = _slice_starts(desc, arithmetic)
    places, at = [], 0
    for begin in range(0, desc.k, SPLIT_TILE if arithmetic.parts else width):
        while at + 1 < len(starts) and begin >= starts[at + 1]:
            at += 1
        if not arithmetic.parts:
            places.append(StepPlace(at, (begin, min(begin + width, desc.k))))
            continue
        end, inside = min(begin + SPLIT_TILE, desc.k), begin - starts[at]
        number = inside // SPLIT_SUM[arithmetic.parts]
        whole = arithmetic.slices > 1 or not SPLIT_GROUP[arithmetic.parts]
        group = 0 if whole else inside // SPLIT_GROUP[arithmetic.parts]
        for terms in bf16_terms.term_pairs(arithmetic.parts):
            for first in range(begin, end, width):
                places.append(StepPlace(at, (first, min(first + width, end)), terms, number, group))
    return tuple(places)


def multiplied_element(desc: GemmSparse24Descriptor, arithmetic: Arithmetic) -> ElementKind:
    """The element that the tensor cores multiply."""
    return ElementKind.BF16 if arithmetic.parts else desc.element


def _slice_starts(desc: GemmSparse24Descriptor, arithmetic: Arithmetic) -> list[int]:
    """First columns of the slices."""
    if arithmetic.promoted_every:
        return list(range(0, desc.k, arithmetic.promoted_every))
    width = layout_of(desc.element).tile_k
    tiles = -(-desc.k // width)
    return [tiles * s // arithmetic.slices * width for s in range(arithmetic.slices)]


# Tensor cores -------------------------------------------------------------------------------------


def _on_tensor_cores(
    factors: Factors,
    arithmetic: Arithmetic,
    tokens: Array,
    outputs: Array,
    after_step: AfterStep | None,
) -> Array:
    element = multiplied_element(factors.desc, arithmetic)
    step, places = tensor_core.STEPS[element], step_places(factors.desc, arithmetic)
    acc = np.zeros(len(tokens), np.float64)
    total = of_slice = of_group = np.zeros(len(tokens), np.float32)
    columns, last = _Columns(factors, arithmetic, tokens, outputs), StepPlace(0, (0, 0))
    for number, place in enumerate(places):
        if place.accumulator != last.accumulator:
            of_group, acc = of_group + acc.astype(np.float32), np.zeros_like(acc)
        if (place.slice, place.group) != (last.slice, last.group):
            of_slice, of_group = of_slice + of_group, np.zeros_like(of_group)
        if place.slice != last.slice:
            total, of_slice = total + of_slice, np.zeros_like(total)
        last = place
        acc = tensor_core.add_products(*columns.products(place), acc, step)
        if after_step is not None:
            acc = after_step(number, acc)
    total_sum: Array = total + (of_slice + (of_group + acc.astype(np.float32)))
    if arithmetic.parts and (again := np.isnan(total_sum)).any():
        total_sum[again] = _in_float64(factors, arithmetic, tokens[again], outputs[again])
    return total_sum


def _in_float64(factors: Factors, arithmetic: Arithmetic, tokens: Array, outputs: Array) -> Array:
    """Add one product after the other in float64, and round the sum to float32 once.

    W is the weight that the kernel has: with two terms, their sum.
    """
    acc = np.zeros(len(tokens), np.float64)
    for x, w, _ in _forward_terms(factors, tokens, outputs):
        wide = w.astype(np.float64)
        if arithmetic.parts == 2:
            high, low = bf16_terms.weight_terms(w, 2)
            wide = high.astype(np.float64) + low
        for j in range(len(x)):
            acc = acc + x[j].astype(np.float64) * wide[j]  # the product is exact, so this is one fma
    return acc.astype(np.float32)


class _Columns:
    """The products of some results, one step at a time. It decodes _COLUMNS columns at once."""

    def __init__(self, factors: Factors, arithmetic: Arithmetic, tokens: Array, outputs: Array) -> None:
        self._factors, self._terms = factors, arithmetic.parts
        self._tokens, self._token_at = np.unique(tokens, return_inverse=True)
        self._rows, self._row_at = np.unique(outputs, return_inverse=True)
        self._first = -1

    def products(self, place: StepPlace) -> tuple[Array, Array]:
        """Exact products float64 [kept, P], and the sums of their factors' exponents, int16."""
        first = place.columns[0] // _COLUMNS * _COLUMNS
        if first != self._first:
            self._decode(first)
        kept = slice((place.columns[0] - first) // 2, (place.columns[1] - first) // 2)
        source_term, weight_term = place.terms or (0, 0)
        source, weights = self._source[source_term], self._weights[weight_term]
        at = self._positions[kept].take(self._row_at, axis=1)
        at += self._token_at * self._width
        products = source.values.take(at)
        products *= weights.values[kept].take(self._row_at, axis=1)
        exponents = source.exponents.take(at)
        exponents += weights.exponents[kept].take(self._row_at, axis=1)
        return products, exponents

    def _decode(self, first: int) -> None:
        factors, desc = self._factors, self._factors.desc
        last = min(first + _COLUMNS, desc.k)
        self._first, self._width = first, last - first
        source = dense.widened(factors.source[self._tokens, first:last], desc.x_element)
        weights = dense.widened(factors.values[self._rows, first // 2 : last // 2], desc.element)
        weights, source = np.ascontiguousarray(weights.T), source.reshape(-1)
        if self._terms:
            of_x, of_w = bf16_terms.terms_of(source), bf16_terms.weight_terms(weights, self._terms)
            self._source, self._weights = (
                tuple(_Operand.of(term, ElementKind.BF16) for term in terms) for terms in (of_x, of_w)
            )
        else:
            self._source = (_Operand.of(source, desc.x_element),)
            self._weights = (_Operand.of(weights, desc.element),)
        self._positions = np.ascontiguousarray(
            canonical.positions(factors.codes[self._rows, first // 4 : last // 4]).T
        )


class _Operand(NamedTuple):
    values: Array
    exponents: Array

    @classmethod
    def of(cls, term: Array, element: ElementKind) -> _Operand:
        """float32 values of operands of this element."""
        wide = term.astype(np.float64)
        return cls(wide, tensor_core.exponents(wide, element))


# One product after the other ----------------------------------------------------------------------

Terms = Iterator[tuple[Array, Array, Array]]
"""Factors from the source and from W in order, float32 [some, P], and the mask of kept ones [some, P]."""


def _forward_terms(factors: Factors, tokens: Array, outputs: Array) -> Terms:
    desc = factors.desc
    for first in range(0, desc.k, _COLUMNS):
        last = min(first + _COLUMNS, desc.k)
        source = dense.widened(factors.source[tokens, first:last], desc.x_element)
        at = canonical.positions(factors.codes[outputs, first // 4 : last // 4])
        weights = dense.widened(factors.values[outputs, first // 2 : last // 2], desc.element)
        yield np.take_along_axis(source, at, axis=1).T, weights.T, np.ones(weights.T.shape, bool)


def _dgrad_terms(factors: Factors, tokens: Array, outputs: Array) -> Terms:
    desc = factors.desc
    group, position = outputs // 4, (outputs % 4).astype(np.uint8)
    for first in range(0, desc.m, _COLUMNS):
        rows = slice(first, min(first + _COLUMNS, desc.m))
        codes = factors.codes[rows][:, group]
        second = codes >> 2 == position
        kept = second | (codes & 3 == position)
        at = 2 * group + second
        weights = dense.widened(np.take_along_axis(factors.values[rows], at, axis=1), desc.element)
        source = np.ascontiguousarray(factors.source[tokens, rows].T)
        yield dense.widened(source, desc.x_element), weights, kept
