"""A C program launches what Python would launch: kernel, grid, and every byte of the parameters."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest

from sparse24_plans import (
    CompressSparse24Descriptor,
    DecompressSparse24Descriptor,
    GemmSparse24Descriptor,
    MaskSparse24Descriptor,
    PackSparse24Descriptor,
    PruneCompressSparse24Descriptor,
    PruneSparse24Descriptor,
    TilePruneSparse24Descriptor,
)
from sparse24_plans.device.devices import absent_gpu
from sparse24_plans.device.jit.launcher import RecordedFill, recording
from sparse24_plans.device.tensors import TensorView
from sparse24_plans.errors import UnsupportedError
from sparse24_plans.export import export_plans
from sparse24_plans.export.folder import tokens_of
from sparse24_plans.export.recording import buffers_of, lines_of
from sparse24_plans.export.tables import Tables
from sparse24_plans.gemm.descriptor import of_places
from sparse24_plans.gemm.wgmma import WgmmaSpParams
from sparse24_plans.plan.families import plan_of
from tests.export import blocks, products
from tests.export.c_library import RefusedError
from tests.export.choices import cubin_text, differences, random_problem

H200 = absent_gpu("h200")
MATRIX = {"m": 192, "k": 320}
PREPARED = {
    "prune": PruneSparse24Descriptor(**MATRIX, element="bf16", scores="f32"),
    "compress": CompressSparse24Descriptor(**MATRIX, element="f16"),
    "prune and compress": PruneCompressSparse24Descriptor(**MATRIX, element="s8"),
    "decompress": DecompressSparse24Descriptor(**MATRIX, element="bf16"),
    "pack": PackSparse24Descriptor(**MATRIX, element="bf16"),
    "unpack": PackSparse24Descriptor(**MATRIX, element="fp8_e4m3", direction="unpack"),
    "prune tiles": TilePruneSparse24Descriptor(**MATRIX, element="bf16"),
    "mask": MaskSparse24Descriptor(**MATRIX, element="bf16"),
}


def random_operands(
    plan: Any, seed: random.Random, most_n: int = 0
) -> tuple[dict[str, TensorView], list[tuple[int, int]]]:
    """Views of all operands at random places, and the same for C. No two of them touch."""
    views, given = {}, []
    buffers = buffers_of(plan.parts.operands, plan.sku.layout, most_n)
    for at, buffer in enumerate(buffers):
        name = plan.parts.checks.arguments[buffer.view]
        alignment = plan.parts.checks.alignments[name]
        line_alignment = plan._kernel.alignment_of(buffer.operand.name).line
        lines, width = lines_of(buffer)
        step = max(1, line_alignment // buffer.element.itemsize)
        stride = width if lines == 1 else -(-width // step) * step + step * seed.choice((0, 1, 2, 5, 8, 64))
        address = (1 << 60) + (at << 45) + alignment * seed.choice((0, 1, 3, 8, 16, 1024))
        if buffer.operand.optional and at % 2 and seed.random() < 0.5:  # never all of them
            given.append((0, 0))
            continue
        views[buffer.view] = buffer.at(address, stride, plan.parts.home)
        given.append((address, stride))
    return views, given


def without_ids(parameters: Any, content: bytes) -> bytes:
    """The bytes of the struct without the launch's own number, which no two launches share."""
    field = getattr(type(parameters), "launch_id", None)
    if field is None:
        return content
    return content[: field.offset] + bytes(field.size) + content[field.offset + field.size :]


def compare(
    c: Any,
    opened: Any,
    name: str,
    descriptor: Any,
    preference: Any,
    n: int,
    seed: random.Random,
    most_n: int = 0,
) -> str:
    """Compare the launches of a problem that was exported for ``most_n`` tokens; return the kernel's name."""
    plan = plan_of(descriptor).select(descriptor, preference={**preference, "exportable": True}, device=H200)
    found = c.find(opened, name, n)
    promises = c.library.s24_guarantee(ctypes.byref(found))
    alignment = ctypes.c_uint32()
    nbytes = c.library.s24_workspace(ctypes.byref(found), ctypes.byref(alignment))
    assert promises.kernel.decode() == plan.kernel
    assert promises.guarantee.decode() == plan.guarantee.model_dump_json()
    assert (nbytes, alignment.value) == (plan.workspace_size(), plan.workspace_alignment)
    views, given = random_operands(plan, seed, most_n)
    assert c.names(found) == list(plan.parts.checks.arguments.values())
    workspace = (1 << 61) + 256 * seed.randrange(1000)
    stream = seed.randrange(1 << 40)
    calls = c.run(found, given, workspace, nbytes, stream)
    with recording():
        expected: list[Any] = []
        choice = plan.parts.choice
        choice.entry.kernel_for(choice.descriptor)(choice).launcher(views, workspace)(expected)
    assert len(calls) == len(expected)
    for call, launch in zip(calls, expected, strict=True):
        assert call.stream == stream
        if isinstance(launch, RecordedFill):
            expected_fill = 1, launch.address, launch.byte, launch.nbytes
            assert (call.kind, call.address, call.byte, call.nbytes) == expected_fill
            continue
        code, size = launch.code, ctypes.sizeof(launch.parameters)
        assert call.code == cubin_text(code.source, code.arch, dict(code.defines)).rstrip(b"\0")
        assert call.symbol.decode() == code.name
        assert (call.grid, call.threads, call.shared_bytes) == (
            launch.blocks,
            code.threads,
            code.shared_bytes,
        )
        assert bool(call.early) == launch.overlapping
        bytes_expected = without_ids(launch.parameters, bytes(launch.parameters))
        assert without_ids(launch.parameters, bytes(call.parameters)[:size]) == bytes_expected
    return plan.kernel


@pytest.mark.parametrize(("kind", "required"), products.SERVED)
def test_products_launch_what_python_launches(c, tmp_path, named_cubins, kind, required):
    seed = random.Random()
    descriptor = products.random_problem(kind, seed, seed.choice((6, 12, 12, 40)))
    preference = products.REQUIRED[required]
    export_plans({"product": descriptor}, tmp_path, preference=preference, device="h200")
    opened, ns = c.open(tmp_path), tokens_of(descriptor)
    for n in {*ns[:2], ns[-1], *(seed.choice(ns) for _ in range(6))}:
        compare(c, opened, "product", of_places(descriptor, n), preference, n, seed, descriptor.n)
    c.library.s24_close(opened)


@pytest.mark.parametrize("batches", [0, 1, 2])
def test_programs_find_batches_where_python_does(c, tmp_path, named_cubins, batches):
    """They begin 12 rows apart for every n. The rows between belong to the operand, too."""
    desc = GemmSparse24Descriptor(n=12, m=64, k=64, element="bf16", batches=batches, beta=0.5)
    assert export_plans([desc], tmp_path, device="h200").problems == (
        f"gemm_sparse24_forward-bf16-b{batches}x64x64",
    )
    opened = c.open(tmp_path)
    for n in (1, 5, 12):
        one = desc.model_copy(update={"n": n})
        compare(c, opened, f"gemm_sparse24_forward-bf16-b{batches}x64x64", one, {}, n, random.Random(n), 12)
    if batches == 2:
        found = c.find(opened, f"gemm_sparse24_forward-bf16-b{batches}x64x64", 5)
        weight, x, y, last = (1 << 60, 0), (2 << 40, 72), (3 << 40, 64), 2 * 64 * (12 + 5)
        (call,) = c.run(found, [weight, x, y, (4 << 40, 80)], 1 << 61, 1 << 30)
        there = WgmmaSpParams.from_buffer_copy(call.parameters).batches
        assert (there.x, there.y, there.c) == (12 * 72, 12 * 64, 12 * 80)
        c.check(found, [weight, x, y, (y[0] + last, 64)], 1 << 61, 1 << 30)
        with pytest.raises(RefusedError, match="y: expected memory apart from c"):
            c.check(found, [weight, x, y, (y[0] + last - 128, 64)], 1 << 61, 1 << 30)
    c.library.s24_close(opened)


@pytest.mark.parametrize("beta", [0, 1])
def test_chunks_of_tokens_begin_as_in_python(c, tmp_path, named_cubins, beta):
    """The rows of chunks begin at multiples of the operands' strides, which the program chooses."""
    seed = random.Random()
    descriptor = GemmSparse24Descriptor(n=145, m=144, k=1040, element="f32", beta=beta)
    preference = {"prefer_backend": "f32_split6", "max_workspace_bytes": 6 * 130 * 1040}
    export_plans({"product": descriptor}, tmp_path, preference=preference, device="h200")
    opened = c.open(tmp_path)
    for n in (16, 17, 128, 129, 145):
        compare(c, opened, "product", descriptor.model_copy(update={"n": n}), preference, n, seed)
    c.library.s24_close(opened)


def test_counts_of_groups_are_found_for_multiples_of_the_groups(c, tmp_path, named_cubins):
    descriptor = GemmSparse24Descriptor(n=12, m=64, k=64, element="bf16", groups=4, group_tokens="counts")
    export_plans([descriptor], tmp_path, device="h200")
    opened, name = c.open(tmp_path), "gemm_sparse24_forward-bf16-4x64x64"
    for n in (4, 8, 12):
        assert "counts" in c.names(c.find(opened, name, n))
    for n, expected in (
        (3, "4 to 12 tokens"),
        (6, "a number of tokens that a kernel serves"),
        (16, "4 to 12"),
    ):
        with pytest.raises(RefusedError, match=f"n: expected {expected}.*, got {n}"):
            c.find(opened, name, n)
    c.library.s24_close(opened)


@pytest.mark.parametrize("kind", PREPARED)
def test_preparing_launches_what_python_launches(c, tmp_path, named_cubins, kind):
    export_plans({kind: PREPARED[kind]}, tmp_path, device="h200")
    opened, seed = c.open(tmp_path), random.Random()
    for _ in range(5):
        compare(c, opened, kind, PREPARED[kind], {}, 0, seed)
    c.library.s24_close(opened)


@pytest.mark.parametrize(("written", "missing"), [("pruned", "mask"), ("mask", "pruned")])
def test_one_result_of_an_empty_matrix_is_enough(c, tmp_path, named_cubins, written, missing):
    export_plans({"prune": PruneSparse24Descriptor(m=4, k=0, element="f32")}, tmp_path, device="h200")
    opened = c.open(tmp_path)
    found = c.find(opened, "prune", 0)
    given = {name: (at << 40, 0) for at, name in enumerate(c.names(found), 1)}
    assert c.run(found, list({**given, missing: (0, 0)}.values()), 0, 0) == []
    with pytest.raises(RefusedError, match="results: expected at least one, got none"):
        c.run(found, list({**given, missing: (0, 0), written: (0, 0)}.values()), 0, 0)
    c.library.s24_close(opened)


@pytest.mark.parametrize("kind", blocks.KINDS)
def test_block_sparse_plans_launch_what_python_launches(c, tmp_path, named_cubins, kind):
    seed = random.Random()
    descriptor = blocks.random_problem(kind, seed, 100)
    export_plans({"blocks": descriptor}, tmp_path, device="h200")
    opened, ns = c.open(tmp_path), tokens_of(descriptor)
    for n in [seed.choice(ns) for _ in range(10)]:
        problem = descriptor.model_copy(update={"n": n} if n else {})
        try:
            compare(c, opened, "blocks", problem, {}, n, seed)
        except UnsupportedError:  # of select
            with pytest.raises(RefusedError, match=rf"n: expected .* a kernel serves, got {n} of blocks"):
                c.find(opened, "blocks", n)
    c.library.s24_close(opened)


def test_every_number_of_tokens_launches_what_python_launches(c, tmp_path, named_cubins):
    descriptor = GemmSparse24Descriptor(n=200, m=1536, k=7168, element="bf16")
    export_plans({"product": descriptor}, tmp_path, device="h200")
    opened = c.open(tmp_path)
    for n in range(1, 201):
        compare(c, opened, "product", descriptor.model_copy(update={"n": n}), {}, n, random.Random(n))
    with pytest.raises(RefusedError, match="n: expected 1 to 200 tokens, got 201"):
        c.find(opened, "product", 201)
    with pytest.raises(RefusedError, match="got another"):
        c.find(opened, "another", 1)
    c.library.s24_close(opened)
    assert ctypes.c_uint.in_dll(c.stub, "stub_modules").value == 0


def test_numbers_of_tokens_in_groups_share_ranges(tmp_path, named_cubins):
    """Groups may end anywhere, so the tile of their last tokens is no special one."""
    descriptor = GemmSparse24Descriptor(n=300, m=1536, k=2048, element="bf16", groups=8)
    export_plans([descriptor], tmp_path, device="h200")
    records = Tables.of((tmp_path / "plans.bin").read_bytes()).records
    assert len(records["ranges"]) < 300 / 10


def test_plans_of_one_kernel_keep_their_shared_memory(c, tmp_path, named_cubins):
    """The table of many groups takes more of it, whichever plan is found last."""
    many, few = (
        GemmSparse24Descriptor(n=40, m=64, k=128, element="bf16", groups=groups) for groups in (300, 50)
    )
    export_plans({"many": many, "few": few}, tmp_path, device="h200")
    opened, calls = c.open(tmp_path), {}
    plans = {name: c.find(opened, name, 40) for name in ("many", "few")}
    for name, plan in plans.items():
        (calls[name],) = c.run(plan, [((at + 1) << 40, 8192) for at in range(4)], 0, 0)
    assert calls["many"].code == calls["few"].code
    assert calls["many"].shared_bytes > calls["few"].shared_bytes
    c.library.s24_close(opened)


def test_tables_choose_as_select_does(c, tmp_path, named_cubins):
    """For some numbers of tokens of one shape; ``python -m tests.export.choices`` asks for all of 40."""
    number = random.randrange(1 << 32)
    seed = random.Random(number)
    most = seed.choice((100, 200, 300))
    problem = random_problem(seed, most)
    ns = {1, most, *(seed.randrange(1, most + 1) for _ in range(100))}
    assert differences(c, problem, ns, tmp_path / "plans") == [], f"seed {number}"


@pytest.mark.parametrize(
    ("change", "refused"), [((0, 0), False), ((0, 16), True), ((32, 0), True), ((1 << 40, 16), False)]
)
def test_c_may_be_y_if_it_lies_alike(c, tmp_path, named_cubins, change, refused):
    """``change`` is how C differs from Y: in bytes of the address, and elements of the stride."""
    descriptor = GemmSparse24Descriptor(n=8, m=64, k=64, element="bf16", beta=1.0)
    export_plans({"product": descriptor}, tmp_path, device="h200")
    opened = c.open(tmp_path)
    found = c.find(opened, "product", 8)
    plan = plan_of(descriptor).select(descriptor, preference={"exportable": True}, device=H200)
    _, given = random_operands(plan, random.Random(0))
    names = c.names(found)
    address, stride = given[names.index("y")]
    given[names.index("c")] = address + change[0], stride + change[1]
    if refused:
        with pytest.raises(RefusedError, match="y: expected memory apart from c, got an overlap"):
            c.check(found, given, 1 << 61, plan.workspace_size())
    else:
        c.check(found, given, 1 << 61, plan.workspace_size())
    c.library.s24_close(opened)
