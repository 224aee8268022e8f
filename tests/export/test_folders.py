"""Exported folders: what they hold, and that damaged ones give an error without undefined behaviour."""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import struct
import subprocess

import pytest

from sparse24_plans import (
    BlockSparseAttentionDescriptor,
    BlockSparseConv2dDescriptor,
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
    BlockSparseShape,
    CompressSparse24Descriptor,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
)
from sparse24_plans.errors import FormatError, InvalidProblemError, UnsupportedError
from sparse24_plans.export import export_plans
from sparse24_plans.export.tables import SCHEMA, Tables
from tests.export.c_library import FLAGS, SOURCES, STUB, RefusedError, compiled_stub, source_in_one_set
from tests.export.choices import named_cubins_everywhere

FILTER = BlockSparseShape(heads=1, rows=64, cols=9 * 64, block=64, blocks=7)
SHAPE = BlockSparseShape(heads=2, rows=128, cols=192, block=64, blocks=7)
DESCRIPTORS = {
    "bf16": GemmSparse24Descriptor(n=33, m=128, k=256, element="bf16", epilogue="bias_silu"),
    "f32": GemmSparse24Descriptor(n=20, m=128, k=256, element="f32"),
    "groups": GemmSparse24Descriptor(n=33, m=64, k=256, element="f16", epilogue="bias_swiglu", groups=3),
    "compress": CompressSparse24Descriptor(m=64, k=64, element="bf16"),
    "blocks": BlockSparseMatmulDescriptor(op="dsd", layout=SHAPE, n=24, element="f16"),
    "images": BlockSparseConv2dDescriptor(layout=FILTER, height=8, width=8, kernel=3, element="bf16"),
    "attention": BlockSparseAttentionDescriptor(layout=SHAPE, head_size=64, element="f16", op="backward"),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported")
    with named_cubins_everywhere():
        export_plans(DESCRIPTORS, path, device="h200")
    return path


@pytest.fixture
def folder(tmp_path, exported):
    """A copy, which a test may spoil."""
    return shutil.copytree(exported, tmp_path, dirs_exist_ok=True)


def test_spoiled_tables_under_sanitizers(c, folder, tmp_path_factory):
    built = tmp_path_factory.mktemp("hostile")
    checks = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
    hostile, driver = str(built / "hostile"), str(built / "libcuda.so.1")
    source = str(STUB.parent / "hostile.c")
    subprocess.run(
        ["cc", *FLAGS, *checks, "-I", str(SOURCES), source, "-o", hostile, "-ldl", "-lpthread"], check=True
    )
    subprocess.run(["cc", "-shared", "-fPIC", *FLAGS, str(STUB), "-o", driver], check=True)
    seed = random.randrange(1 << 40)
    done = subprocess.run(
        [hostile, str(folder), "80", str(seed)],
        env={**os.environ, "LD_LIBRARY_PATH": str(built), "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"seed {seed}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("hash_of_calls", [True, False], ids=["hashed", "in one set"])
def test_threads_share_a_library_without_a_race(c, folder, tmp_path_factory, hash_of_calls):
    """Each run launches what is prepared for its own operands."""
    built = tmp_path_factory.mktemp("threads")
    driver = compiled_stub(built, "-DPROGRAMS", "-fsanitize=thread")
    source = source_in_one_set(built) if not hash_of_calls else SOURCES / "sparse24_export.c"
    includes = [f"-I{one}" for one in (source.parent, SOURCES, STUB.parent)]
    sanitized = "-DPROGRAMS", "-fsanitize=thread", "-g", *includes
    files = str(STUB.parent / "threads.c"), str(driver), "-ldl", "-lpthread", "-o", str(built / "threads")
    subprocess.run(["cc", *FLAGS, *sanitized, *files], check=True)
    done = subprocess.run(
        [str(built / "threads"), str(folder)],
        env={**os.environ, "LD_LIBRARY_PATH": str(built)},
        capture_output=True,
        text=True,
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this compiler's thread sanitizer doesn't know the kernel's memory layout")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_changed_byte_anywhere_is_refused(c, folder):
    path = folder / "plans.bin"
    sound, seed = path.read_bytes(), random.Random()
    for _ in range(100):
        at = seed.randrange(len(sound))
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 1 << seed.randrange(8)]) + sound[at + 1 :])
        with pytest.raises(RefusedError) as refused:
            c.open(folder)
        assert refused.value.code in (2, 5)
        with pytest.raises(FormatError):
            Tables.of(path.read_bytes())
    path.write_bytes(sound)
    c.library.s24_close(c.open(folder))


def test_a_changed_cubin_is_refused(c, folder):
    for cubin in folder.glob("*.cubin"):
        cubin.write_bytes(cubin.read_bytes() + b" ")
    opened = c.open(folder)
    with pytest.raises(RefusedError, match=r"\.cubin: expected the bytes that its SHA-256 is of"):
        c.find(opened, "bf16", 1)
    c.library.s24_close(opened)


@pytest.mark.parametrize(("name", "value"), [("multiprocessors", 114), ("major", 8), ("minor", 1)])
def test_another_gpu_is_refused(c, folder, name, value):
    number = ctypes.c_uint.in_dll(c.stub, f"stub_{name}")
    before, number.value = number.value, value
    try:
        with pytest.raises(RefusedError, match=r"expected compute capability 9\.0 with 132"):
            c.open(folder)
    finally:
        number.value = before


def test_another_schema_is_refused(c, folder):
    path = folder / "plans.bin"
    content = path.read_bytes()
    path.write_bytes(content[:8] + struct.pack("<I", SCHEMA + 1) + content[12:])
    with pytest.raises(RefusedError, match=rf"expected schema {SCHEMA}, got {SCHEMA + 1}") as refused:
        c.open(folder)
    assert refused.value.code == 2


def test_a_missing_or_replaced_cubin_is_refused(c, folder):
    one, other = sorted(folder.glob("wgmma_sp-*.cubin"))[:2]
    products = [(name, n) for name in ("bf16", "f32", "groups") for n in range(1, DESCRIPTORS[name].n + 1)]
    content = one.read_bytes()
    opened, seen = c.open(folder), set()
    one.write_bytes(other.read_bytes())
    for expected, spoil in ((5, lambda: None), (6, one.unlink)):
        spoil()
        for name, n in products:
            try:
                c.find(opened, name, n)
            except RefusedError as refused:
                seen.add((one.name in str(refused), expected, refused.code))
    assert seen == {(True, 5, 5), (True, 6, 6)}
    one.write_bytes(content)
    for name, n in products:
        c.find(opened, name, n)
    c.library.s24_close(opened)
    assert ctypes.c_uint.in_dll(c.stub, "stub_modules").value == 0


def test_what_the_driver_refuses_is_named(c, folder):
    opened = c.open(folder)
    status = ctypes.c_int.in_dll(c.stub, "stub_fails")
    status.value = 719
    try:
        with pytest.raises(RefusedError, match="cuModuleLoadData: CUDA error 719"):
            c.find(opened, "bf16", 1)
    finally:
        status.value = 0
    c.library.s24_close(opened)


def test_a_missing_folder_is_named(c, tmp_path):
    with pytest.raises(RefusedError, match=r"none/plans\.bin: No such file"):
        c.open(tmp_path / "none")


@pytest.mark.parametrize("ahead", range(3))
def test_messages_about_long_names_say_why_and_cut_no_character(c, folder, ahead):
    long = "a" * ahead + "\u8a08" * 80
    with pytest.raises(RefusedError, match=r"\u8a08/none/plans\.bin: No such file or directory$"):
        c.open(folder / long / "none")
    opened = c.open(folder)
    with pytest.raises(RefusedError, match=r"^problem: expected one that was exported, got \u8a08+$"):
        c.find(opened, long, 1)
    c.library.s24_close(opened)


def test_the_manifest_says_what_the_tables_say(folder):
    tables = Tables.of((folder / "plans.bin").read_bytes())
    assert json.loads((folder / "manifest.json").read_text()) == json.loads(json.dumps(tables.document()))
    assert tables.to_bytes() == (folder / "plans.bin").read_bytes()
    assert {one["name"] for one in tables.records["problems"]} == set(DESCRIPTORS)


def test_exported_cubins_are_the_compiled_kernels(tmp_path):
    descriptor = GemmSparse24Descriptor(n=1, m=64, k=128, element="bf16")
    found = export_plans([descriptor], tmp_path, device="h200")
    assert found.problems == ("gemm_sparse24_forward-bf16-64x128",)
    (compiled,) = GemmSparse24Plan.compile(descriptor, preference={"exportable": True}, device="h200")
    (cubin,) = tmp_path.glob("*.cubin")
    assert cubin.read_bytes().startswith(b"\x7fELF")
    assert cubin.stat().st_size == compiled.nbytes
    assert found.nbytes == sum(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("descriptors", "error", "message"),
    [
        ([], InvalidProblemError, "expected at least one"),
        ([DESCRIPTORS["bf16"]] * 2, InvalidProblemError, "bf16-128x256-bias_silu' twice"),
        *(
            ({name: DESCRIPTORS["bf16"]}, InvalidProblemError, "expected names that are text")
            for name in ("", "a\0b", "\ud800")
        ),
        (
            {"one": GemmSparse24Descriptor(n=0, m=64, k=64, element="bf16")},
            InvalidProblemError,
            "one: expected the most tokens",
        ),
    ],
)
def test_what_cannot_be_exported_is_refused(tmp_path, descriptors, error, message):
    with pytest.raises(error, match=message):
        export_plans(descriptors, tmp_path / "new", device="h200")
    assert not list(tmp_path.glob("new/*"))


def test_a_library_that_is_asked_for_is_refused(tmp_path):
    wish = {"prefer_backend": "inflate_cublas"}
    with pytest.raises(UnsupportedError, match=r"bf16, 1 tokens: .*inflate_cublas: can't be exported, and"):
        export_plans({"bf16": DESCRIPTORS["bf16"]}, tmp_path / "new", preference=wish, device="h200")
    assert not list(tmp_path.glob("new/*"))


def test_plans_of_very_many_launches_are_refused(tmp_path):
    desc = GemmSparse24Descriptor(n=1, m=1024, k=1024, element="f32", batches=257, shared_weight=True)
    with pytest.raises(UnsupportedError, match="expected at most 256 launches for export, got 257"):
        export_plans([desc], tmp_path / "plans", device="h200")


@pytest.fixture
def even_alone(monkeypatch):
    """Block-sparse products of an even number of tokens alone have a kernel."""
    select = BlockSparseMatmulPlan.select

    def even(descriptor, **options):
        if descriptor.n % 2:
            raise UnsupportedError("an odd number of tokens")
        return select(descriptor, **options)

    monkeypatch.setattr(BlockSparseMatmulPlan, "select", even)


def test_a_number_of_tokens_without_a_kernel_is_not_found(c, tmp_path, named_cubins, even_alone):
    export_plans({"blocks": DESCRIPTORS["blocks"]}, tmp_path, device="h200")
    opened = c.open(tmp_path)
    for n in range(2, 25, 2):
        c.find(opened, "blocks", n)
        with pytest.raises(RefusedError, match=rf"n: expected .* a kernel serves, got {n - 1} of blocks"):
            c.find(opened, "blocks", n - 1)
    c.library.s24_close(opened)


def test_the_most_tokens_must_have_a_kernel(tmp_path, even_alone):
    odd = DESCRIPTORS["blocks"].model_copy(update={"n": 23})
    with pytest.raises(UnsupportedError, match="odd, 23 tokens: an odd number"):
        export_plans({"odd": odd}, tmp_path / "new", device="h200")
    assert not list(tmp_path.glob("new/*"))


@pytest.mark.parametrize(
    ("n", "preference", "error"),
    [(0, {}, InvalidProblemError), (4, {"prefer_backend": "inflate_cublas"}, UnsupportedError)],
)
@pytest.mark.parametrize("exists", [False, True])
def test_an_export_that_fails_leaves_the_folder_as_it_was(tmp_path, n, preference, error, exists):
    folder = tmp_path / "plans"
    if exists:
        folder.mkdir()
    descriptor = GemmSparse24Descriptor(n=n, m=64, k=64, element="f32")
    with pytest.raises(error):
        export_plans([descriptor], folder, preference=preference)
    assert [path for path in tmp_path.rglob("*") if path != folder] == []
    assert folder.exists() == exists


def test_an_export_interrupted_while_it_writes_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("sparse24_plans.export.folder.written_whole", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_plans([GemmSparse24Descriptor(n=1, m=64, k=64, element="bf16")], tmp_path / "plans")
    assert list(tmp_path.iterdir()) == []
