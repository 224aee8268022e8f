"""Libraries have a plan for each pair of row strides: made when first met, kept for the last so many."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from sparse24_plans import (
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    PlanPreference,
    TensorView,
    UnsupportedError,
)
from sparse24_plans.device.tensors import Device
from sparse24_plans.gemm.backends import cusparselt, inflate_cublas
from sparse24_plans.gemm.kernel import MAX_STRIDES
from sparse24_plans.plan.kernel import Choice

from ..sample_devices import H200
from ..support import Guarded
from .kernel_entries import case_of, row_of

N, M, K = 16, 32, 64
GREEDY = (99 * K, M)
"""Strides for which a library asks for more memory."""
DESC = GemmSparse24Descriptor(n=N, m=M, k=K, element="bf16")


class LibraryPlan:
    """Stands for a library's plan: counts those that are alive, and says what it was made for."""

    def __init__(self, strides: tuple[int, int]) -> None:
        self.strides, self.workspace_size = strides, 4096 if strides == GREEDY else 1024
        self.launched: list[int] = []

    def bind(self, *addresses: int, **more: object):
        return self.launched.append

    def algorithm(self, attribute: int) -> int:
        return 1


class Library:
    """A kernel's library: every plan that it made, in order."""

    def __init__(self, monkeypatch, name: str) -> None:
        self.made: list[tuple[int, int]] = []
        self.alive: weakref.WeakSet = weakref.WeakSet()
        if name == "inflate_cublas":
            bound = SimpleNamespace(bind=lambda *args: lambda stream: None)
            monkeypatch.setattr(inflate_cublas, "Inflate", lambda element, device: bound)
            monkeypatch.setattr(inflate_cublas, "load", lambda *args, **more: bound)
            monkeypatch.setattr(
                inflate_cublas.Kernel,
                "_find_matmul",
                lambda kernel, w, x, y_stride, element: self.make((x.leading, y_stride)),
            )
        else:
            monkeypatch.setattr(cusparselt, "_make", lambda desc, ordinal, conf, *strides: self.make(strides))
        module = {"inflate_cublas": inflate_cublas, "cusparselt": cusparselt}[name]
        self.kernel = module.Kernel(Choice(DESC, H200, row_of(name), PlanPreference(), {}))

    def make(self, strides: tuple[int, int]) -> LibraryPlan:
        self.made.append(strides)
        plan = LibraryPlan(strides)
        self.alive.add(plan)
        return plan

    def launcher(self, source_stride: int, result_stride: int = M):
        home, bf16 = Device("cuda", 0), ElementKind.BF16
        views = {
            "source": TensorView(4096, (N, K), bf16, home, strides=(source_stride, 1)),
            "result": TensorView(8192, (N, M), bf16, home, strides=(result_stride, 1)),
            "packed": TensorView(16384, (9,), ElementKind.U8, home),
            "values": TensorView(16384, (M, K // 2), bf16, home),
            "metadata": TensorView(32768, (M, K // 8), ElementKind.U16, home),
        }
        return self.kernel.launcher(views, 1 << 20)


@pytest.fixture(params=["inflate_cublas", "cusparselt"])
def library(request, monkeypatch) -> Library:
    return Library(monkeypatch, request.param)


def test_packed_rows_are_planned_at_select(library):
    assert library.made == [(K, M)]
    library.launcher(K)
    assert library.made == [(K, M)]


def test_each_pair_is_planned_once(library):
    for _ in range(3):
        for strides in ((K + 8, M), (K, M + 8), (K + 8, M + 8)):
            library.launcher(*strides)
    assert library.made == [(K, M), (K + 8, M), (K, M + 8), (K + 8, M + 8)]


def test_only_the_last_so_many_are_kept(library):
    for index in range(3 * MAX_STRIDES):
        library.launcher(K, M + 8 * index)
        if index == 2 * MAX_STRIDES:
            gc.collect()
            assert len(library.alive) <= MAX_STRIDES
    gc.collect()
    assert len(library.alive) == MAX_STRIDES


def test_what_was_used_longest_ago_goes_first(library):
    for index in range(MAX_STRIDES - 1):
        library.launcher(K + 8 * (index + 1), M + 8)
    library.launcher(K)  # that of packed rows, again
    library.launcher(K, M + 1024)  # one too many: the first of the others goes
    made = len(library.made)
    library.launcher(K)
    assert len(library.made) == made
    library.launcher(K + 8, M + 8)
    assert library.made[made:] == [(K + 8, M + 8)]


def test_a_launch_keeps_its_plan(library):
    launch = library.launcher(K, M + 8)
    for index in range(2 * MAX_STRIDES):
        library.launcher(K, M + 16 + 8 * index)
    launch(5)  # as a Bound would


def test_strides_that_need_more_workspace_than_the_plan_said():
    with pytest.MonkeyPatch.context() as patch:
        library = Library(patch, "cusparselt")
        size = library.kernel.workspace_size
        with pytest.raises(UnsupportedError, match="needs 4096 bytes of workspace for strides"):
            library.launcher(*GREEDY)
        assert library.kernel.workspace_size == size == 1024


@pytest.mark.gpu
def test_more_strides_than_are_kept_all_give_the_product():
    case = case_of("inflate_cublas", n=N, m=M, k=K, element="bf16")
    want, size = case.run().copy(), case.plan.workspace_size()
    for index in [*range(MAX_STRIDES + 8), 0, 1]:
        y = Guarded((N, M), ElementKind.BF16, 0, M + 8 * index)
        x = Guarded((N, K), ElementKind.BF16, 0, K + 8 * index).fill(case.x)
        args = GemmSparse24Args(case.args.weight, x.view, y.view)
        case.plan.run(args, workspace=case.workspace.view)
        case.fetch()
        np.testing.assert_allclose(y.numpy().astype(float), want.astype(float), rtol=2**-6, atol=2**-6)
        assert case.plan.workspace_size() == size == case.plan.explain().workspace_size
