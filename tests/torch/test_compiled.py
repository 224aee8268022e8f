"""In code that Inductor generates a product is called directly, and gives what the op gives, bit for bit."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._inductor import config, lowering
from torch._inductor import utils as inductor_utils

import sparse24_plans.torch as door
from sparse24_plans.torch import Sparse24Linear, gemm_dispatch, gemm_ops, library, plan_cache
from sparse24_plans.torch.gemm_dispatch import ProductSite

from .cases import DEVICE, S, integers, randn, weight

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="Inductor needs a C++ compiler for CPUs"
)
SITE, OP = "Sparse24ProductSite(", "torch.ops.sparse24."


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        yield


def code_of(function: Callable, *inputs: object, **options: object) -> tuple[torch.Tensor, str]:
    """The compiled function's result, and all code that was generated for it, without comments."""
    compiled = torch.compile(function, fullgraph=True, **options)
    result, codes = inductor_utils.run_and_get_code(compiled, *inputs)
    lines = "\n".join(codes).splitlines()
    return result, "\n".join(line for line in lines if not line.lstrip().startswith("#"))


def layer() -> Sparse24Linear:
    torch.manual_seed(0)
    return Sparse24Linear.from_linear(torch.nn.Linear(64, 96, device=DEVICE, dtype=torch.bfloat16))


def calls() -> dict[str, tuple[Callable, tuple]]:
    """An op and its arguments, of which x or dY is the first, for each that is called directly."""
    values, meta, _ = weight(dtype=torch.bfloat16)
    bytes_, of_bytes = S.prune_compress(integers(96, 64))
    x, dy, bias = randn(5, 64).bfloat16(), randn(5, 96).bfloat16(), randn(96).bfloat16()
    scales = randn(5).abs(), randn(96).abs()
    packed = S.pack(values, meta)
    wide = (None, None, "none", torch.float32)
    return {
        "linear": (S.linear, (x, values, meta, bias, None, "silu", torch.float32)),
        "linear, any dimensions": (S.linear, (randn(2, 3, 64).bfloat16(), values, meta)),
        "linear, packed": (S.linear, (x, packed, None, bias, 96)),
        "linear, batch-invariant": (
            S.linear,
            (x, values, meta, None, None, "none", None, '{"require": {"batch_invariant": true}}'),
        ),
        "scaled_linear": (S.scaled_linear, (integers(5, 64), bytes_, of_bytes, *scales, *wide)),
        "scaled_linear, one scale": (
            S.scaled_linear,
            (integers(5, 64), bytes_, of_bytes, None, scales[1][:1], *wide),
        ),
        "dgrad": (S.dgrad, (dy, values, meta)),
        "dgrad, packed": (S.dgrad, (dy, packed, None, 96, 64)),
    }


CALLS = calls()


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [*((name, False) for name in CALLS), ("linear", True), ("scaled_linear", True), ("dgrad, packed", True)],
)
def test_generated_code_calls_the_product_itself(name, dynamic):
    op, (x, *rest) = CALLS[name]
    x = x.clone()
    if dynamic:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    with torch.no_grad():
        result, code = code_of(lambda x: op(x, *rest), x)
        wanted = op(x, *rest)
    assert code.count(SITE) == 1
    assert OP not in code
    assert ("', True, " in code) == (dynamic and name != "scaled_linear"), "a scale a row fixes the rows"
    assert torch.equal(result, wanted)
    assert (result.dtype, result.stride()) == (wanted.dtype, wanted.stride())


def test_products_share_a_graph_with_surrounding_ops():
    values, meta, _ = weight(64, 64)
    x = randn(5, 64)

    def model(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):  # of one size, so their buffers are used again
            x = S.linear(x.relu(), values, meta) + 1
        return torch.cat([x, S.linear(x, values, meta)], 1)

    with torch.no_grad():
        result, code = code_of(model, x)
        torch.testing.assert_close(result, model(x))
    assert code.count(SITE) == 4


def test_one_graph_serves_every_token_count_and_row_stride():
    one = layer()
    compiled = torch.compile(one, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for n, width in ((5, 64), (2, 64), (300, 64), (5, 72), (5, 80), (5, 64)):
            x = randn(n, width, dtype=torch.bfloat16)[:, :64]
            assert torch.equal(compiled(x), one(x))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 3:67],
        lambda x: x.flatten()[1 : 1 + 5 * 64].view(5, 64),
        lambda x: x[:, :64].t().contiguous().t(),
        lambda x: x[:1, :64].expand(5, 64),
    ],
    ids=["columns of wider rows", "an odd address", "columns", "one row"],
)
@pytest.mark.parametrize("inside", [False, True])
def test_x_lies_anyhow(view, inside):
    values, meta, _ = weight(dtype=torch.bfloat16)
    whole = randn(5, 80, dtype=torch.bfloat16)
    call = (
        (lambda x: S.linear(view(x * 2), values, meta)) if inside else (lambda x: S.linear(x, values, meta))
    )
    x = whole if inside else view(whole)
    with torch.no_grad():
        result, code = code_of(call, x)
        assert torch.equal(result, call(x))
    assert SITE in code


def test_an_unaligned_x_is_copied(monkeypatch):
    """Whatever a kernel asks for: Inductor doesn't know."""
    values, meta, _ = weight(dtype=torch.bfloat16)
    x, out = (
        randn(4, 5, 64, dtype=torch.bfloat16)[1:3],
        torch.empty(2, 5, 96, dtype=torch.bfloat16, device=DEVICE),
    )
    site = ProductSite("x weight meta", False, None, None, False, "none", None, "", False)
    site(x, values, meta, out=out)
    form = plan_cache.plans[site]
    monkeypatch.setattr(form, "alignment", 2 * (x.data_ptr() & -x.data_ptr()))
    wanted = S.linear(x.clone(), values, meta)
    out.zero_()
    copies: list[torch.Tensor] = []

    def aligned(x: torch.Tensor, column_major: bool) -> torch.Tensor:
        monkeypatch.setattr(form, "alignment", 1)
        copies.append(x.clone())
        return copies[-1]

    monkeypatch.setattr(gemm_dispatch, "aligned", aligned)
    site(x, values, meta, out=out)
    assert len(copies) == 1
    assert torch.equal(out, wanted)


def test_gradients_of_compiled_code():
    values, meta, _ = weight()
    bias, x = randn(96), randn(5, 64)

    def gradients(call: Callable) -> list[torch.Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in (x, values, bias)]
        call(leaves[0], leaves[1], leaves[2]).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    def call(x: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return S.linear(x, values, meta, bias, None, "relu")

    for ours, theirs in zip(gradients(torch.compile(call, fullgraph=True)), gradients(call), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_weight_that_changed_in_place_is_seen():
    values, meta, _ = weight(dtype=torch.bfloat16)
    packed, x = S.pack(values, meta), randn(5, 64, dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: S.linear(x, packed, None, None, 96), fullgraph=True)
    with torch.no_grad():
        assert compiled(x).any()
        packed.copy_(S.pack(values * 0, meta))
        assert not compiled(x).any()


def test_both_sides_of_a_branch():
    values, meta, _ = weight()

    def call(x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        sides = (lambda x: S.linear(x, values, meta), lambda x: S.linear(x + 1, values, meta))
        return torch.cond(first, *sides, (x,))

    x = randn(5, 64)
    compiled = torch.compile(call, fullgraph=True)
    with torch.no_grad():
        for first in (True, False):
            which = torch.tensor(first, device=DEVICE)
            torch.testing.assert_close(compiled(x, which), call(x, which))


def test_threads_share_compiled_code():
    with torch.no_grad():
        compiled = torch.compile(layer(), fullgraph=True, dynamic=True)
        xs = [randn(n, 64, dtype=torch.bfloat16) for n in (2, 5, 9, 33)]
        wanted = [compiled(x) for x in xs]

    @torch.no_grad()
    def work(index: int) -> bool:
        return all(torch.equal(compiled(xs[index]), wanted[index]) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


# Ops that stay opaque -----------------------------------------------------------------------------


def test_a_weight_of_varying_size_goes_through_the_op():
    def call(x: torch.Tensor, values: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
        return S.linear(x, values, meta)

    x = randn(5, 64)
    values, meta, _ = weight()
    torch._dynamo.mark_dynamic(values, 0)
    torch._dynamo.mark_dynamic(meta, 0)
    with torch.no_grad():
        result, code = code_of(call, x, values, meta)
        assert torch.equal(result, call(x, values, meta))
    assert OP in code
    assert SITE not in code


def test_unknown_inductor_internals_leave_the_op(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "sparse24_plans.torch.inductor", None)  # its import fails
    monkeypatch.delattr(door, "inductor", raising=False)
    before = dict(lowering.lowerings)
    fake = library._announced(S.linear.default, gemm_ops.LINEAR.call, lambda x: x)
    with caplog.at_level(logging.WARNING, logger="sparse24_plans.compile"):
        assert (fake(1), fake(2)) == (1, 2)
    assert len(caplog.records) == 1
    assert "sparse24::linear goes through PyTorch's dispatcher in compiled code" in caplog.text
    assert lowering.lowerings == before


def test_inductor_internals_that_fail_in_use_leave_the_op(monkeypatch, caplog):
    one, x = layer(), randn(5, 64, dtype=torch.bfloat16)
    torch.compile(one)(x)  # so there is a lowering
    torch._dynamo.reset()

    def other(*_: object) -> None:
        raise TypeError("there is another argument")

    monkeypatch.setattr(door.inductor, "convert_shape_to_inductor", other)
    with caplog.at_level(logging.WARNING, logger="sparse24_plans.compile"), torch.no_grad():
        result, code = code_of(one, x)
    assert torch.equal(result, one(x))
    assert OP in code
    assert "there is another argument" in caplog.text


def test_code_from_the_cache_needs_no_lowering(monkeypatch):
    """Generated code imports what it calls: the process that runs the code may have lowered nothing."""
    fresh = getattr(inductor_utils, "fresh_cache", None) or inductor_utils.fresh_inductor_cache
    one, x = layer(), randn(5, 64, dtype=torch.bfloat16)
    with fresh(), config.patch(force_disable_caches=False, fx_graph_cache=True), torch.no_grad():
        assert torch.equal(torch.compile(one)(x), one(x))
        torch._dynamo.reset()
        hits = torch._dynamo.utils.counters["inductor"]
        hits.clear()
        for op in (S.linear.default, S.linear):
            monkeypatch.delitem(lowering.lowerings, op, raising=False)
        result, code = code_of(one, x)
        assert torch.equal(result, one(x))
    assert hits["fxgraph_cache_hit"]
    assert SITE in code


def test_importing_and_calling_loads_no_inductor():
    program = (
        "import sys, torch, sparse24_plans.torch as door; layer = door.Sparse24Linear(8, 8)\n"
        "layer(torch.zeros(2, 8)); layer.to('meta')(torch.zeros(2, 8, device='meta'))\n"
        "assert 'torch._inductor.lowering' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
