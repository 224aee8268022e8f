"""Why a row of the table can't serve a product: the reason names what stood in the way."""

from __future__ import annotations

import re

import pytest

from sparse24_plans import (
    BackendUnavailableError,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    PlanPreference,
    UnsupportedError,
    explain,
)
from sparse24_plans.gemm import kernel_table

from ..sample_devices import AMPERE, HOPPER, HOST, TURING, gpu_of
from .kernel_entries import MAX_TOKENS
from .test_selection import HOPPER_BARE, PROBLEM, WEIGHT_BYTES, choose, chosen


@pytest.mark.parametrize(
    ("device", "preference", "row", "words"),
    [
        (TURING, {}, "inflate_strict", ("compute capability 8.0", "7.5")),
        (HOPPER, {}, "host_blas", ("host", "invented sm_90")),
        (HOST, {}, "inflate_cublas", ("CUDA device",)),
        (HOPPER_BARE, {}, "inflate_cublas", ("cuBLASLt", "pip install", "cuda12")),
        (HOPPER, {"prefer_backend": "host"}, "inflate_cublas", ("prefer_backend is host",)),
        (HOPPER, {"tier": "host"}, "inflate_cublas", ("tier is host",)),
        (
            HOPPER,
            {"max_workspace_bytes": 5},
            "inflate_cublas",
            (str(WEIGHT_BYTES), "max_workspace_bytes is 5"),
        ),
        (HOPPER, {"require": {"batch_invariant": True}}, "inflate_cublas", ("batch_invariant",)),
        (
            HOPPER,
            {"require": {"math_precision": "bf16"}},
            "inflate_strict",
            ("math_precision is f32", "bf16"),
        ),
        (HOPPER, {"require": {"max_error_bound": 1e-9}}, "inflate_strict", ("error_bound(512)", "1e-09")),
        (HOPPER, {"whole_m": 4096}, "inflate_cublas", ("not batch invariant", "whole_m")),
        (HOPPER, {"whole_m": 8}, "inflate_strict", ("m = 256 exceeds whole_m = 8",)),
    ],
)
def test_a_reason_names_what_stood_in_the_way(device, preference, row, words):
    answer = explain(PROBLEM, preference=PlanPreference(**preference), device=device)
    reason = {name: reason for name, _, reason in answer.rows}[row]
    for word in words:
        assert word in reason


@pytest.mark.parametrize(
    ("device", "preference"),
    [
        (TURING, {}),
        (HOST, {"tier": "inflate"}),
        (HOPPER, {"prefer_backend": "host"}),
        (HOPPER, {"require": {"subnormals": "flushed"}}),
        (HOPPER_BARE, {"prefer_backend": "cusparselt"}),
        (TURING.model_copy(update={"cublaslt": None}), {"prefer_backend": "inflate_cublas"}),
    ],
)
def test_unsupported_lists_the_reason_of_every_row(device, preference):
    answer = explain(PROBLEM, preference=PlanPreference(**preference), device=device)
    with pytest.raises(UnsupportedError) as caught:
        choose(device, **preference)
    assert len(answer.rows) == len(kernel_table.ENTRIES)
    for name, _, reason in answer.rows:
        assert says(caught.value, name, reason)
        assert str(caught.value).count(f": {reason};") <= 1


def says(error: BaseException, kernel: str, reason: str) -> bool:
    """Whether the error gives the reason for the kernel, alone or with others."""
    return re.search(rf"\b{kernel}(, \w+)*: {re.escape(reason)}", str(error)) is not None


def test_reasons_of_kernels_of_device_and_element_come_first():
    problem = GemmSparse24Descriptor(n=2, m=8, k=24, element="s8")
    first = r"problem\. wgmma_sp_s8: .*rows of X.*; cusparselt: needs n "
    with pytest.raises(UnsupportedError, match=first):
        GemmSparse24Plan.select(problem, device="h200")


def test_reasons_of_forced_kernels_come_first():
    with pytest.raises(UnsupportedError, match=r"^no kernel can serve this problem\. wgmma_sp, wgmma_sp_inv"):
        choose(HOST, prefer_backend="wgmma_sp")


@pytest.mark.parametrize("arithmetic", ["hopper_tc_f32x6/slices=8", "fma32_in_order"])
def test_an_arithmetic_and_too_little_workspace_are_refused_by_name(arithmetic):
    wanted = {"require": {"arithmetic": arithmetic}, "max_workspace_bytes": 0, "prefer_kernel": "f32_split6"}
    said = "needs a workspace of" if "x6" in arithmetic else "required fma32_in_order"
    with pytest.raises(UnsupportedError, match=f"f32_split6: .*{said}"):
        choose(HOPPER, **wanted)


def test_select_raises_what_choose_raises():
    preference = PlanPreference(prefer_backend="inflate_strict")
    with pytest.raises(
        UnsupportedError, match=r"inflate_strict.*: runs on a CUDA device, the plan is for host"
    ):
        GemmSparse24Plan.select(PROBLEM, preference=preference, device="host")


def test_what_can_be_installed_is_unavailable_and_not_unsupported():
    with pytest.raises(BackendUnavailableError, match="pip install") as caught:
        choose(HOPPER_BARE, prefer_backend="inflate_cublas")
    assert says(caught.value, "inflate_strict", "prefer_backend is inflate_cublas")


def test_libraries_that_would_not_help_are_not_named():
    with pytest.raises(UnsupportedError, match="max_workspace_bytes is 5") as caught:
        choose(HOPPER_BARE, prefer_backend="inflate_cublas", max_workspace_bytes=5)
    assert type(caught.value) is UnsupportedError


def test_missing_libraries_do_not_matter_if_another_kernel_serves():
    assert choose(gpu_of(8, 0, libraries=False)).name == "inflate_strict"
    assert choose(HOPPER_BARE).name == "f32_split6"


@pytest.mark.parametrize("backend", ["mma_sp", "wgmma_sp", "cusparselt"])
def test_a_forced_backend_that_cannot_serve(device, backend):
    desc = GemmSparse24Descriptor(n=1, m=8, k=8, element="f32")
    with pytest.raises(UnsupportedError) as caught:
        GemmSparse24Plan.select(desc, device=device, preference=PlanPreference(prefer_backend=backend))
    for row in ("inflate_cublas", "inflate_strict", "host_blas", "host_strict"):
        assert says(caught.value, row, f"prefer_backend is {backend}")


@pytest.mark.parametrize("element", ["u8", "i32"])
def test_an_element_that_no_row_serves(device, element):
    desc = GemmSparse24Descriptor(n=1, m=8, k=8, element=element, out_element=element)
    with pytest.raises(UnsupportedError, match=f"serves elements .*, not {element}"):
        GemmSparse24Plan.select(desc, device=device)


@pytest.mark.parametrize(("row", "most"), MAX_TOKENS.items())
def test_rows_for_few_tokens_leave_more_to_others(row, most):
    for n in (most, most + 1):
        desc = GemmSparse24Descriptor(n=n, m=4096, k=4096, element="bf16")
        reasons = {name: reason for name, _, reason in explain(desc, device=AMPERE).rows}
        assert reasons[row] == (f"is preferred for n <= {most}, not {n}" if n > most else None)


@pytest.mark.parametrize(
    ("backend", "change", "words"),
    [
        *(
            ("inflate_strict", {name: "column"}, "serves x_order and y_order row")
            for name in ("x_order", "y_order")
        ),
        *(
            (backend, change, "takes no scale_x or scale_w")
            for backend in ("inflate_cublas", "inflate_strict", "mma_sp")
            for change in ({"scale_x": "tensor"}, {"scale_w": "row"})
        ),
    ],
)
def test_kernels_that_serve_rows_alone_or_no_scales_say_so(backend, change, words):
    desc = GemmSparse24Descriptor(n=8, m=64, k=64, element="bf16", **change)
    answer = explain(desc, preference=PlanPreference(prefer_backend=backend), device=HOPPER)
    assert answer.chosen is None
    reasons = [reason for name, kind, reason in answer.rows if kind == backend and not name.endswith("fp8")]
    assert reasons == [words] * len(
        [row for row in kernel_table.ENTRIES if row.backend == backend and "bf16" in row.elements]
    )


# Limits of grids and libraries --------------------------------------------------------------------

MAX_TILES = 2**31 - 1


@pytest.mark.parametrize(
    ("problem", "serves"),
    [
        ({"n": 16, "m": 32 * MAX_TILES, "k": 8}, True),
        ({"n": 17, "m": 32 * MAX_TILES, "k": 8}, False),
        ({"n": 16, "m": 32 * MAX_TILES + 1, "k": 8}, False),
        ({"n": 2**19, "m": 2**20, "k": 2**40}, True),
        ({"n": 2**19, "m": 2**20, "k": 2**40, "op": "dgrad"}, False),
        ({"n": 2**40, "m": 0, "k": 2**20}, True),
        ({"n": 0, "m": 2**40, "k": 2**20}, True),
    ],
)
def test_strict_problems_with_tiles_beyond_a_grid_are_unsupported(problem, serves):
    desc = GemmSparse24Descriptor(element="f32", **problem)
    kernel = chosen(HOPPER, desc, prefer_backend="inflate_strict")
    assert kernel == ("inflate_strict" if serves else None)


@pytest.mark.parametrize("name", ["n", "m", "k"])
def test_a_dimension_beyond_cublas_is_unsupported(name):
    sizes = {"n": 8, "m": 8, "k": 8}
    most = 2**31 - 8 if name == "k" else 2**31 - 1
    forced = {"prefer_backend": "inflate_cublas"}
    within = GemmSparse24Descriptor(element="bf16", **{**sizes, name: most})
    beyond = GemmSparse24Descriptor(element="bf16", **{**sizes, name: 2**31})
    assert chosen(HOPPER, within, **forced) == "inflate_cublas"
    answer = explain(beyond, preference=PlanPreference(**forced), device=HOPPER)
    assert answer.chosen is None
    assert f"{2**31}" in str(answer)


@pytest.mark.parametrize(("k", "serves"), [(4096, True), (4104, False)])
def test_weights_beyond_the_inflate_kernels_grid_are_unsupported(k, serves):
    """A block of it makes 16384 bytes: here a row of 4096 float32."""
    desc = GemmSparse24Descriptor(n=8, m=MAX_TILES, k=k, element="f32")
    assert (chosen(HOPPER, desc, prefer_backend="inflate_cublas") is not None) == serves


@pytest.mark.gpu
class TestWorkspaceLimits:
    def test_limit_at_selection(self):
        desc = GemmSparse24Descriptor(n=600, m=16, k=4096, element="f32")
        none = PlanPreference(max_workspace_bytes=0)
        assert GemmSparse24Plan.select(desc, device=0, preference=none).sku.backend == "inflate_strict"
        forced = none.model_copy(update={"prefer_backend": "inflate_cublas"})
        with pytest.raises(UnsupportedError, match="max_workspace_bytes"):
            GemmSparse24Plan.select(desc, device=0, preference=forced)

    def test_limit_is_kept(self):
        desc = GemmSparse24Descriptor(n=6, m=16, k=32, element="f16", epilogue="bias")
        forced = PlanPreference(prefer_backend="inflate_cublas")
        free = GemmSparse24Plan.select(desc, device=0, preference=forced).workspace_size()
        for limit in (free, 1 << 20, 5000):
            preference = forced.model_copy(update={"max_workspace_bytes": limit})
            assert GemmSparse24Plan.select(desc, device=0, preference=preference).workspace_size() <= limit
