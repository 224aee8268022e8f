"""Batches of products: each has the bits of its own product, wherever its operands lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    MisalignedOperandError,
    Sparse24Weight,
    TensorView,
    TuningTable,
    explain,
    load_run,
    save_run,
)
from sparse24_plans.gemm.kernel_table import ENTRIES
from sparse24_plans.gemm.tuned import TunedKernel
from sparse24_plans.tuning import search

from ..plan.cases import changed
from ..sample_devices import AMPERE, H200, gpu_of
from ..support import device_of_row, plan_of_row, same_bits, weight_of
from .batched_cases import ORDERS, SHARED, BatchedCase, batched_case
from .kernel_entries import OWN, marked, on_host, plan_of, row_of, tokens

BATCHED = tuple(name for name in OWN if row_of(name).batches)
rows = pytest.mark.parametrize("row", [marked(name) for name in BATCHED])
gpu_rows = [name for name in BATCHED if not on_host(name)]
RESULTS = {"s8": ("i32", "s8", "bf16"), "fp8_e4m3": ("bf16", "f32"), "f32": ("f32",)}


def check(case: BatchedCase, *, bits: bool = True) -> np.ndarray:
    """Each batch is inside its product's bound and, where the kernel is deterministic, has its bits."""
    found = case.run()
    for batch in range(len(case.data)):
        single = case.single(batch)
        single.check(found[batch])
        if bits and case.plan.guarantee.deterministic:
            assert same_bits(found[batch], single.run()), f"batch {batch} has other bits than its product"
    return found


# The definition -------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("row", ["host_strict", "host_blas"])
def test_host_kernels_multiply_batches_of_every_type_order_and_stride(row, data, seed):
    draw = data.draw
    element = draw(st.sampled_from(["f32", "f16", "bf16", "s8", "fp8_e4m3"]))
    out = draw(st.sampled_from(RESULTS.get(element, (element, "f32"))))
    epilogue = draw(st.sampled_from(["identity", "bias", "relu", "bias_silu", "swiglu"]))
    if epilogue == "swiglu" and out == "i32":
        epilogue = "identity"
    fields = {
        "out_element": out,
        "bias_element": "f32",
        "epilogue": epilogue,
        "beta": 0.0 if epilogue == "swiglu" else draw(st.sampled_from([0.0, -0.5])),
        "alpha": draw(st.sampled_from([1.0, -0.37])),
        "x_order": draw(st.sampled_from(["row", "column"])),
        "y_order": draw(st.sampled_from(["row", "column"])),
        "scale_x": draw(st.sampled_from(["none", "tensor", "row"])),
        "scale_w": draw(st.sampled_from(["none", "tensor", "row"])),
        "shared_weight": draw(st.booleans()),
        "batches": draw(st.integers(0, 4)),
    }
    n, m = draw(st.integers(0, 6)), 16 * draw(st.integers(0, 2))
    plan = plan_of(row, n=n, m=m, k=8 * draw(st.integers(0, 4)), element=element, **fields)
    present = {"x"} | {name for name in SHARED if name in {one.name for one in plan.descriptor.operands()}}
    shared = tuple(name for name in sorted(present) if draw(st.booleans()))
    orders = tuple(draw(st.sampled_from(ORDERS)) for _ in range(3))
    units = tuple(draw(st.integers(0, 5)) for _ in range(3))
    check(batched_case(plan, seed, orders=orders, shared=shared, units=units), bits=row == "host_strict")


def test_dgrad_multiplies_batches():
    for fields in ({"batches": 3}, {"batches": 3, "shared_weight": True}):
        plan = plan_of("host_strict", n=5, m=24, k=16, element="bf16", op="dgrad", **fields)
        check(batched_case(plan, orders=("interleaved", "gaps", "dense")))


def test_quantized_weights_are_multiplied_in_batches():
    quantized = {"weight_element": "s4", "weight_group": 32, "weight_scale_element": "f32"}
    for shared in (False, True):
        plan = plan_of(
            "host_strict", n=3, m=16, k=64, element="bf16", batches=2, shared_weight=shared, **quantized
        )
        check(batched_case(plan))


@pytest.mark.parametrize("batches", [None, 1])
def test_one_batch_is_the_plan_of_the_product(batches):
    for fields in ({"element": "bf16"}, {"element": "f32"}, {"element": "s8", "scale_w": "row"}):
        for device in ("host", H200, AMPERE):
            problem = {"n": 37, "m": 4096, "k": 4096, **fields}
            plain = explain(GemmSparse24Descriptor(**problem), device=device)
            assert (
                explain(GemmSparse24Descriptor(**problem, batches=batches), device=device).rows == plain.rows
            )
            assert explain(GemmSparse24Descriptor(**problem, batches=batches), device=device) == plain


def test_one_batch_asks_for_the_compilations_of_the_product():
    problem = {"n": 37, "m": 4096, "k": 4096, "element": "bf16"}
    paths = [
        [one.path for one in GemmSparse24Plan.compile(GemmSparse24Descriptor(**problem, **more), device=H200)]
        for more in ({}, {"batches": 1}, {"batches": 1, "shared_weight": True})
    ]
    assert paths[0] == paths[1] == paths[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": -1}, "batches"),
        ({"batches": 2, "groups": 2}, "batches: expected None with groups, got 2"),
        ({"shared_weight": True}, "shared_weight: expected False without batches"),
        ({"batches": 2**62}, "expected operands of fewer than 2\\^63 elements"),
    ],
)
def test_problems_without_a_meaning_are_refused(change, message):
    with pytest.raises(InvalidProblemError, match=message):
        GemmSparse24Descriptor(**{"n": 2, "m": 16, "k": 8, "element": "bf16", **change})


# Operands -------------------------------------------------------------------------------------------


def small_case(**fields: object) -> BatchedCase:
    problem = {"n": 4, "m": 16, "k": 8, "element": "f32", "batches": 3, **fields}
    return batched_case(plan_of("host_strict", **problem), orders=("gaps", "gaps", "gaps"))


@pytest.mark.parametrize(
    ("strides", "fits"),
    [
        ((64, 16, 1), True),
        ((16, 48, 1), True),  # a row of each batch in turn
        ((16, 50, 1), True),
        ((63, 16, 1), False),
        ((16, 47, 1), False),
        ((0, 16, 1), False),
        ((15, 48, 1), False),
        ((24, 72, 1), True),
        ((66, 16, 1), True),
        ((40, 60, 1), True),  # batches begin at 0, 40, 80 and rows 60 apart: none meet, though none nest
        ((40, 88, 1), False),  # row 1 begins at 88, batch 2 at 80
    ],
)
def test_batches_of_a_result_lie_apart(strides, fits):
    case = small_case()
    at = {tuple(np.unravel_index(i, (3, 4, 16))): 0 for i in range(192)}
    cells = [sum(i * s for i, s in zip(place, strides, strict=True)) for place in at]
    assert fits == (len(set(cells)) == len(cells))
    memory = np.zeros(max(cells) + 1, np.float32)
    y = TensorView(memory.ctypes.data, (3, 4, 16), "f32", case.args.y.device, strides=strides, owner=memory)
    verdict = case.plan.can_implement(replace(case.args, y=y))
    assert bool(verdict) == fits
    assert fits or "y: expected batches that lie apart" in str(verdict.error)


@given(data=st.data())
def test_results_are_refused_exactly_if_their_elements_overlap(data):
    draw = data.draw
    shape = tuple(draw(st.integers(1, 5)) for _ in range(3))
    strides = (draw(st.integers(0, 40)), draw(st.integers(shape[2], 40)), 1)
    desc = GemmSparse24Descriptor(n=shape[1], m=shape[2], k=8, element="f32", batches=shape[0])
    plan = GemmSparse24Plan.select(desc, device="host")
    case = batched_case(plan)
    cells = np.add.outer(
        np.add.outer(np.arange(shape[0]) * strides[0], np.arange(shape[1]) * strides[1]), np.arange(shape[2])
    )
    memory = np.zeros(int(cells.max()) + 1, np.float32)
    y = TensorView(memory.ctypes.data, shape, "f32", case.args.y.device, strides=strides, owner=memory)
    fits = len(np.unique(cells)) == cells.size
    assert bool(plan.can_implement(replace(case.args, y=y))) == fits


def test_operands_in_the_gaps_between_batches_do_not_overlap():
    """X and Y in turns, batch by batch and row by row, in one buffer."""
    n, m, k, batches = 4, 16, 8, 3
    plan = plan_of("host_strict", n=n, m=m, k=k, element="f32", batches=batches)
    case = batched_case(plan)
    memory = np.zeros(batches * n * (m + k), np.float32)

    def part(start: int, width: int, strides: tuple[int, ...]) -> TensorView:
        address = memory.ctypes.data + 4 * start
        shape = (batches, n, width)
        return TensorView(address, shape, "f32", case.args.y.device, strides=strides, owner=memory)

    both = m + k
    for strides in ((n * both, both, 1), (both, batches * both, 1)):
        y, x = part(0, m, strides), part(m, k, strides)
        assert case.plan.can_implement(replace(case.args, x=x, y=y))
        x = part(m - 4, k, strides)
        verdict = case.plan.can_implement(replace(case.args, x=x, y=y))
        assert "y: expected memory apart from x, got an overlap" in str(verdict.error)


def test_c_may_be_y_but_no_c_of_all_batches():
    case = small_case(beta=0.5)
    assert case.plan.can_implement(replace(case.args, c=case.args.y))
    shared = changed(case.args.y, strides=(0, *case.args.y.strides[1:]))
    verdict = case.plan.can_implement(replace(case.args, c=shared))
    assert "y: expected memory apart from c" in str(verdict.error)


def test_wrong_operands_are_refused_by_name():
    case = small_case(epilogue="bias", scale_w="tensor")
    for change, message in (
        ({"x": changed(case.args.x, shape=(2, 4, 8))}, "x: expected shape \\[3, 4, 8\\]"),
        ({"x": changed(case.args.x, strides=(-64, 24, 1))}, "x: expected a batch stride of at least 0"),
        ({"bias": changed(case.args.bias, strides=(20, 2))}, "bias: expected contiguous memory"),
        (
            {"scale_w": changed(case.args.scale_w, shape=(3,), strides=(1,))},
            "scale_w: expected shape \\[3, 1\\]",
        ),
        ({"weight": case.plan.pack(Sparse24Weight.prune_compress(np.ones((48, 8), np.float32)))}, None),
        (
            {"weight": Sparse24Weight.prune_compress(np.ones((16, 8), np.float32))},
            "weight: expected f32\\[48, 8\\]",
        ),
    ):
        error = case.plan.can_implement(replace(case.args, **change)).error
        assert (error is None) == (message is None)
        if message is not None:
            with pytest.raises(InvalidProblemError, match=message):
                raise error


# Selection ------------------------------------------------------------------------------------------


def test_kernels_without_batches_are_refused_by_name():
    desc = GemmSparse24Descriptor(n=16, m=64, k=64, element="bf16", batches=3)
    reasons = {row: reason for row, _, reason in explain(desc, device=H200).rows}
    assert reasons["inflate_cublas"] == "serves one batch, got 3"
    assert reasons["wgmma_sp"] is None
    ragged = GemmSparse24Descriptor(n=16, m=72, k=64, element="bf16", batches=3)
    reasons = {row: reason for row, _, reason in explain(ragged, device=H200).rows}
    assert reasons["wgmma_sp"] == "needs m a multiple of 64 with a weight for each batch, got 72"
    assert explain(ragged.model_copy(update={"shared_weight": True}), device=H200).chosen == "wgmma_sp"
    assert explain(ragged, device=H200).chosen == "inflate_strict"


def test_every_own_kernel_serves_batches_or_says_why_not():
    for entry in ENTRIES:
        if entry.on_host or entry.only_groups:
            continue
        element = entry.elements[0]
        desc = GemmSparse24Descriptor(n=16, m=64, k=64, element=element, op=entry.ops[0], batches=2)
        assert (entry.refusal(desc) is None) == entry.batches


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("element", ["f32", "bf16", "s8", "fp8_e4m3"])
def test_batches_have_the_arithmetic_of_their_product(element, shared):
    """The arithmetic is the same even if many batches would be faster without split-K."""
    rng = np.random.default_rng(1)
    for _ in range(8):
        n, m, k = (
            int(2 ** rng.uniform(0, 11)),
            64 * int(2 ** rng.uniform(0, 8)),
            32 * int(2 ** rng.uniform(2, 9)),
        )
        one = GemmSparse24Descriptor(n=n, m=m, k=k, element=element)
        many = one.model_copy(update={"batches": int(2 ** rng.uniform(1, 9)), "shared_weight": shared})
        for preference in ({}, {"require": {"batch_invariant": True}}, {"max_workspace_bytes": 0}):
            backend = row_of(explain(one, preference=preference, device=H200).chosen).backend
            wish = {**preference, "prefer_backend": backend}  # strict kernels are preferred for small batches
            chosen = [explain(desc, preference=wish, device=H200) for desc in (one, many)]
            assert chosen[0].chosen == chosen[1].chosen
            slices = [one.details.partition("K in ")[2].partition(" ")[0] for one in chosen]
            assert slices[0] == slices[1] or element == "s8"


def test_batches_have_the_slices_of_their_products_tuned_schedule():
    device = gpu_of(9, 0, name="NVIDIA H200", multiprocessors=132, driver="1")
    one = GemmSparse24Descriptor(n=64, m=4096, k=4096, element="bf16")
    many = one.model_copy(update={"batches": 8})
    entry = row_of("wgmma_sp")
    usual = explain(one, device=device).details.partition("K in ")[2][0]
    other = next(one for one in entry.kernel.candidates(one, device) if one["split_k"] not in (1, int(usual)))
    version = entry.kernel.tuning_version(device)
    times = {"microseconds": 1.0, "default_microseconds": 2.0}
    tuned = TunedKernel(kernel="wgmma_sp", version=version, problem=one, configuration=other, **times)
    table = TuningTable("NVIDIA H200", "1", [tuned])
    for desc in (one, many):
        details = explain(desc, device=device, tuning=table).details
        assert f"K in {other['split_k']} slices" in details
    assert f"K in {usual} slices" in explain(many, device=device).details


def test_batches_are_not_tuned():
    desc = GemmSparse24Descriptor(n=16, m=64, k=64, element="bf16", batches=3)
    with pytest.raises(InvalidProblemError, match="problems: expected batches None"):
        search._jobs([desc.one_batch, desc], None, H200)


def test_plans_of_any_number_of_tokens_take_batches():
    desc = GemmSparse24Descriptor(n=1, m=64, k=64, element="bf16", batches=3)
    plans = GemmSparse24Plan.for_tokens(desc, 300, device=H200)
    assert plans.kernels == ("wgmma_sp",)
    assert plans[300].descriptor == desc.model_copy(update={"n": 300})


@pytest.mark.parametrize("order", ["row", "column"])
def test_a_recorded_run_is_replayed(tmp_path, order):
    fields = {"epilogue": "bias", "x_order": order, "y_order": order, "beta": 0.5}
    plan = plan_of("host_strict", n=5, m=16, k=32, element="bf16", batches=3, **fields)
    case = batched_case(plan, 4, orders=("gaps", "interleaved", "gaps"))
    case.run()
    save_run(tmp_path / "run", plan, case.args)
    again = load_run(tmp_path / "run")
    assert again.descriptor == plan.descriptor
    assert again.replay().equal


# Kernels --------------------------------------------------------------------------------------------

VARIANTS = {
    "plain": {},
    "bias": {"epilogue": "bias_silu", "out_element": "f32", "beta": -0.5},
    "gate": {"epilogue": "bias_swiglu"},
    "columns": {"x_order": "column", "y_order": "column", "epilogue": "bias", "beta": 0.5},
    "scales": {"scale_x": "row", "scale_w": "tensor", "epilogue": "bias"},
}
SIZES = [(5, 64, 256, 7), (37, 192, 528, 3), (300, 320, 1040, 2), (72, 4160, 512, 5)]
"""n, m, k and batches: split-K, ragged ends, several token tiles, and more work tiles than SMs.

On the host the last three would be alike, so it takes the first two.
"""


def problem_of(
    row: str, variant: str, n: int, m: int, k: int, batches: int, **more: object
) -> dict[str, object]:
    entry, fields = row_of(row), dict(VARIANTS[variant])
    element = entry.elements[-1]
    if not entry.column_order:
        fields = {name: word for name, word in fields.items() if name not in ("x_order", "y_order")}
    if not entry.scales:
        fields = {name: word for name, word in fields.items() if not name.startswith("scale")}
    if element == "s8" and fields:
        fields |= {"out_element": fields.get("out_element", "s8"), "bias_element": "f32"}
    k -= k % 32
    if "x_order" in fields:
        n += -n % 8
    if on_host(row):
        n, m, k = min(n, 6), 32, 64
    found = {"n": tokens(row, n), "m": m, "k": k, "element": element, "batches": batches, "alpha": 0.75}
    return found | fields | more


@pytest.mark.parametrize(
    ("row", "sizes"),
    [marked(row, sizes) for row in BATCHED for sizes in (SIZES[:2] if on_host(row) else SIZES)],
    ids=str,
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_batch_has_the_bits_of_its_product(row, variant, sizes):
    """In every order, aligned for TMA and not, with shared operands, and with C in Y."""
    for shared_weight in (False, True):
        plan = plan_of(row, **problem_of(row, variant, *sizes, shared_weight=shared_weight))
        check(batched_case(plan, 1, orders=("gaps", "gaps", "gaps")))
        first = batched_case(plan, 2)
        want = first.run()
        present = {one.name for one in plan.descriptor.operands()} | {"x"}
        shared = tuple(name for name in SHARED if name in present)
        check(batched_case(plan, 3, orders=("interleaved", "reversed gaps", "interleaved"), shared=shared))
        for units, offsets in (((16, 3, 16), (0, 0, 0)), ((32, 8, 1), (16, 1, 1))):
            orders = ("interleaved", "reversed gaps", "gaps")
            other = batched_case(plan, 2, orders=orders, units=units, offsets=offsets)
            assert same_bits(want, other.run()) or not plan.guarantee.deterministic
        desc = plan.descriptor
        if desc.has_c and desc.c_element is desc.out_element:
            in_place = batched_case(plan, 2, orders=("dense", "gaps", "dense"), in_place=True)
            assert same_bits(want, in_place.run()) or not plan.guarantee.deterministic


@rows
@pytest.mark.parametrize("batches", [1, 2, 67, 300])
def test_any_number_of_batches(row, batches):
    sizes = (3, 16, 32) if on_host(row) else (tokens(row, 24), 128, 512)
    n, m, k = sizes
    plan = plan_of(row, n=n, m=m, k=k, element=row_of(row).elements[-1], batches=batches, shared_weight=True)
    case = batched_case(plan, batches, orders=("interleaved", "interleaved", "dense"))
    found = case.run()
    for batch in {0, batches // 2, batches - 1}:
        single = case.single(batch)
        single.check(found[batch])
        assert same_bits(found[batch], single.run()) or not plan.guarantee.deterministic


@rows
def test_empty_batches_write_nothing(row):
    for change in ({"batches": 0}, {"batches": 3, "n": 0}):
        desc = GemmSparse24Descriptor(
            **{"n": 4, "m": 64, "k": 64, "element": row_of(row).elements[-1], **change}
        )
        plan = plan_of_row(row).select(desc, device=device_of_row(row))
        assert batched_case(plan).run().size == 0


@pytest.mark.gpu
@pytest.mark.parametrize("quantized", [("s4", 64, "bf16"), ("s8", 0, "f32"), ("fp8_e4m3", 128, "bf16")])
@pytest.mark.parametrize("n", [1, 17, 200])
def test_quantized_weights_of_batches(quantized, n):
    stored, group, scale = quantized
    fields = {"weight_element": stored, "weight_group": group, "weight_scale_element": scale}
    for more in ({}, {"shared_weight": True}, {"epilogue": "bias_swiglu"}):
        for row in ("wgmma_sp", "wgmma_sp_invariant"):
            plan = plan_of(row, n=n, m=256, k=1024, element="bf16", batches=3, **fields, **more)
            check(batched_case(plan, n, orders=("interleaved", "gaps", "dense")))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [8, 40, 64, 72, 256, 328])
@pytest.mark.parametrize("row", ["mma_sp_many", "wgmma_sp", "wgmma_sp_invariant"])
def test_column_major_batches(row, n):
    for x_order, y_order in (("column", "row"), ("row", "column"), ("column", "column")):
        plan = plan_of(row, n=n, m=256, k=544, element="f16", batches=3, x_order=x_order, y_order=y_order)
        for orders in (("gaps", "interleaved", "dense"), ("interleaved", "gaps", "dense")):
            check(batched_case(plan, n, orders=orders))
        shared = batched_case(plan, n, orders=("gaps", "reversed gaps", "dense"), shared=("x",))
        check(shared)


@pytest.mark.gpu
@pytest.mark.parametrize("row", gpu_rows)
def test_batches_in_a_cuda_graph(row):
    import cupy

    plan = plan_of(row, n=tokens(row, 40), m=192, k=512, element=row_of(row).elements[-1], batches=5)
    case = batched_case(plan, 0, orders=("gaps", "interleaved", "dense"))
    want = case.run()
    stream = cupy.cuda.Stream(non_blocking=True)
    space = case.workspace and case.workspace.view
    case.result.fill(np.zeros_like(want))
    with stream:
        stream.begin_capture()
        plan.run(case.args, workspace=space, stream=stream)
        graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    assert same_bits(want, case.fetch())


@pytest.mark.gpu
def test_misaligned_batches_of_x_are_refused():
    plan = plan_of("wgmma_sp", n=4, m=64, k=64, element="bf16", batches=2)
    case = batched_case(plan, orders=("gaps", "dense", "dense"), units=(8, 8, 8))
    x = changed(case.args.x, strides=(case.args.x.strides[0] - 4, *case.args.x.strides[1:]))
    with pytest.raises(MisalignedOperandError, match="x batch stride"):
        plan.run(replace(case.args, x=x))


@pytest.mark.gpu
@pytest.mark.parametrize("row", gpu_rows)
def test_a_replay_finds_every_batch(row):
    plan = plan_of(row, n=tokens(row, 20), m=192, k=512, element=row_of(row).elements[-1], batches=3)
    if plan.guarantee.arithmetic is None:
        pytest.skip("names no arithmetic")
    case = batched_case(plan, 4)
    result = np.ascontiguousarray(case.run())
    dense = np.concatenate([one.dense for one in case.data])
    x = np.stack([one.x for one in case.data])
    args = GemmSparse24Args(weight_of(dense, plan.descriptor), x, result)
    assert plan.replay(args, 300).equal
    result[2, 3, 5] += 1
    found = plan.replay(args, np.array([[2 * plan.descriptor.n + 3, 5], [0, 0]]))
    assert (found.compared, found.differing) == (2, 1)
    assert found.first is not None
    assert found.first.token == 2 * plan.descriptor.n + 3


def test_a_replay_on_the_host_finds_every_batch():
    plan = plan_of("host_strict", n=5, m=16, k=32, element="bf16", batches=3, y_order="column")
    case = batched_case(plan, 4)
    result = np.asfortranarray(case.run().transpose(1, 2, 0)).transpose(2, 0, 1)
    args = replace(case.args, y=result)
    assert plan.replay(args).results == 3 * 5 * 16
    assert plan.replay(args).equal
    result[1, 4, 5] += 1
    first = plan.replay(args).first
    assert first is not None
    assert (first.token, first.output) == (9, 5)
