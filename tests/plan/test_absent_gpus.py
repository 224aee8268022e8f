"""A plan for a GPU that is named or described, and needn't be here: it knows all but how to run."""

from __future__ import annotations

import pickle

import pytest

from sparse24_plans import (
    BackendUnavailableError,
    Device,
    DeviceProperties,
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    PackedWeight,
    TensorView,
    UnsupportedError,
    Workspace,
    explain,
)
from sparse24_plans.device.devices import GPUS
from sparse24_plans.device.jit import launcher
from sparse24_plans.gemm.kernel_table import ENTRIES
from sparse24_plans.plan.kernel import Choice
from sparse24_plans.weights.packed_layouts import layout_of

from .. import sample_devices
from .cases import PLANS, PROBLEMS, name_of

CUDA = Device("cuda", 0)
H200 = sample_devices.H200.model_copy(update={"name": "H200, absent"})
"""It has no table of configurations."""
LIBRARIES = ("cusparselt", "cusparselt_fp8", "inflate_cublas", "packed_dense")


def product(n: int = 1024, element: str = "bf16", **more: object) -> GemmSparse24Descriptor:
    return GemmSparse24Descriptor(n=n, m=4096, k=14336, element=element, **more)


@pytest.mark.parametrize("name", sorted(GPUS))
def test_a_gpu_is_known_by_its_name_or_architecture(name):
    plan = GemmSparse24Plan.select(product(), device=name)
    assert (plan.device.name, plan.device.compute_capability) == (f"{GPUS[name][0]}, assumed", GPUS[name][1])
    assert plan.kernel == explain(product(), device=name).chosen
    assert plan.kernel == GemmSparse24Plan.select(product(), device=plan.device).kernel


@pytest.mark.parametrize("select", [GemmSparse24Plan.select, explain])
def test_another_name_is_refused_with_the_names_of_gpus(select):
    with pytest.raises(InvalidProblemError, match=r"device: expected .* sm90a, .* h200 or .*, got 'h300'"):
        select(product(), device="h300")


@pytest.mark.parametrize("desc", PROBLEMS, ids=name_of)
@pytest.mark.parametrize("name", ["a100", "h200"])
def test_every_family_plans_for_an_absent_gpu(desc, name):
    about = explain(desc, device=name)
    if about.chosen is None:
        with pytest.raises(UnsupportedError, match="no kernel can serve"):
            PLANS[type(desc)].select(desc, device=name)
        return
    plan = PLANS[type(desc)].select(desc, device=name)
    assert plan.explain() == about
    assert plan.workspace_size() == about.workspace_size
    assert about.workspace_is_exact or about.chosen in LIBRARIES


ON_GPUS = [one for one in ENTRIES if not one.on_host]
SERVED = [(entry, n) for entry in ON_GPUS for n in (1, 16, 704, 4096) if not entry.limits(product(n))]


@pytest.mark.parametrize(("entry", "n"), SERVED, ids=lambda one: getattr(one, "name", None))
def test_workspaces_are_those_of_the_kernel_that_is_compiled(entry, n, monkeypatch):
    """For a library it is a bound: all split-K scratch that cuBLASLt may take, or what is allowed."""
    desc = product(n, entry.elements[0], groups=entry.least_groups)
    asked = {"prefer_kernel": entry.name, "max_workspace_bytes": 2**31}
    plan = GemmSparse24Plan.select(desc, preference=asked, device=H200)
    if entry.name in LIBRARIES:
        sizes = {"inflate_cublas": 4 * 4096 * 14336 + (32 << 20)}
        assert plan.workspace_size() == sizes.get(entry.name, 2**31)
        assert plan.explain().workspace_is_exact is False
        return
    monkeypatch.setattr(launcher, "compiled", lambda source, *rest: source)
    with launcher.compiling_only() as compiled:
        kernel = entry.kernel(Choice(desc, H200, entry, plan.preference, {}))
    assert compiled
    assert (plan.workspace_size(), plan.explain().workspace_is_exact) == (kernel.workspace_size, True)
    assert plan.explain().details == kernel.details


def test_nothing_is_compiled(monkeypatch):
    def compiled(*given: object) -> None:
        raise AssertionError(given)

    monkeypatch.setattr(launcher, "compiled", compiled)
    n = 24 + id(compiled) % 7  # a problem that no cache has
    assert GemmSparse24Plan.select(product(n, "f32"), device="h100").kernel == "f32_split6"


def test_plan_of_absent_gpu_refuses_to_run_and_says_why():
    desc = product(16)
    plan = GemmSparse24Plan.select(desc, device="h200")
    (nbytes,) = [layout_of(desc.element).packed_shape(desc.m, desc.k)]
    packed = TensorView(1 << 20, nbytes, ElementKind.U8, CUDA)
    weight = PackedWeight(plan.sku.layout, desc.m, desc.k, desc.element, CUDA, (packed,))
    x = TensorView(1 << 30, (16, desc.k), desc.element, CUDA)
    args = GemmSparse24Args(weight, x, TensorView(1 << 31, (16, desc.m), desc.element, CUDA))
    space = Workspace(1 << 32, plan.workspace_size() or 1, CUDA)
    for attempt in (
        lambda: plan.run(args, workspace=space, stream=1),
        lambda: plan.bind(args, workspace=space),
    ):
        with pytest.raises(BackendUnavailableError, match="device: expected a plan of a present GPU"):
            attempt()
    verdict = plan.can_implement(args)
    assert not verdict
    assert isinstance(verdict.error, BackendUnavailableError)


def test_it_pickles_and_is_cached_apart_from_plan_that_runs():
    plan = GemmSparse24Plan.select(product(8), device="h100")
    assert pickle.loads(pickle.dumps(plan)) is plan
    assert GemmSparse24Plan.select(product(8), device="h100") is plan
    properties = DeviceProperties(kind="host")
    described, named = (GemmSparse24Plan.select(product(8), device=one) for one in (properties, "host"))
    assert described is named


def test_offline_cusparselt_needs_a_workspace_limit():
    desc, forced = product(16), {"prefer_backend": "cusparselt"}
    with pytest.raises(UnsupportedError, match="max_workspace_bytes bounds it"):
        GemmSparse24Plan.select(desc, preference=forced, device=H200)
    about = explain(desc, preference=forced, device=H200)
    assert (about.chosen, about.workspace_size, about.workspace_is_exact) == ("cusparselt", None, False)
    plan = GemmSparse24Plan.select(desc, preference={**forced, "max_workspace_bytes": 1 << 20}, device=H200)
    assert (plan.workspace_size(), plan.explain().workspace_is_exact) == (1 << 20, False)


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["bf16", "f32", "s8", "fp8_e4m3"])
@pytest.mark.parametrize("n", [1, 64, 1000, 8192])
def test_the_gpu_says_the_same(element, n):
    here = GemmSparse24Plan.select(product(n, element), device=0)
    described = GemmSparse24Plan.select(product(n, element), device=here.device)
    assert described.explain() == here.explain()
