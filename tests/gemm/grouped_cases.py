"""Grouped products in guarded memory, with a float64 reference for each group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparse24_plans import DgradSparse24Args, ElementKind, GemmSparse24Args, GemmSparse24Plan

from ..float64 import reference
from ..support import (
    POISON,
    Data,
    Guarded,
    dense_of,
    place_name,
    random_values,
    same_bits,
    scratch,
    synchronize,
    weight_of,
)


@dataclass
class Routing:
    """The operands that route rows, by their arguments' names."""

    x_index: np.ndarray | None = None
    y_index: np.ndarray | None = None
    y_weights: np.ndarray | None = None


@dataclass
class GroupedCase:
    """A grouped product in guarded memory, and the data of each group."""

    plan: GemmSparse24Plan
    args: GemmSparse24Args | DgradSparse24Args
    result: Guarded
    inputs: tuple[Guarded, ...]
    data: tuple[Data, ...]
    """Operands of each group; ``x``, ``scale_x`` and ``c`` are those of all rows."""
    workspace: Guarded | None
    routing: Routing | None = None
    in_place: bool = False
    """Whether c is y."""

    def run(self, stream: Any = None) -> np.ndarray:
        self.plan.run(self.args, workspace=self.workspace and self.workspace.view, stream=stream)
        synchronize(self.plan)
        for operand in self.inputs:
            operand.numpy()
        return self.result.numpy()

    def largest(self) -> np.float32:
        """The operand ``amax``."""
        return self.inputs[-2].numpy()[0]

    def ranges(self) -> list[tuple[int, int]]:
        """The rows of each group, as the descriptor's docstring says."""
        desc, given = self.plan.descriptor, self.given().tolist()
        if desc.group_tokens == "counts":
            places = desc.n // desc.groups
            return [(g * places, g * places + min(max(c, 0), places)) for g, c in enumerate(given)]
        begins = [min(max(at, 0), desc.n) for at in given[:-1]]
        return [(at, max(at, min(end, desc.n))) for at, end in zip(begins, given[1:], strict=True)]

    def given(self) -> np.ndarray:
        """The offsets, or the counts."""
        given = self.inputs[-1].numpy().astype(int)
        if self.plan.descriptor.group_tokens != "experts":
            return given
        return sorted_by(given, self.plan.descriptor.groups)[0].astype(int)

    def has_shared_rows(self) -> bool:
        """Whether a row is in two groups, so that it has the result of either."""
        taken = np.zeros(self.plan.descriptor.n, int)
        for begin, end in self.ranges():
            taken[begin:end] += 1
        return bool((taken > 1).any())

    def of_groups(self) -> Iterator[tuple[Data, tuple[int, int]]]:
        """The operands and the rows of each group that has any."""
        for data, (begin, end) in zip(self.data, self.ranges(), strict=True):
            if begin < end:
                scale_x = data.scale_x
                if scale_x is not None and len(scale_x) > 1:
                    scale_x = scale_x[begin:end]
                c = None if data.c is None else data.c[begin:end]
                yield replace(data, x=data.x[begin:end], scale_x=scale_x, c=c), (begin, end)

    def references(self) -> Iterator[tuple[tuple[int, int], np.ndarray, np.ndarray]]:
        """The rows of each group that has any, their exact results and the allowed errors."""
        for own, (begin, end) in self.of_groups():
            known = reference(self.plan, own.x, own.dense, own.bias, own.scale(), own.c, own.scale_y)
            yield (begin, end), *known

    def check(self, got: np.ndarray) -> None:
        """Rows are inside the guarantee's bound; rows in no group still have the poison."""
        if self.plan.descriptor.y_rows is not None:
            _check_errors(got, *self.sums())
            return
        for (begin, end), exact, tolerance in self.references():
            _check_errors(got[begin:end], exact, tolerance)
        self.check_the_rest(got)

    def sums(self) -> tuple[np.ndarray, np.ndarray]:
        """The exact rows of Y, which are weighted sums of their places' results, and the allowed errors.

        The error is infinite where a place's result is beyond the type.
        """
        desc, routing = self.plan.descriptor, self.routing
        assert routing is not None
        exact, allowed = np.zeros((2, desc.n, desc.outputs))
        for (begin, end), *known in self.references():
            exact[begin:end], allowed[begin:end] = known
        found, tolerances = np.zeros((2, desc.top_k, desc.y_rows, desc.outputs))
        places = routing.y_index.T
        added = self.have_results(places)
        found[added], tolerances[added] = exact[places[added]], allowed[places[added]]
        tolerances[np.abs(found) + tolerances > desc.out_element.largest] = np.inf
        weights = None if routing.y_weights is None else routing.y_weights.T[..., None].astype(np.float64)
        allowed = self.plan.guarantee.summed_tolerance(found, tolerances, desc.out_element, weights)
        return (found if weights is None else found * weights).sum(0), allowed

    def have_results(self, places: np.ndarray) -> np.ndarray:
        """Which of the places add to rows of Y, as the descriptor's docstring says."""
        desc, given = self.plan.descriptor, self.given()
        inside = (places >= 0) & (places < desc.n)
        if desc.group_tokens != "counts":
            return inside & (given[0] <= places) & (places < given[-1])
        group, at = np.divmod(np.where(inside, places, 0), desc.n // desc.groups)
        return inside & (at < given[group])

    def check_the_rest(self, got: np.ndarray) -> None:
        """Rows in no group still have the poison, or the C that lies there."""
        written = np.zeros(len(got), bool)
        for begin, end in self.ranges():
            written[begin:end] = True
        rest = np.ascontiguousarray(got[~written])
        if self.in_place:
            assert same_bits(rest, np.asarray(self.data[0].c)[~written]), "a row in no group was written"
        else:
            assert (rest.view(np.uint8) == POISON).all(), "a row in no group was written"


def _check_errors(got: np.ndarray, exact: np.ndarray, tolerance: np.ndarray) -> None:
    error = np.abs(got.astype(np.float64) - exact)
    assert (error <= tolerance).all(), f"{(error / tolerance).max():.2f} of what is allowed"


def sorted_by(experts: np.ndarray, groups: int) -> tuple[np.ndarray, Routing]:
    """Offsets and indices of the choices [T, top_k], some of which may name no group."""
    buckets = np.clip(experts.reshape(-1).astype(np.int64), -1, groups)
    order = np.argsort(buckets, kind="stable")
    offsets = np.searchsorted(buckets[order], np.arange(groups + 1)).astype(np.int32)
    places = np.empty(buckets.size, np.int32)
    places[order] = np.arange(buckets.size)
    rows = (order // experts.shape[1]).astype(np.int32)
    return offsets, Routing(rows, places.reshape(experts.shape))


def grouped_case(
    plan: GemmSparse24Plan,
    tokens: Any,
    seed: Any = 0,
    pad: int = 0,
    routing: Routing | None = None,
    *,
    in_place: bool = False,
) -> GroupedCase:
    """A case with random data. ``tokens`` are offsets, counts or experts, ``pad`` elements between rows.

    ``in_place``: c is y.
    """
    desc = plan.descriptor
    if desc.group_tokens == "experts":
        weights = None if routing is None else routing.y_weights
        routing = replace(sorted_by(np.asarray(tokens, np.int32), desc.groups)[1], y_weights=weights)
    rng = np.random.default_rng(seed)
    dense = random_values(rng, (desc.groups * desc.m, desc.k), desc.element)
    x_rows, y_rows = (desc.n if rows is None else rows for rows in (desc.x_rows, desc.y_rows))
    x = random_values(rng, (x_rows, desc.reduction), desc.x_element)
    found: dict[str, np.ndarray] = {}
    if desc.epilogue.has_bias:
        found["bias"] = random_values(rng, (desc.groups * desc.m,), desc.bias_element)
    for name, kind, count in (("scale_x", desc.scale_x, x_rows), ("scale_w", desc.scale_w, len(dense))):
        if kind != "none":
            found[name] = rng.uniform(0.5, 2.0, 1 if kind == "tensor" else count).astype(np.float32)
    if desc.has_c:
        found["c"] = random_values(rng, (desc.n, desc.outputs), desc.c_element)
    if desc.scale_y != "none":
        found["scale_y"] = rng.uniform(0.5, 2.0, 1).astype(np.float32)
    if desc.amax:
        found["amax"] = np.zeros(1, np.float32)
    device = place_name(plan)
    weight = weight_of(dense, desc)
    kept = dense_of(weight).reshape(desc.groups, desc.m, desc.k)

    def part(name: str, group: int) -> np.ndarray | None:
        values = found.get(name)
        return values if values is None or len(values) == 1 else values.reshape(desc.groups, -1)[group]

    of_places, scale_x = x, found.get("scale_x")
    if desc.x_rows is not None:
        assert routing is not None
        rows = np.clip(routing.x_index, 0, desc.x_rows - 1)
        of_places = x[rows]
        scale_x = scale_x if scale_x is None or len(scale_x) == 1 else scale_x[rows]
    data = tuple(
        Data(
            kept[g],
            of_places,
            part("bias", g),
            scale_x,
            part("scale_w", g),
            found.get("c"),
            found.get("scale_y"),
        )
        for g in range(desc.groups)
    )
    source = Guarded(x.shape, desc.x_element, device, desc.reduction + pad).fill(x)
    result = Guarded((y_rows, desc.outputs), desc.out_element, device, desc.outputs + pad)
    if in_place:
        result.fill(found["c"])
    elements, strides = {"bias": desc.bias_element, "c": desc.c_element}, {"c": desc.outputs + 3}
    taken = {operand.name for operand in desc.operands()}
    named = {} if routing is None else vars(routing)
    named = {name: one for name, one in named.items() if one is not None and name in taken}
    inputs = {
        name: Guarded(one.shape, ElementKind.F32 if one.dtype.kind == "f" else ElementKind.I32, device).fill(
            one
        )
        for name, one in named.items()
    }
    for name, values in found.items():
        if name != "c" or not in_place:
            element = elements.get(name, ElementKind.F32)
            inputs[name] = Guarded(values.shape, element, device, strides.get(name)).fill(values)
    given = np.asarray(tokens, np.int32)
    inputs[str(desc.group_tokens)] = Guarded(given.shape, ElementKind.I32, device).fill(given)
    views = {name: operand.view for name, operand in inputs.items()}
    views |= {"c": result.view} if in_place else {}
    kind = GemmSparse24Args if desc.op == "forward" else DgradSparse24Args
    args = kind(plan.pack(weight.to(device)), source.view, result.view, **views)
    space = scratch(plan.workspace_size(), device)
    return GroupedCase(plan, args, result, (source, *inputs.values()), data, space, routing, in_place)
