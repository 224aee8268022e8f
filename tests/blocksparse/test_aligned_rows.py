"""Dense products with rows that slow cuBLAS: what is copied before and after, its bytes and launches."""

from __future__ import annotations

import ctypes
import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import (
    BlockSparseLayout,
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
    BlockSparseShape,
    Device,
    PlanPreference,
    TensorView,
    UnsupportedError,
    explain,
)
from sparse24_plans.blocksparse.backends import inflate_cublas
from sparse24_plans.blocksparse.kernel_problem import KernelProblem
from sparse24_plans.blocksparse.kernel_table import MATMUL_ENTRIES
from sparse24_plans.blocksparse.limits import inflated_regions
from sparse24_plans.blocksparse.schedules.predicted_times import DENSE
from sparse24_plans.device import pad_rows, transpose
from sparse24_plans.plan.cublaslt import Factor
from sparse24_plans.plan.kernel import Choice
from sparse24_plans.plan.schedule_choice import constants
from sparse24_plans.vocab import ElementKind

from ..sample_devices import H200
from ..support import check_each
from .problems import case_of, kept_of, random_operands
from .products_on_gpu import TRANSPOSITIONS, gpu
from .sample_layouts import layouts, random_layout
from .test_products import check

FORCED = {"prefer_backend": "inflate_cublas"}
SCRATCH = 32 << 20
"""Bytes of split-K scratch that are counted for a library that cannot be asked."""
TOKENS = (1, 2, 3, 7, 9, 63, 65, 391)
FORMS = [
    (op, packed, *transposed)
    for op, packed, transposed in itertools.product(("sdd", "dsd", "dds"), (False, True), TRANSPOSITIONS)
    if not (packed and op == "sdd")
]
every_form = pytest.mark.parametrize(("op", "packed", "trans_a", "trans_b"), FORMS)
SHAPE = BlockSparseShape(heads=2, rows=1024, cols=512, block=16, blocks=1000)
TALL = SHAPE.model_copy(update={"rows": 8192})


def described(**fields: Any) -> BlockSparseMatmulDescriptor:
    return BlockSparseMatmulDescriptor(
        **{"op": "dsd", "layout": SHAPE, "n": 391, "element": "bf16", **fields}
    )


# Sizes, launches and selection, without a GPU -----------------------------------------------------

B_PADDED = "; b is padded first"
C_PADDED = "; rows of c are padded to {} elements, then copied"
A_TRANSPOSED, B_TRANSPOSED = "; a is transposed first", "; b is transposed first"


@pytest.mark.parametrize(
    ("fields", "copied", "product", "launches", "details"),
    [
        ({}, 2 * 512 * 392 * 2, 2 * 1024 * 392 * 2, 4, B_PADDED + C_PADDED.format(392)),
        ({"packed": True}, 2 * 512 * 392 * 2, 2 * 1024 * 392 * 2, 3, B_PADDED + C_PADDED.format(392)),
        ({"batch": 3, "n": 9}, 6 * 512 * 16 * 2, 6 * 1024 * 16 * 2, 4, B_PADDED + C_PADDED.format(16)),
        ({"trans_a": True}, 2 * 1024 * 392 * 2, 2 * 512 * 392 * 2, 4, B_PADDED + C_PADDED.format(392)),
        ({"epilogue": "bias"}, 2 * 512 * 392 * 2, 2 * 1024 * 392 * 4, 4, B_PADDED + C_PADDED.format(392)),
        ({"trans_b": True}, 2 * 512 * 392 * 2, 2 * 1024 * 392 * 2, 4, B_PADDED + C_PADDED.format(392)),
        ({"trans_b": True, "out_element": "f32", "n": 12}, 0, 0, 2, ""),
        ({"trans_b": True, "epilogue": "bias", "n": 12}, 0, 2 * 1024 * 12 * 4, 3, ""),
        ({"out_element": "f32", "n": 12}, 2 * 512 * 32, 2 * 1024 * 64, 4, B_PADDED + C_PADDED.format(16)),
        ({"element": "f32", "n": 12}, 0, 0, 2, ""),
        ({"element": "f32", "n": 14}, 0, 0, 2, ""),  # rows of float32 stay as they are
        ({"op": "dds"}, 0, 0, 2, ""),
        ({"op": "dds", "trans_a": True}, 391 * 2048 * 2, 0, 3, A_TRANSPOSED),
        ({"op": "dds", "trans_a": True, "packed": True}, 391 * 2048 * 2, 0, 2, A_TRANSPOSED),
        ({"op": "dds", "trans_a": True, "epilogue": "bias"}, 391 * 2048 * 2, 391 * 1024 * 4, 4, A_TRANSPOSED),
        ({"op": "sdd", "trans_a": True}, 0, 0, 2, ""),
        ({"op": "sdd"}, 391 * 2048 * 2, 0, 3, A_TRANSPOSED),
        ({"op": "sdd", "trans_b": True}, 391 * 3072 * 2, 0, 4, A_TRANSPOSED + B_TRANSPOSED),
    ],
)  # fmt: skip
def test_workspace_and_launches(fields, copied, product, launches, details):
    desc = described(**fields)
    dense = 0 if desc.packed else desc.batch * 2 * 1024 * 512 * desc.element.itemsize
    regions = [-(-one // 256) * 256 for one in (dense, copied, product)]
    assert inflated_regions(desc) == tuple(regions)
    plan = BlockSparseMatmulPlan.select(desc, device=H200, preference=FORCED)
    assert plan.workspace_size() == sum(regions) + SCRATCH
    kernel = inflate_cublas.Kernel.sized(_choice(desc))
    assert (kernel.launches, kernel.workspace_size) == (launches, plan.workspace_size())
    library, *rest = plan.explain().details.split("; a dense copy")
    assert library == f"cuBLASLt {H200.cublaslt}, at most {SCRATCH} bytes of split-K scratch{details}"
    assert len(rest) == desc.packed


@every_form
@pytest.mark.parametrize(("n", "epilogue"), [(0, "bias"), (1, "identity"), (1, "bias"), (392, "identity")])
def test_aligned_rows_and_single_tokens_are_not_copied(op, packed, trans_a, trans_b, n, epilogue):
    if op == "sdd" and epilogue == "bias":
        return
    desc = described(op=op, packed=packed, trans_a=trans_a, trans_b=trans_b, n=n, epilogue=epilogue)
    _, copied, product = inflated_regions(desc)
    assert copied == 0
    assert product <= 2 * 1024 * 392 * 4 * (epilogue == "bias")
    kernel = inflate_cublas.Kernel.sized(_choice(desc))
    if n:
        assert kernel.launches == 1 + (not packed) + (epilogue == "bias")
    assert "first" not in kernel.details
    assert "padded" not in kernel.details


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 2**31 - 2}, "size 2147483648 exceeds cuBLAS's limit 2147483647"),
        ({"n": 2**31 - 1, "op": "dds", "trans_a": True, "layout": TALL}, "CTAs exceed the grid limit"),
    ],
)
def test_copies_beyond_limits_are_refused(fields, words):
    desc = described(**fields)
    reasons = {name: reason for name, _, reason in explain(desc, device=H200).rows}
    assert words in reasons["inflate_cublas"]


@pytest.mark.parametrize(
    ("op", "packed", "blocks"),
    [
        ("sdd", False, 10**6),
        ("dsd", False, 2**31 - 1),
        ("dds", False, 2**31 - 1),
        ("dsd", True, 2**31 - 1),
        ("dds", True, 2**31 - 1),
    ],
)
def test_a_dense_matrix_beyond_every_memory_is_refused(op, packed, blocks):
    vast = BlockSparseShape(heads=15, rows=2**31 - 128, cols=2**31 - 128, block=128, blocks=blocks)
    desc = described(op=op, layout=vast, n=64, element="f32", packed=packed)
    about = explain(desc, device=H200)
    reasons = {name: reason for name, _, reason in about.rows}
    assert "bytes exceed every memory" in reasons["packed_dense" if packed else "inflate_cublas"]
    assert BlockSparseMatmulPlan.select(desc, device=H200).workspace_size() == about.workspace_size


def test_the_workspace_limit_counts_copies():
    desc = described()
    least = sum(inflated_regions(desc))
    allowed = {**FORCED, "max_workspace_bytes": least}
    assert BlockSparseMatmulPlan.select(desc, device=H200, preference=allowed).workspace_size() == least
    with pytest.raises(UnsupportedError, match=f"needs a workspace of .*{least} bytes"):
        BlockSparseMatmulPlan.select(
            desc, device=H200, preference={**FORCED, "max_workspace_bytes": least - 1}
        )


def test_the_choice_of_a_dense_copy_counts_what_it_copies():
    aligned, odd = described(n=392, packed=True), described(packed=True)
    assert DENSE.copies_us(aligned) == 0
    assert DENSE.copies_us(described(n=1, packed=True)) == 0
    nbytes = 2 * 512 * 392 * 2 + 2 * 1024 * 392 * 2
    pads, transposes = (constants("packed_choice")[one] for one in ("pads", "transposes"))
    assert DENSE.copies_us(odd) == pytest.approx(2 * pads["launch"] + nbytes / pads["bytes_per_us"])
    by_rows = described(op="dds", n=391, packed=True, trans_a=True)
    (copy,) = KernelProblem(by_rows).aligned_operands
    assert copy.transposes
    wanted = transposes["launch"] + copy.nbytes / transposes["bytes_per_us"]
    assert DENSE.copies_us(by_rows) == pytest.approx(wanted)


# What the library is given, by a model of the kernels in NumPy ------------------------------------


def _choice(desc: BlockSparseMatmulDescriptor) -> Choice:
    name = "packed_dense" if desc.packed else "inflate_cublas"
    entry = next(one for one in MATMUL_ENTRIES if one.name == name)
    return Choice(desc, H200, entry, PlanPreference(), {})


def _memory(address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    count = int(np.prod(shape))
    raw = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(raw, dtype).reshape(shape)


class Models:
    """Stands for the device: runs the kernels and the library's product on the host's memory."""

    workspace_size = 0

    def __init__(
        self, layout: BlockSparseLayout, desc: BlockSparseMatmulDescriptor, monkeypatch: Any
    ) -> None:
        self.layout, self.desc, self.ran = layout, desc, []
        for module in (inflate_cublas, pad_rows, transpose):
            monkeypatch.setattr(module, "load", self.load)
        monkeypatch.setattr(
            inflate_cublas.Kernel, "_find_matmul", lambda kernel, *product: self.find_matmul(*product)
        )
        self.kernel = inflate_cublas.Kernel(_choice(desc))

    def load(self, source: str, name: str, threads: int, device: Any, defines: dict[str, int]) -> Any:
        def bind(ctas: int, p: Any, overlapping: bool = False) -> Any:
            def launch(stream: int) -> None:
                self.ran.append(name)
                getattr(self, name)(p, defines)

            return launch

        return SimpleNamespace(bind=bind)

    def pad_rows(self, p: Any, defines: dict[str, int]) -> None:
        size = defines["BYTES"]
        out = _memory(p.out, (p.rows, p.row_vectors * 16 // size), f"u{size}")
        out[...] = 0
        out[:, : p.columns] = _memory(p.matrix, (p.rows, p.columns), out.dtype)

    def transpose(self, p: Any, defines: dict[str, int]) -> None:
        kind, matrices = f"u{defines['BYTES']}", self.desc.batch * self.desc.layout.heads
        found = _memory(p.matrices, (matrices, p.rows, p.columns), kind)
        _memory(p.out, (matrices, p.columns, p.rows), kind)[...] = found.swapaxes(1, 2)

    def inflate_blocks(self, p: Any, defines: dict[str, int]) -> None:
        one, kind = self.layout.shape, self.desc.element.dtype
        values = _memory(p.values, (self.desc.batch, one.blocks, one.block, one.block), kind)
        dense = self.layout.to_dense(values.astype(np.float32)).astype(kind)
        _memory(p.dense, dense.shape, kind)[...] = dense

    def gather_blocks(self, p: Any, defines: dict[str, int]) -> None:
        one, kind = self.layout.shape, self.desc.out_element.dtype
        dense = _memory(p.dense, (self.desc.batch, one.heads, one.rows, one.cols), kind)
        values = kept_of(self.layout, dense)
        _memory(p.values, values.shape, kind)[...] = values

    def finish(self, p: Any, defines: dict[str, int]) -> None:
        desc = self.desc
        out = _memory(p.out, (p.out_elements,), desc.out_element.dtype)
        if not p.product:
            out[...] = 0
            assert not p.bias
            return
        plain = desc.epilogue == "identity"
        kind = desc.out_element.dtype if plain else np.dtype(np.float32)
        rows = p.out_elements // p.out_columns
        sums = _memory(p.product, (rows, p.product_columns), kind)[:, : p.out_columns].astype(np.float32)
        if p.bias:
            sizes = (p.heads, p.out_rows, 1) if p.bias_per_row else (p.heads, 1, p.out_columns)
            bias = _memory(p.bias, sizes, desc.bias_element.dtype).astype(np.float32)
            sums = (sums.reshape(-1, p.heads, p.out_rows, p.out_columns) + bias).reshape(sums.shape)
        out[...] = sums.astype(out.dtype).ravel()

    def find_matmul(self, a: Factor, b: Factor, leading: int, out: ElementKind, batch: int) -> Models:
        """Every row that the library sees is a multiple of 16 bytes, and so is the contiguous size in it."""
        desc, k = self.desc, self.desc.reduction
        self.product = a, b, leading, out, batch
        if desc.n > 1:
            widths = {a.leading, b.leading, k if a.transposed else a.size, b.size if b.transposed else k}
            assert desc.element == "f32" or not any(one * desc.element.itemsize % 16 for one in widths)
            assert desc.element == "f32" or not any(one * out.itemsize % 16 for one in (leading, a.size))
        return self

    def bind(self, left: int, right: int, result: int, scratch: int) -> Any:
        """Column-major matrices are the transposes of row-major ones, whose rows lie ``leading`` apart."""
        a, b, leading, out, batch = self.product
        kind, k = self.desc.element.dtype, self.desc.reduction
        assert not any(one % 16 for one in (left, right, result))

        def factor(address: int, one: Factor) -> np.ndarray:
            rows, columns = (one.size, k) if one.transposed else (k, one.size)
            found = _memory(address, (batch, rows, one.leading), kind)[:, :, :columns].astype(np.float32)
            return found if one.transposed else found.swapaxes(1, 2)

        def launch(stream: int) -> None:
            self.ran.append("matmul")
            right_one = b._replace(transposed=not b.transposed)
            product = factor(right, right_one) @ factor(left, a).swapaxes(1, 2)
            _memory(result, (batch, b.size, leading), out.dtype)[:, :, : a.size] = product.astype(out.dtype)

        return launch


def _aligned(nbytes: int, fill: int = 0xFF) -> np.ndarray:
    """Bytes at a multiple of 256, with guard bytes behind them; NaN in every element."""
    raw = np.full(nbytes + 512, fill, np.uint8)
    return raw[-raw.ctypes.data % 256 :][: nbytes + 64]


def run_model(layout: BlockSparseLayout, desc: BlockSparseMatmulDescriptor, monkeypatch: Any) -> list[str]:
    """Run the launches on poisoned memory, compare with the exact product, and return their names."""
    rng, models = np.random.default_rng(desc.n), Models(layout, desc, monkeypatch)
    memory, dense, home = {}, {}, Device("cuda", 0)
    views = {"layout": TensorView(4096, (1,), ElementKind.I32, home)}
    for one in desc.operands():
        if one.name == "layout":
            continue
        shape, written = one.shape, one.name == "c"
        bits = rng.integers(-1, 2, shape).astype(one.element.dtype)
        if one.name == desc.sparse and not written:
            dense[one.name] = layout.to_dense(bits.astype(np.float32))
            bits = dense[one.name].astype(one.element.dtype) if desc.packed else bits
            shape = bits.shape
        elif not written:
            dense[one.name] = bits.astype(np.float32)
        memory[one.name] = _aligned(bits.nbytes)
        if not written:
            memory[one.name][: bits.nbytes] = np.frombuffer(bits.tobytes(), np.uint8)
        views[one.name] = TensorView(memory[one.name].ctypes.data, shape, one.element, home)
    space = _aligned(models.kernel.workspace_size)
    models.kernel.launcher(views, space.ctypes.data)(0)
    a, b = (
        dense[name].swapaxes(-1, -2) if transposed else dense[name]
        for name, transposed in (("a", desc.trans_a), ("b", desc.trans_b))
    )
    exact = a @ b
    if desc.op == "sdd":
        exact = kept_of(layout, exact)
    if "bias" in dense:
        exact = exact + dense["bias"][:, :, None] if desc.op == "dsd" else exact + dense["bias"][:, None, :]
    got = memory["c"][: exact.size * desc.out_element.itemsize].view(desc.out_element.dtype)
    assert np.array_equal(got.reshape(exact.shape).astype(np.float32), exact)
    assert all((one[-64:] == 0xFF).all() for one in (space, *memory.values()))
    return models.ran


@every_form
def test_the_library_is_given_aligned_rows(op, packed, trans_a, trans_b):
    form = {"op": op, "packed": packed, "trans_a": trans_a, "trans_b": trans_b}
    check_each(partial(check_library, **form), ({"n": n} for n in (*TOKENS[:-1], 103, 4, 12, 16)))


def check_library(op: str, packed: bool, trans_a: bool, trans_b: bool, n: int) -> None:
    """Rows of float16 and bfloat16 are aligned alike, so every other number of tokens has each."""
    layout = random_layout(rows=3, cols=4)
    transposed = {"trans_a": trans_a, "trans_b": trans_b}
    of_16_bits = ("f16", "bf16")[n // 2 % 2]
    for element, epilogue in itertools.product(("f32", of_16_bits), ("identity", "bias")):
        if op == "sdd" and epilogue == "bias":
            continue
        for out in dict.fromkeys((element, "f32")):
            fields = {"op": op, "packed": packed, "epilogue": epilogue, "out_element": out, **transposed}
            desc = described(layout=layout, n=n, batch=2, element=element, **fields)
            with pytest.MonkeyPatch.context() as patch:
                ran = run_model(layout, desc, patch)
            assert len(ran) == inflate_cublas.Kernel.sized(_choice(desc)).launches
            assert ran.count("matmul") == 1


@given(layout=layouts(most=3), n=st.integers(1, 80), batch=st.integers(1, 3), form=st.sampled_from(FORMS))
def test_any_layout_has_its_product(layout, n, batch, form):
    op, packed, trans_a, trans_b = form
    desc = described(
        op=op, layout=layout, n=n, batch=batch, packed=packed, trans_a=trans_a, trans_b=trans_b, element="f16"
    )
    one = layout.shape
    if one.heads * one.rows * one.cols and (one.blocks or op != "sdd"):
        with pytest.MonkeyPatch.context() as patch:
            run_model(layout, desc, patch)


# On a GPU -----------------------------------------------------------------------------------------


@gpu
@every_form
@pytest.mark.parametrize("n", TOKENS)
def test_products(op, packed, trans_a, trans_b, n):
    """Against float64, with poisoned results and workspace, and guard bytes round every operand."""
    transposed = {"trans_a": trans_a, "trans_b": trans_b}
    for block, element in itertools.product((16, 128), ("f32", "f16", "bf16")):
        layout = random_layout(seed=n, rows=3, cols=4, block=block)
        for epilogue in ("identity",) if op == "sdd" else ("identity", "bias", "bias_gelu"):
            for out in dict.fromkeys((element, "f32")):
                fields = {"op": op, "packed": packed, "epilogue": epilogue, "out_element": out, **transposed}
                desc = described(layout=layout, n=n, batch=2, element=element, **fields)
                plan = BlockSparseMatmulPlan.select(desc, device=0, preference=FORCED)
                assert plan.sku.backend == "inflate_cublas"
                check(plan, random_operands(desc, layout, np.random.default_rng(n)))


@gpu
@pytest.mark.parametrize("n", [63, 391])
def test_infinities_beside_padding_stay_where_they_are(n):
    """A padding column of X is 0, and 0 times Inf is NaN in padding alone."""
    layout = random_layout(seed=3, heads=1, rows=3, cols=4, density=1.0)
    plan = BlockSparseMatmulPlan.select(
        described(layout=layout, n=n, element="f16"), device=0, preference=FORCED
    )
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(n))
    operands["a"][:, 0, 3, 5] = np.inf
    operands["b"][...] = 1
    got = case_of(plan, operands).run()["c"].view(np.float16)
    assert np.isposinf(got[0, 0, 3]).all()
    assert np.isfinite(np.delete(got, 3, axis=2)).all()
