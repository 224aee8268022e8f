"""The sums behind some results, by a named arithmetic: which products are added, in which order.

``hopper_tc/slices=S``: K lies in tiles of 128 columns (8-bit elements: 256). Slice s of S begins with tile
floor(tiles * s / S). Each slice is summed from +0 in increasing columns, one step of the tensor cores after
the other (tensor_core.py); K is filled up with zeros, which change nothing. The slices' sums are added in
float32, to nearest, from the first to the last. ``promoted=C``: the same with every C columns for a slice.
``hopper_tc_f32x6``, ``hopper_tc_f32x3``: operands are split in parts of bf16 (split.py). Products of parts
are added tile by tile of 64 columns, a tile's small ones first. With six products each tile, with three every
four tiles of a slice, are one sum of the tensor cores; such sums are added in float32, to nearest, from the
first to the last of a slice. With six and one slice those of every 64 tiles are a group, and what the groups
come to is added in the same way.
``fma32_in_order``: one float32 fma a kept position, in increasing k (``dgrad``: m), from +0.
``exact_sum``: the sum itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ...arithmetic.fma32 import fma_f32
from ...plan.arithmetic import EXACT_SUM, Arithmetic
from ...plan.operands import Views
from ...vocab import ElementKind, GemmOp
from ...weights import canonical, dense
from ...weights.packed_layouts import layout_of
from ..descriptor import GemmSparse24Descriptor
from . import split, tensor_core
from .split import SPLIT_GROUP, SPLIT_SUM, SPLIT_TILE

Array = np.ndarray[Any, Any]
AfterStep = Callable[[int, Array], Array]
"""The number of a step, from 0, and the accumulator after it, float64 -> what is put in its place."""

_COLUMNS = 512
"""Dense columns that are decoded at a time: whole steps of every instruction."""


class Factors(NamedTuple):
    """What is multiplied, as bits on the host."""

    desc: GemmSparse24Descriptor
    source: Array
    """[N, reduction]"""
    values: Array
    """[M, K/2]"""
    codes: Array
    """[M, K/4], the bytes of the metadata."""

    @classmethod
    def of(cls, desc: GemmSparse24Descriptor, views: Views) -> Factors:
        codes = canonical.from_metadata(views["metadata"].bits()).reshape(desc.m, desc.k // 4)
        return cls(desc, views["source"].bits(), views["values"].bits(), codes)


def sums(
    factors: Factors,
    arithmetic: Arithmetic,
    tokens: Array,
    outputs: Array,
    after_step: AfterStep | None = None,
) -> Array:
    """The sums behind the results (tokens[i], outputs[i]): float32 [P]; of ``exact_sum`` float64, exact."""
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
        for j in range(len(x)):
            acc = np.where(kept[j], fma_f32(x[j], w[j], acc), acc)
    return acc


class StepPlace(NamedTuple):
    """Where a step of the tensor cores lies."""

    slice: int
    columns: tuple[int, int]
    """From, and below."""
    parts: tuple[int, int] | None = None
    """Of the source and of W, counted from the high one; None: they are multiplied as they are."""
    sum: int = 0
    """Of those that leave the tensor cores, in a slice."""
    group: int = 0
    """Of such sums, in a slice."""


def step_places(desc: GemmSparse24Descriptor, arithmetic: Arithmetic) -> tuple[StepPlace, ...]:
    """Of every step, in their order; slices are counted from 0, and so are promoted columns."""
    width = tensor_core.STEPS[_multiplied(desc, arithmetic)].columns
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
        for parts in split.pairs(arithmetic.parts):
            for first in range(begin, end, width):
                places.append(StepPlace(at, (first, min(first + width, end)), parts, number, group))
    return tuple(places)


def _multiplied(desc: GemmSparse24Descriptor, arithmetic: Arithmetic) -> ElementKind:
    """What the tensor cores multiply."""
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
    element = _multiplied(factors.desc, arithmetic)
    step, places = tensor_core.STEPS[element], step_places(factors.desc, arithmetic)
    acc = np.zeros(len(tokens), np.float64)
    total = of_slice = of_group = np.zeros(len(tokens), np.float32)
    columns, last = _Columns(factors, arithmetic, tokens, outputs), StepPlace(0, (0, 0))
    for number, place in enumerate(places):
        if (place.slice, place.sum) != (last.slice, last.sum):
            of_group, acc = of_group + acc.astype(np.float32), np.zeros_like(acc)
        if (place.slice, place.group) != (last.slice, last.group):
            of_slice, of_group = of_slice + of_group, np.zeros_like(of_group)
        if place.slice != last.slice:
            total, of_slice = total + of_slice, np.zeros_like(total)
        last = place
        acc = tensor_core.add_products(*columns.products(place), acc, step)
        if after_step is not None:
            acc = after_step(number, acc)
    folded: Array = total + (of_slice + (of_group + acc.astype(np.float32)))
    if arithmetic.parts and (again := np.isnan(folded)).any():
        folded[again] = _in_float64(factors, arithmetic, tokens[again], outputs[again])
    return folded


def _in_float64(factors: Factors, arithmetic: Arithmetic, tokens: Array, outputs: Array) -> Array:
    """One product after the other in float64, the sum rounded to float32 once.

    W is what its kernel has of it: with two parts, their sum.
    """
    acc = np.zeros(len(tokens), np.float64)
    for x, w, _ in _forward_terms(factors, tokens, outputs):
        wide = w.astype(np.float64)
        if arithmetic.parts == 2:
            high, low = split.weight_parts(w, 2)
            wide = high.astype(np.float64) + low
        for j in range(len(x)):
            acc = acc + x[j].astype(np.float64) * wide[j]  # the product is exact: as one fma
    return acc.astype(np.float32)


class _Columns:
    """Products of some results, a step at a time; decodes each row and token once for _COLUMNS of them."""

    def __init__(self, factors: Factors, arithmetic: Arithmetic, tokens: Array, outputs: Array) -> None:
        self._factors, self._parts = factors, arithmetic.parts
        self._element = _multiplied(factors.desc, arithmetic)
        self._tokens, self._token_at = np.unique(tokens, return_inverse=True)
        self._rows, self._row_at = np.unique(outputs, return_inverse=True)
        self._first = -1

    def products(self, place: StepPlace) -> tuple[Array, Array]:
        """Exact products float64 [kept, P], and the sums of their operands' exponents, int16."""
        first = place.columns[0] // _COLUMNS * _COLUMNS
        if first != self._first:
            self._decode(first)
        kept = slice((place.columns[0] - first) // 2, (place.columns[1] - first) // 2)
        of_source, of_weight = place.parts or (0, 0)
        source, weights = self._source[of_source], self._weights[of_weight]
        at = self._positions[kept].take(self._row_at, axis=1)
        at += self._token_at * self._width
        products = source.values.take(at)
        products *= weights.values[kept].take(self._row_at, axis=1)
        exponents = source.exponents.take(at)
        exponents += weights.exponents[kept].take(self._row_at, axis=1)
        return products, exponents

    def _decode(self, first: int) -> None:
        factors, stored = self._factors, self._factors.desc.element
        last = min(first + _COLUMNS, factors.desc.k)
        self._first, self._width = first, last - first
        source = dense.widened(factors.source[self._tokens, first:last], stored)
        weights = dense.widened(factors.values[self._rows, first // 2 : last // 2], stored)
        weights, source = np.ascontiguousarray(weights.T), source.reshape(-1)
        self._source = self._operands(split.parts_of(source) if self._parts else (source,))
        self._weights = self._operands(
            split.weight_parts(weights, self._parts) if self._parts else (weights,)
        )
        self._positions = np.ascontiguousarray(
            canonical.positions(factors.codes[self._rows, first // 4 : last // 4]).T
        )

    def _operands(self, parts: tuple[Array, ...]) -> tuple[_Operand, ...]:
        wide = [part.astype(np.float64) for part in parts]
        return tuple(_Operand(part, tensor_core.exponents(part, self._element)) for part in wide)


class _Operand(NamedTuple):
    values: Array
    exponents: Array


# One product after the other ----------------------------------------------------------------------

Terms = Iterator[tuple[Array, Array, Array]]
"""Of the source and of W, float32 [some, P], in their order; and which of them are kept, [some, P]."""


def _forward_terms(factors: Factors, tokens: Array, outputs: Array) -> Terms:
    desc = factors.desc
    for first in range(0, desc.k, _COLUMNS):
        last = min(first + _COLUMNS, desc.k)
        source = dense.widened(factors.source[tokens, first:last], desc.element)
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
        yield dense.widened(source, desc.element), weights, kept
