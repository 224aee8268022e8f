"""The cache of plans that all ops share: it is bounded, and threads may fill it together."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from sparse24_plans import EpilogueKind, UnsupportedError
from sparse24_plans.torch import (
    Sparse24QuantizedLinear,
    Sparse24WeightOnlyLinear,
    blocksparse,
    elements,
    gemm_dispatch,
    plan_cache,
    prepare_ops,
)
from sparse24_plans.torch.plan_cache import PlanCache, Refusal

from .cases import DEVICE, S, randn, weight


def test_the_oldest_form_makes_room(monkeypatch):
    monkeypatch.setattr(plan_cache, "MAX_FORMS", 3)
    cache = PlanCache()
    for form in range(5):
        assert cache.keep(form, str(form)) == str(form)
    assert cache == {2: "2", 3: "3", 4: "4"}
    assert cache.get(0) is None


def test_threads_never_exceed_the_bound(monkeypatch):
    monkeypatch.setattr(plan_cache, "MAX_FORMS", 16)
    cache = PlanCache()

    def work(seed: int) -> int:
        most = 0
        for at in range(500):
            cache.keep((seed, at), at)
            most = max(most, len(cache))
        return most

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(work, range(4))) <= 16
    assert len(cache) == 16


def test_a_refusal_raises_its_error_again():
    refusal = Refusal(UnsupportedError("no kernel"))
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="no kernel"):
            refusal.run(None, None)


def test_all_ops_use_one_cache():
    plan_cache.plans.clear()
    values, meta, _ = weight()
    S.linear(randn(3, 64), values, meta)
    S.decompress(values, meta)
    layout = blocksparse.Layout([[1]], 16)
    blocksparse.matmul(randn(1, 1, 16, 16), randn(1, 1, 16, 8), layout, "dsd")
    kinds = [type(entry).__name__ for entry in plan_cache.plans.values()]
    assert {"CheckedProduct", "_Prepared", "_CheckedProblem"} <= set(kinds)


@pytest.mark.parametrize("name", [EpilogueKind.RELU, np.str_("relu")], ids=["a word", "of NumPy"])
@pytest.mark.parametrize("layer", [Sparse24WeightOnlyLinear, Sparse24QuantizedLinear])
def test_an_activation_may_be_any_string(layer, name):
    torch.manual_seed(0)
    given, plain = (layer(64, 32, activation=one, device=DEVICE).eval() for one in (name, "relu"))
    given.load_state_dict(plain.state_dict())
    x = randn(3, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(given(x), plain(x))


def test_a_first_call_allocates_each_result_once(monkeypatch):
    """It allocates none if ``out`` is given."""
    made = []

    def counted(shape: tuple[int, ...], *form: object) -> Callable[[], torch.Tensor]:
        make = elements.allocation(shape, *form)
        return lambda: (made.append(tuple(shape)), make())[1]

    for module in (gemm_dispatch, prepare_ops):
        monkeypatch.setattr(module, "allocation", counted)
    values, meta, _ = weight(264, 136)
    made.clear()
    S.linear_out(randn(7, 136), values, meta, None, randn(7, 264))
    assert made == []
    S.decompress(values, meta)
    assert made == [(264, 136)]
