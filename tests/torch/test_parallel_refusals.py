"""Layers, styles and calls that do not fit several ranks are refused, and change nothing."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from sparse24_plans import InvalidProblemError, UnsupportedError
from sparse24_plans.torch import ColwiseSparse24, RowwiseSparse24

from .parallel_cases import INVARIANT, K, M, layer, mesh_of, tokens
from .rank_processes import four_ranks

world = pytest.fixture(four_ranks, scope="module")


STRICT = {"bit_stable_across_hardware": True}
REFUSED = {  # the error: its words, of which layer (None: a dense one) and style
    InvalidProblemError: {
        "module: expected a Sparse24Linear": (None, ColwiseSparse24()),
        "out_features: expected a multiple of 2 ranks, got 97": ({"m": 97}, ColwiseSparse24()),
        "in_features: expected a multiple of 8 times 2 parts of K, got 120": ({"k": 120}, RowwiseSparse24()),
        "in_features: expected a multiple of 8 times 4 parts of K, got 48": (
            {"k": 48},
            RowwiseSparse24(parts=4),
        ),
        "parts: expected a multiple of 2 ranks, got 1": ({}, RowwiseSparse24(parts=1)),
        "out_features: expected a multiple of 64": ({"m": 96}, RowwiseSparse24(parts=4)),
        "out_features: expected a multiple of 16 times 2 ranks for swiglu, got 80": (
            {"m": 80, "activation": "swiglu"},
            ColwiseSparse24(),
        ),
    },
    UnsupportedError: {
        "activation: swiglu follows a sum over all of K": (
            {"m": 96, "activation": "swiglu"},
            RowwiseSparse24(),
        ),
        "depend on the number of ranks": ({"require": INVARIANT}, RowwiseSparse24()),
        "one sum over K": ({"require": STRICT}, RowwiseSparse24(parts=2)),
    },
}


def refused(kind: type[Exception], message: str) -> None:
    options, style = REFUSED[kind][message]
    module = nn.Linear(K, M) if options is None else layer(**options)
    before = type(module)
    with pytest.raises(kind, match=message):
        parallelize_module(module, mesh_of(2), style)
    assert type(module) is before


@pytest.mark.parametrize(("kind", "message"), [(kind, one) for kind, of in REFUSED.items() for one in of])
def test_uncuttable_layers_are_refused_and_stay_unchanged(world, kind, message):
    world.run(refused, kind, message)


def refused_later() -> None:
    mesh = mesh_of(2)
    cut = parallelize_module(layer(), mesh, RowwiseSparse24(output_layouts=Shard(0)))
    with pytest.raises(
        InvalidProblemError, match="output_layouts: expected a dimension 0 that 2 ranks divide"
    ):
        cut(tokens(3, K // 2))
    with pytest.raises(InvalidProblemError, match="module: expected a Sparse24Linear"):
        parallelize_module(cut, mesh, ColwiseSparse24())
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    with pytest.raises(InvalidProblemError, match="device_mesh: expected one dimension"):
        parallelize_module(layer(), grid, ColwiseSparse24())
    with pytest.raises(InvalidProblemError, match="x: expected a DTensor on"):
        cut(distribute_tensor(tokens(4, K), grid["a"], [Replicate()]))


def test_calls_that_do_not_fit_are_refused(world):
    world.run(refused_later)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RowwiseSparse24(parts=3), "parts: expected a power of two, got 3"),
        (lambda: RowwiseSparse24(parts="two"), "parts: expected a power of two, got 'two'"),
        (lambda: ColwiseSparse24(input_layouts=Partial()), "input_layouts: expected Shard or Replicate"),
        (lambda: ColwiseSparse24(use_local_output=3), "use_local_output: expected True or False, got 3"),
        (lambda: RowwiseSparse24(output_layouts="rows"), "output_layouts: expected Shard or Replicate"),
    ],
)
def test_styles_that_mean_nothing_are_refused(make, message):
    with pytest.raises(InvalidProblemError, match=message):
        make()
