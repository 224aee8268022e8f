"""Finding cuSPARSELt, and the life of its objects: without the library and without a GPU.

A stand-in plays the library's part of the ABI and records its calls.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from sparse24_plans import (
    BackendUnavailableError,
    BufferTooSmallError,
    DeviceProperties,
    GemmSparse24Descriptor,
    PackedWeight,
    PlanPreference,
    Sparse24Weight,
    TensorView,
    explain,
)
from sparse24_plans._vendor import cusparselt_abi as abi
from sparse24_plans._vendor.library_error import LibraryError
from sparse24_plans.device.tensors import Device
from sparse24_plans.gemm import kernel_table
from sparse24_plans.gemm.backends import cusparselt
from sparse24_plans.plan.kernel import Choice
from sparse24_plans.plan.kernel_table import choose, consider

from ..sample_devices import H200

PREFIX = "cusparseLt"


class StandIn:
    """Answers like the library: writes the sizes and numbers asked for, fails where it is told to."""

    def __init__(self, version: tuple[int, int, int] = (0, 8, 0)) -> None:
        self.version, self.calls, self.fail_at, self.biases = version, [], None, []

    def __getattr__(self, name: str):
        if not name.startswith(PREFIX):
            raise AttributeError(name)
        short = name.removeprefix(PREFIX)

        def function(*arguments: object) -> int | bytes:
            return self.answer(short, arguments)

        setattr(self, name, function)
        return function

    def answer(self, name: str, arguments: tuple) -> int | bytes:
        if name == "GetProperty":
            ctypes.cast(arguments[1], ctypes.POINTER(ctypes.c_int))[0] = self.version[arguments[0]]
            return 0
        if name == "GetErrorName":
            return b"CUSPARSE_STATUS_INTERNAL_ERROR"
        self.calls.append((name, arguments))
        if len(self.calls) == self.fail_at:
            return 7
        if name == "MatmulDescSetAttribute" and arguments[2] == abi.BIAS_POINTER:
            self.biases.append(ctypes.cast(arguments[3], ctypes.POINTER(ctypes.c_uint64))[0])
        for size, at in (("MatmulGetWorkspace", 2), ("SpMMACompressedSize2", 2), ("SpMMACompressedSize2", 3)):
            if name == size:
                ctypes.cast(arguments[at], ctypes.POINTER(ctypes.c_size_t))[0] = 1000 + at
        return 0

    def made_and_destroyed(self) -> tuple[list, list]:
        """Addresses of objects, in order; a call that failed made none."""
        made = [(name, args) for name, args in self.calls if name in MAKERS]
        if self.fail_at is not None and self.calls[self.fail_at - 1] in made:
            made.remove(self.calls[self.fail_at - 1])
        return (
            [args[MAKERS[name]] for name, args in made],
            [args[0] for name, args in self.calls if name.endswith("Destroy")],
        )


# Calls that make an object to destroy -> which argument is its address.
MAKERS = {
    "Init": 0,
    "DenseDescriptorInit": 1,
    "StructuredDescriptorInit": 1,
    "MatmulAlgSelectionInit": 1,
    "MatmulPlanInit": 1,
}
W = abi.Operand(64, 128, 128, abi.R_16BF, abi.ORDER_ROW, sparse=True)
X = abi.Operand(32, 128, 128, abi.R_16BF, abi.ORDER_ROW, transpose=True)
Y = abi.Operand(64, 32, 64, abi.R_16BF, abi.ORDER_COL)


def handle_on(stand_in: StandIn) -> abi.Handle:
    return abi.Handle(abi.Library(stand_in, "stand-in"))


def matmul(handle: abi.Handle) -> abi.Matmul:
    return abi.Matmul(
        handle,
        W,
        X,
        Y,
        Y,
        compute=abi.COMPUTE_32F,
        alpha=1.0,
        attributes={abi.BIAS_POINTER: ctypes.c_void_p(256)},
        algorithm={abi.CONFIG_ID: 3},
    )


# Finding it ---------------------------------------------------------------------------------------


@pytest.fixture
def nowhere(monkeypatch):
    monkeypatch.setattr(abi, "candidates", lambda: ["/nowhere/libcusparseLt.so.0"])
    abi.load.cache_clear()
    yield
    abi.load.cache_clear()


def test_a_missing_library_is_none_and_no_error(nowhere):
    assert abi.load() is None
    assert abi.version() is None


def test_the_systems_loader_is_asked_last():
    *wheels, last = abi.candidates()
    assert last == "libcusparseLt.so.0"
    assert all("/nvidia/" in path and path.endswith("/lib/libcusparseLt.so.0") for path in wheels)


@pytest.mark.parametrize("folder", ["cusparselt", "cu12", "cu13"])
def test_a_wheel_is_found_without_importing_it(tmp_path, monkeypatch, folder):
    """The wheels of version 0.8, and of 0.9 and later, have different folders."""
    library = tmp_path / "nvidia" / folder / "lib" / "libcusparseLt.so.0"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"no library")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "nvidia", raising=False)
    assert str(library) in abi.candidates()


def hopper(cusparselt: str | None) -> DeviceProperties:
    return H200.model_copy(update={"name": "invented", "cusparselt": cusparselt})


DESC = GemmSparse24Descriptor(n=16, m=256, k=256, element="bf16")
FORCED = PlanPreference(prefer_backend="cusparselt")


@pytest.mark.parametrize("version", ["0.8.0", "0.8.1", "0.10.2"])
def test_versions_that_serve(version):
    assert explain(DESC, preference=FORCED, device=hopper(version)).chosen == "cusparselt"


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, ("cuSPARSELt doesn't load",)),
        ("0.7.1", ("cuSPARSELt 0.7.1 loads", "0.8")),
        ("0.6.3", ("cuSPARSELt 0.6.3 loads", "0.8")),
        ("0.11.0", ("cuSPARSELt 0.11.0 loads", "from 0.8 to below 0.11")),
        ("1.0.0", ("cuSPARSELt 1.0.0 loads", "0.8")),
    ],
)
def test_a_missing_or_wrong_library_says_what_to_install(version, words):
    rows = consider(kernel_table.ENTRIES, DESC, FORCED, hopper(version))
    with pytest.raises(BackendUnavailableError) as caught:
        choose(rows)
    for word in (*words, "pip install", "for CUDA 12: ", "for CUDA 13: "):
        assert word in str(caught.value)


def test_a_wrong_architecture_is_not_something_to_install():
    turing = hopper("0.8.0").model_copy(update={"compute_capability": (7, 5)})
    rows = {row.entry.name: row for row in consider(kernel_table.ENTRIES, DESC, FORCED, turing)}
    assert "needs compute capability 8.0, got 7.5" in rows["cusparselt"].reason
    assert not rows["cusparselt"].unavailable


def test_fp8_needs_ada():
    desc = GemmSparse24Descriptor(n=16, m=256, k=256, element="fp8_e4m3")
    ampere = hopper("0.8.0").model_copy(update={"compute_capability": (8, 0)})
    ada = hopper("0.8.0").model_copy(update={"compute_capability": (8, 9)})
    assert explain(desc, device=ampere).chosen is None
    assert explain(desc, device=ada).chosen == "cusparselt_fp8"


@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_our_own_kernels_precede_cusparselt(element):
    desc = GemmSparse24Descriptor(n=DESC.n, m=DESC.m, k=DESC.k, element=element)
    answer = explain(desc, device=hopper("0.8.0"))
    assert answer.chosen != "cusparselt"
    assert "cusparselt (cusparselt): can serve; a kernel above it was preferred" in str(answer)


def test_what_ours_do_not_serve_is_its_own():
    ada = hopper("0.8.0").model_copy(update={"compute_capability": (8, 9)})
    for element, row in (("s8", "cusparselt"), ("fp8_e4m3", "cusparselt_fp8")):
        desc = GemmSparse24Descriptor(n=16, m=256, k=256, element=element)
        assert explain(desc, device=ada).chosen == row
    in_columns = GemmSparse24Descriptor(n=16, m=256, k=256, element="s8", y_order="column")
    assert explain(in_columns, device=hopper("0.8.0")).chosen == "cusparselt"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n": 12}, "needs n a multiple of 8 for bf16, got 12"),
        ({"n": 24, "element": "s8"}, "needs n a multiple of 16 for s8, got 24"),
        ({"m": 24}, "needs m a multiple of 16 for bf16, got 24"),
        ({"m": 48, "element": "s8"}, "needs m a multiple of 32 for s8, got 48"),
        ({"k": 24}, "needs k a multiple of 16 for bf16, got 24"),
        ({"n": 0}, "serves no empty operands"),
        ({"k": 0}, "serves no empty operands"),
        ({"n": 2**23}, "serves operands of fewer than 2^31 elements"),
        ({"m": 2**23}, "serves operands of fewer than 2^31 elements"),
        ({"out_element": "f32"}, "serves out_element bf16 for bf16, not f32"),
        ({"element": "s8", "out_element": "f32"}, "serves out_element i32, s8, f16, bf16 for s8, not f32"),
        ({"epilogue": "bias_gelu"}, "does not serve epilogue bias_gelu"),
        ({"epilogue": "bias_silu"}, "does not serve epilogue bias_silu"),
        ({"epilogue": "bias_gelu_tanh"}, "from s8 to s8 and from fp8_e4m3 to bf16, not from bf16 to bf16"),
        ({"epilogue": "bias", "bias_element": "f32"}, "needs bias_element bf16"),
        ({"scale_w": "row"}, "takes a scale_w for s8"),
        ({"element": "s8", "scale_w": "row", "alpha": 0.5}, "with alpha 1, not for s8 with alpha 0.5"),
        ({"element": "s8", "scale_x": "row"}, "takes no scale but"),
        ({"element": "s8", "x_order": "column"}, "serves x_order row for s8"),
        ({"op": "dgrad"}, "does not serve op dgrad"),
        ({"batches": 0}, "serves no empty operands"),
        ({"batches": 1025}, "launches at most 1024 batches one after the other, got 1025"),
    ],
)
def test_what_the_library_does_not_take_is_said(change, words):
    desc = GemmSparse24Descriptor(**{"n": 16, "m": 256, "k": 256, "element": "bf16", **change})
    rows = {name: reason for name, _, reason in explain(desc, device=hopper("0.8.0")).rows}
    assert words in rows["cusparselt"]


@pytest.mark.parametrize("version", [(0, 7, 1), (0, 11, 0), (1, 0, 0)])
def test_no_call_but_the_version_is_made_to_another_layout(version):
    stand_in = StandIn(version)
    assert abi.Library(stand_in, "stand-in").version == version
    assert not stand_in.calls


# The life of its objects --------------------------------------------------------------------------


def test_structs_are_aligned_zeroed_and_apart():
    stand_in = StandIn()
    product = matmul(handle_on(stand_in))
    made, _ = stand_in.made_and_destroyed()
    assert all(address % 16 == 0 for address in made)
    spans = sorted(made)
    assert all(b - a >= 512 for a, b in itertools.pairwise(spans))
    assert all(ctypes.string_at(address, 512) == bytes(512) for address in made)
    assert product.workspace_size == 1002


def test_everything_is_destroyed_once_in_reverse_order():
    stand_in = StandIn()
    product = matmul(handle_on(stand_in))
    del product
    gc.collect()
    made, destroyed = stand_in.made_and_destroyed()
    handle, *objects = made
    assert destroyed == [*objects[::-1], handle]


def test_close_and_collection_destroy_once():
    stand_in = StandIn()
    handle = handle_on(stand_in)
    product = matmul(handle)
    product.close()
    product.close()
    del product
    gc.collect()
    made, destroyed = stand_in.made_and_destroyed()
    assert sorted(destroyed) == sorted(made[1:])


CALLS = 12
"""One more than those of a product: handle, four matrices, product, bias, selection, id, plan, workspace."""


def test_how_many_calls_there_are():
    stand_in = StandIn()
    matmul(handle_on(stand_in))
    assert len([name for name, _ in stand_in.calls if not name.endswith("Destroy")]) == CALLS - 1


def test_an_error_anywhere_leaves_nothing():
    tried = [StandIn() for _ in range(2, CALLS)]
    for at, stand_in in enumerate(tried, 2):
        handle = handle_on(stand_in)
        stand_in.fail_at = at
        with pytest.raises(LibraryError, match=r"status 7 \(CUSPARSE_STATUS_INTERNAL_ERROR\)"):
            matmul(handle)
        del handle
    gc.collect()  # once, since it takes long
    for stand_in in tried:
        made, destroyed = stand_in.made_and_destroyed()
        assert destroyed == made[:0:-1] + made[:1], stand_in.fail_at


@pytest.mark.parametrize("at", [2, 3])
def test_an_error_of_a_compressor_leaves_nothing(at):
    stand_in = StandIn()
    handle = handle_on(stand_in)
    stand_in.fail_at = at
    with pytest.raises(LibraryError):
        abi.Compressor(handle, W, first_operand=True)
    made, destroyed = stand_in.made_and_destroyed()
    assert destroyed == made[1:]


def test_a_compressor_knows_its_sizes_beforehand():
    stand_in = StandIn()
    compressor = abi.Compressor(handle_on(stand_in), W, first_operand=True)
    assert (compressor.size, compressor.scratch) == (1002, 1003)
    compressor.compress(16, 32, 48, 64)
    assert stand_in.calls[-1][0] == "SpMMACompress2"
    assert stand_in.calls[-1][1][2:] == (1, abi.OP_N, 16, 32, 48, 64)


def test_a_launcher_keeps_its_product_alive():
    stand_in = StandIn()
    launch = matmul(handle_on(stand_in)).bind(16, 32, 48, 64)
    gc.collect()
    assert not stand_in.made_and_destroyed()[1]
    launch(5)
    name, arguments = stand_in.calls[-1]
    assert name == "Matmul"
    assert arguments[3:5] == (16, 32)
    assert arguments[6:9] == (48, 48, 64)
    assert (arguments[9][0], arguments[10]) == (5, 1)


def test_a_failed_launch_raises():
    stand_in = StandIn()
    launch = matmul(handle_on(stand_in)).bind(16, 32, 48, 64)
    stand_in.fail_at = len(stand_in.calls) + 1
    with pytest.raises(LibraryError, match="cusparseLtMatmul answered status 7"):
        launch(0)
    launch(0)  # the lock was given back


def test_the_bias_is_set_only_where_it_changes():
    stand_in = StandIn()
    product = matmul(handle_on(stand_in))
    one, other = (product.bind(16, 32, 48, 64, bias=bias) for bias in (4096, 8192))
    for launch in (one, one, other, other, one):
        launch(0)
    assert stand_in.biases == [256, 4096, 8192, 4096]


@pytest.fixture
def stand_in(monkeypatch):
    """The library and CuPy that plans on a machine without either use."""
    found = StandIn()
    library = abi.Library(found, "stand-in")
    monkeypatch.setattr(abi, "load", lambda: library)
    monkeypatch.setattr(abi, "_handles", threading.local())
    cuda = SimpleNamespace(Device=lambda ordinal: nullcontext())
    monkeypatch.setattr(cusparselt, "import_cupy", lambda: SimpleNamespace(cuda=cuda, zeros=np.zeros))
    return found


BATCHES = {"n": 16, "m": 32, "k": 64, "element": "bf16", "epilogue": "bias", "batches": 3}
BLOB = 1024
"""Bytes from one batch's blob to the next: 1002 by the stand-in."""


def kernel_of(**fields: object) -> cusparselt.Kernel:
    desc = GemmSparse24Descriptor(**{**BATCHES, **fields})
    entry = kernel_table.find("cusparselt")
    return cusparselt.Kernel(Choice(desc, hopper("0.8.0"), entry, FORCED, {}))


@pytest.mark.parametrize("shared", [False, True])
def test_batches_are_launched_one_after_the_other(stand_in, shared):
    kernel = kernel_of(shared_weight=shared)
    assert kernel.launches == 6
    assert kernel.details.startswith("3 batches one after the other: cuSPARSELt")
    assert kernel.alignment_of("bias") == kernel.alignment_of("result") == (16, 16)
    home = Device("cuda", 0)
    strides = {"source": (80, 240, 1), "result": (1024, 64, 1), "bias": (0 if shared else 48, 1)}
    shapes = {"source": (3, 16, 64), "result": (3, 16, 32), "bias": (3, 32)}
    views = {
        name: TensorView((at + 1) << 40, shapes[name], "bf16", home, strides=strides[name])
        for at, name in enumerate(shapes)
    }
    packed = TensorView(1 << 50, (3 * BLOB,), "u8", home)
    kernel.launcher({**views, "packed": packed}, 1 << 20)(5)
    launched = [arguments for name, arguments in stand_in.calls if name == "Matmul"]
    x, y, bias = (view.address for view in views.values())
    assert [one[3:5] for one in launched] == [
        ((1 << 50) + (0 if shared else BLOB * batch), x + 2 * 80 * batch) for batch in range(3)
    ]
    assert [one[6:9] for one in launched] == [(*[y + 2048 * batch] * 2, 1 << 20) for batch in range(3)]
    of_batches = [bias] if shared else [bias + 96 * batch for batch in range(3)]
    assert stand_in.biases[-len(of_batches) - 1 :] == [256, *of_batches]  # the first one is of select


def test_each_batch_has_its_blob_in_a_layout_of_its_own(stand_in, monkeypatch):
    """Blobs of other numbers of batches, or of one weight, have the same m and k."""
    monkeypatch.setattr(cusparselt, "_values_come_first", lambda ordinal, element: True)
    monkeypatch.setattr(
        cusparselt, "_compress", lambda ordinal, one: np.resize(one.values_view.bits().view(np.uint8), 2310)
    )
    dense = np.random.default_rng(0).standard_normal((96, 64)).astype(ml_dtypes.bfloat16)
    weight = Sparse24Weight.prune_compress(dense)
    kernel = kernel_of()
    kernel._blob_bytes = 2560
    packed = kernel.pack(weight)
    blobs = packed.buffers[0].array()
    assert (packed.layout_id, blobs.shape) == ("cusparselt_blob_x3", (3, 2560))
    values = weight.values_view.bits().view(np.uint8).reshape(3, -1)
    for blob, own in zip(blobs, values, strict=True):
        np.testing.assert_array_equal(blob[:2310], np.resize(own, 2310))
    entry = kernel_table.find("cusparselt")
    layouts = [
        entry.layout_of(GemmSparse24Descriptor(**{**BATCHES, **change}))
        for change in ({}, {"batches": 2}, {"shared_weight": True}, {"batches": 1}, {"batches": None})
    ]
    assert layouts == ["cusparselt_blob_x3", "cusparselt_blob_x2", *["cusparselt_blob"] * 3]
    with pytest.raises(BufferTooSmallError):
        PackedWeight(packed.layout_id, 96, 64, "bf16", packed.device, (TensorView.of(blobs[0]),))


def test_a_handle_a_thread_and_device(monkeypatch):
    stand_in = StandIn()
    library = abi.Library(stand_in, "stand-in")
    monkeypatch.setattr(abi, "load", lambda: library)
    monkeypatch.setattr(abi, "_handles", threading.local())
    mine = [abi.handle(0), abi.handle(1)]
    assert mine == [abi.handle(0), abi.handle(1)]
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.append(abi.handle(0).address))
    thread.start()
    thread.join()
    gc.collect()
    assert others[0] not in [handle.address for handle in mine]
    assert stand_in.made_and_destroyed()[1] == others, "a thread's handle ends with the thread"
