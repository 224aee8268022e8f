"""Computes chosen results by a named arithmetic: their sums, scales, epilogue and rounding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from ...arithmetic.epilogue import Fp8Scale, addend_of, finished
from ...device.tensors import TensorView
from ...plan.arithmetic import Arithmetic
from ...plan.operands import Views
from ...vocab import ScaleKind
from ...weights.gates import GATE_ROWS
from ..descriptor import GemmSparse24Descriptor
from ..groups import one_group, part_of_tokens, token_ranges, views_of_part
from ..routing import indexed_views, placed, placed_views, sums_of
from .sums import AfterStep, Factors, sums

Array = np.ndarray[Any, Any]

BLOCK = 1024
"""Number of results computed at a time, so that the products of a step stay in the cache."""


class Results:
    """Computes results of checked operands on the host. Any number of threads may call it.

    ``views`` are a plan's operands, with ``values`` and ``metadata`` of the weight. ``raises_amax`` says
    whether the operand ``amax`` is raised, as a run does.
    """

    def __init__(
        self,
        desc: GemmSparse24Descriptor,
        views: Views,
        arithmetic: Arithmetic,
        *,
        raises_amax: bool = False,
    ) -> None:
        self.desc, self.arithmetic, self._views = desc, arithmetic, views
        self.factors = Factors.of(desc, views)
        self._bias, self._scale_x, self._scale_w, self._c = (
            _array(views.get(name)) for name in ("bias", "scale_x", "scale_w", "c")
        )
        self._fp8 = Fp8Scale.of(views, raises_amax=raises_amax)

    def written(self, tokens: Array) -> Array:
        """Whether the rows of these tokens have results."""
        return np.ones(len(tokens), bool)

    def single(self, token: int) -> tuple[Results, int] | None:
        """The results of the token's weight, and its index in them; None if several weights add to it."""
        return self, token

    def of(self, desc: GemmSparse24Descriptor) -> Results:
        """Results of another epilogue, alpha or scales from the same operands."""
        return Results(desc, self._views, self.arithmetic)

    def at(self, tokens: Array, outputs: Array, after_step: AfterStep | None = None) -> Array:
        """The bits of the results (tokens[i], outputs[i]), as unsigned integers [P]."""
        desc, count, rows = self.desc, len(outputs), outputs
        if desc.epilogue.is_gated:
            tokens, rows = _rows_of_gated(tokens, outputs)
        with np.errstate(all="ignore"):  # overflow, Inf and NaN are results here
            found = sums(self.factors, self.arithmetic, tokens, rows, after_step)
            scale_x = _chosen(self._scale_x, desc.scale_x, tokens)
            scale_w = _chosen(self._scale_w, desc.scale_w, rows)
            bias = self._bias[rows] if self._bias is not None and desc.epilogue.has_bias else None
            addend = (
                addend_of(self._c[tokens, outputs], desc.beta) if self._c is not None and desc.has_c else None
            )
            return finished(found, desc, scale_x, scale_w, bias, addend, self._fp8)[:count]


class PartResults:
    """Computes results of a product with groups or batches: each part's are Results of its own."""

    def __init__(self, desc: GemmSparse24Descriptor, views: Views, arithmetic: Arithmetic) -> None:
        self.desc, self.arithmetic, self._views = desc, arithmetic, views
        self._parts = part_of_tokens(desc, views)
        self._ranges = token_ranges(desc, views)

    def _of_part(self, part: int) -> Results:
        begin, end = self._ranges[part].tolist()
        views = views_of_part(self.desc, self._views, part, begin, end)
        return Results(one_group(self.desc, end - begin), views, self.arithmetic)

    def written(self, tokens: Array) -> Array:
        found: Array = self._parts[tokens] >= 0
        return found

    def single(self, token: int) -> tuple[Results, int]:
        part = int(self._parts[token])
        return self._of_part(part), token - int(self._ranges[part, 0])

    def at(self, tokens: Array, outputs: Array) -> Array:
        found = np.empty(len(outputs), self.desc.out_element.bits_dtype)
        of_tokens = self._parts[tokens]
        for part in np.unique(of_tokens).tolist():
            here = of_tokens == part
            own = tokens[here] - self._ranges[part, 0]
            found[here] = self._of_part(part).at(own, outputs[here])
        return found


class SummedResults:
    """Computes results that are sums over places of groups."""

    def __init__(self, desc: GemmSparse24Descriptor, views: Views, arithmetic: Arithmetic) -> None:
        self.desc, self.arithmetic, self._views = desc, arithmetic, views
        self._of_places = PartResults(desc.placed, placed_views(desc, views), arithmetic)
        self._index = views["y_index"].array()

    def written(self, tokens: Array) -> Array:
        return np.ones(len(tokens), bool)

    def single(self, token: int) -> None:
        return None

    def at(self, tokens: Array, outputs: Array) -> Array:
        named = self._index[tokens]
        places = np.where(placed(self.desc, self._views, named), named, -1)
        return sums_of(self.desc, self._views, tokens, places, self._bits(places, outputs))

    def _bits(self, places: Array, outputs: Array) -> Iterator[Array]:
        for chosen in places.T:
            bits, here = np.zeros(len(outputs), self.desc.out_element.bits_dtype), chosen >= 0
            if here.any():
                bits[here] = self._of_places.at(chosen[here], outputs[here])
            yield bits


AnyResults: TypeAlias = Results | PartResults | SummedResults


def results_of(desc: GemmSparse24Descriptor, views: Views, arithmetic: Arithmetic) -> AnyResults:
    """Return the object that computes the results of a product of any kind."""
    views, desc = indexed_views(desc, views), desc.indexed
    if desc.y_rows is not None:
        return SummedResults(desc, views, arithmetic)
    if desc.groups or desc.is_batched:
        return PartResults(desc.placed, placed_views(desc, views), arithmetic)
    return Results(desc, views, arithmetic)


def blocks_of(count: int) -> Iterator[slice]:
    """Cut ``count`` results into blocks."""
    for start in range(0, count, BLOCK):
        yield slice(start, min(start + BLOCK, count))


def places(flat: Array, desc: GemmSparse24Descriptor) -> tuple[Array, Array]:
    """Tokens and outputs of the ``flat``-th results, with all tokens of an output one after the other.

    Neighbours share rows of W, which are then decoded only once.
    """
    outputs, tokens = np.divmod(flat, max(desc.result_rows, 1))
    return tokens, outputs


def _rows_of_gated(tokens: Array, outputs: Array) -> tuple[Array, Array]:
    """Tokens and rows of W of the sums that gated results need: 8 gate rows, their 8 other rows, and so on.

    The last group is filled up to 8 results.
    """
    fill = (0, -len(outputs) % GATE_ROWS)
    tokens, outputs = (np.pad(one, fill, "edge").reshape(-1, 1, GATE_ROWS) for one in (tokens, outputs))
    gates = outputs + outputs // GATE_ROWS * GATE_ROWS
    rows = np.concatenate([gates, gates + GATE_ROWS], axis=1)
    return np.broadcast_to(tokens, rows.shape).reshape(-1), rows.reshape(-1)


def _array(view: TensorView | None) -> Array | None:
    return None if view is None else view.array()


def _chosen(scale: Array | None, kind: ScaleKind, at: Array) -> Array | None:
    if scale is None or kind is ScaleKind.NONE:
        return None
    return scale[at] if kind is ScaleKind.ROW else scale
