"""On a GPU the C code gives the bits of the Python plans, for random problems of all that can be exported."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sparse24_plans import (
    BlockSparseLayout,
    BlockSparseShape,
    BlockSparseTables,
    CompressSparse24Descriptor,
    DeviceProperties,
    ElementKind,
    GemmSparse24Descriptor,
    Sparse24Weight,
)
from sparse24_plans.blocksparse.descriptor import BlockSparseDescriptor
from sparse24_plans.device.devices import described
from sparse24_plans.export import export_plans
from sparse24_plans.export.folder import tokens_of
from sparse24_plans.export.recording import Buffer, buffers_of, lines_of
from sparse24_plans.gemm.descriptor import of_places
from sparse24_plans.plan.descriptor import Descriptor
from sparse24_plans.plan.families import plan_of
from sparse24_plans.plan.operands import Role
from sparse24_plans.plan.plan import Plan
from sparse24_plans.vocab import GroupTokens, MatrixOrder
from sparse24_plans.weights.packed_layouts import layout_called
from sparse24_plans.weights.packing import pack
from sparse24_plans.weights.packing_quantized import pack_quantized
from tests.export import blocks, products
from tests.export.arguments import args_of, views_of
from tests.export.c_library import C, compiled
from tests.export.test_launches import PREPARED
from tests.support import GUARD, GUARD_BYTES, HAS_GPU, random_values, weight_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")]
PROBLEMS = 300
CODES = np.array([4, 8, 9, 12, 13, 14], np.uint8)
"""Positions of two kept values among four."""


class Wish(NamedTuple):
    descriptor: Descriptor
    preference: dict[str, Any]


def random_wishes(seed: random.Random) -> list[Wish]:
    """A problem of each kind, with random sizes and for a random number of tokens."""

    def sizes() -> dict[str, int]:
        return {"m": 16 * seed.randrange(1, 80), "k": 16 * seed.randrange(1, 120)}

    found = [
        Wish(
            products.random_problem(kind, seed, seed.choice((8, 24, 70, 150, 700))),
            products.REQUIRED[required],
        )
        for kind, required in products.SERVED
    ]
    found += [Wish(one.model_copy(update=sizes()), {}) for one in PREPARED.values()]
    return found + [Wish(blocks.random_problem(kind, seed, 400), {}) for kind in blocks.KINDS]


def export(wish: Wish, folder: Path, properties: DeviceProperties) -> None:
    export_plans({"problem": wish.descriptor}, folder, preference=wish.preference, device=properties)


class Memory:
    """An operand in the GPU's memory, with guard bytes before, behind and between its lines."""

    def __init__(self, buffer: Buffer, content: np.ndarray, offset: int, stride: int) -> None:
        import cupy

        lines, width = lines_of(buffer)
        size = buffer.element.itemsize
        if buffer.operand.lines is MatrixOrder.COLUMN:
            content = content.swapaxes(-1, -2)
        inside = np.ascontiguousarray(content).reshape(-1, width).view(np.uint8)
        of_a_batch = content.shape[-2] if buffer.apart else lines
        offset += GUARD_BYTES
        nbytes = (max(0, lines - 1) * stride + width) * size
        self._image = np.full(offset + nbytes + GUARD_BYTES, GUARD, np.uint8)
        for number, line in enumerate(inside):
            batch, own = divmod(number, of_a_batch)
            at = offset + (batch * buffer.apart + own) * stride * size
            self._image[at : at + width * size] = line
        self._there = cupy.empty(self._image.size, np.uint8)
        self.given = self._there.data.ptr + offset, stride

    def reset(self) -> None:
        self._there.set(self._image)

    def bytes(self) -> np.ndarray:
        found: np.ndarray = self._there.get()
        return found

    @property
    def is_written(self) -> bool:
        return not np.array_equal(self.bytes(), self._image)


def tables_of(shape: BlockSparseShape, rng: np.random.Generator) -> np.ndarray:
    """The look-up tables of a random layout of this shape."""
    bitmap = np.zeros((shape.heads, shape.block_rows, shape.block_cols), bool)
    bitmap.reshape(-1)[rng.choice(bitmap.size, shape.blocks, replace=False)] = True
    return np.asarray(BlockSparseTables(BlockSparseLayout(bitmap, shape.block)).view.array())


def group_tokens(desc: GemmSparse24Descriptor, rng: np.random.Generator) -> np.ndarray:
    """Offsets or counts of groups that share no row. Some exceed the rows, and some rows are in no group."""
    if desc.group_tokens is GroupTokens.COUNTS:
        found = rng.integers(-1, desc.n // desc.groups + 2, desc.groups)
        found[rng.integers(desc.groups)] = 1
    else:
        found = np.sort(rng.integers(-3, desc.n + 4, desc.groups + 1))
        found[0], found[-1] = min(found[0], desc.n - 1), max(found[-1], 1, found[0] + 1)
    return found.astype(np.int32)


class Problem:
    """A plan's operands with random contents at random places."""

    def __init__(self, plan: Plan, seed: random.Random, most_n: int) -> None:
        self.plan, self._seed = plan, seed
        self._rng = np.random.default_rng(seed.randrange(1 << 40))
        desc: Any = plan.descriptor
        if not isinstance(desc, BlockSparseDescriptor):
            rows = getattr(desc, "weight_rows", desc.m)
            dense = random_values(self._rng, (rows, desc.k), desc.element)
            self._weight = Sparse24Weight.prune_compress(dense)
        self.memory: dict[str, Memory] = {}
        self.given: list[tuple[int, int]] = []
        for buffer in buffers_of(plan.parts.operands, plan.sku.layout, most_n):
            if buffer.operand.optional and len(self.given) % 2 and seed.random() < 0.5:  # never all
                self.given.append((0, 0))
                continue
            memory = Memory(buffer, self._content(buffer), *self._place(buffer))
            self.memory[buffer.view] = memory
            self.given.append(memory.given)

    def _content(self, buffer: Buffer) -> np.ndarray:
        operand, shape, element = buffer.operand, buffer.shape, buffer.element
        if operand.role is Role.OUT:
            return np.full(shape, GUARD, np.uint8).repeat(element.itemsize, -1).view(element.bits_dtype)
        if operand.role is Role.WEIGHT:
            if buffer.view != "packed":
                return np.asarray(getattr(self._weight, f"{buffer.view}_view").bits())
            if operand.packing.quantization is not None:
                stored = weight_of(self._weight.decompress(), self.plan.descriptor)
                return np.asarray(pack_quantized(stored).buffers[0].bits())
            layout = layout_called(operand.packing.layout or self.plan.sku.layout)
            return np.asarray(pack(self._weight, layout).buffers[0].bits())
        if isinstance(self.plan.descriptor, CompressSparse24Descriptor):
            return np.asarray(self._weight.decompress()).view(element.bits_dtype)
        if operand.role is Role.TABLES or (operand.role is Role.PACKED and element is ElementKind.I32):
            return tables_of(self.plan.descriptor.layout, self._rng)
        if operand.name == "metadata":
            return self._rng.choice(CODES, shape) | self._rng.choice(CODES, shape) << 4
        if operand.name == GroupTokens.EXPERTS:
            return self._rng.integers(-1, self.plan.descriptor.groups + 1, shape).astype(np.int32)
        if operand.name in tuple(GroupTokens):
            return group_tokens(self.plan.descriptor, self._rng)
        if operand.name in ("x_index", "y_index"):
            return self._rng.integers(-2, self.plan.descriptor.n + 2, shape).astype(np.int32)
        if element is ElementKind.I32:
            return self._rng.integers(0, self.plan.descriptor.layout.rows + 1, shape).astype(np.int32)
        if element.dtype.kind in "ui":
            return self._rng.integers(0, 256, shape).astype(element.dtype)
        return random_values(self._rng, shape, element).view(element.bits_dtype)

    def _place(self, buffer: Buffer) -> tuple[int, int]:
        """Bytes in front of the operand, and the elements from line to line."""
        checks, size = self.plan.parts.checks, buffer.element.itemsize
        alignment = checks.alignments[checks.arguments[buffer.view]]
        step = max(1, self.plan._kernel.alignment_of(buffer.operand.name).line // size)
        lines, width = lines_of(buffer)
        stride = width if lines == 1 else -(-width // step) * step + step * self._seed.choice((0, 1, 8))
        if buffer.operand.lines is None:
            stride = width
        return alignment * self._seed.choice((0, 1, 8, 16)), stride

    def result_of(self, run: Any) -> dict[str, np.ndarray]:
        """All bytes of the operands after a run."""
        import cupy

        for memory in self.memory.values():
            memory.reset()
        cupy.cuda.Device().synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        space = cupy.full(self.plan.workspace_size() + 256, GUARD, np.uint8)
        cupy.cuda.Device().synchronize()
        run(space, stream.ptr)
        stream.synchronize()
        return {name: memory.bytes() for name, memory in self.memory.items()}


def differs(c: C, opened: Any, wish: Wish, n: int, seed: random.Random) -> str | None:
    """Return what differs between C and Python for one number of tokens."""
    descriptor = wish.descriptor
    if n:
        gemm = isinstance(descriptor, GemmSparse24Descriptor)
        descriptor = of_places(descriptor, n) if gemm else descriptor.model_copy(update={"n": n})
    preference = {**wish.preference, "exportable": True}
    plan = plan_of(descriptor).select(descriptor, preference=preference, device=0)
    most_n = getattr(wish.descriptor, "n", 0)
    problem, found = Problem(plan, seed, most_n), c.find(opened, "problem", n)
    args, nbytes = args_of(plan, views_of(plan, problem.given, most_n)), plan.workspace_size()

    def in_c(space: Any, stream: int) -> None:
        c.launch(found, problem.given, space.data.ptr, nbytes, stream)

    expected = problem.result_of(lambda space, stream: plan.run(args, workspace=space, stream=stream))
    if not any(memory.is_written for memory in problem.memory.values()):
        return f"{plan!r}: nothing is written"
    got = problem.result_of(in_c)
    wrong = [name for name in expected if not np.array_equal(expected[name], got[name])]
    return f"{plan!r}: {', '.join(wrong)} differ" if wrong else None


@pytest.fixture(scope="module")
def c_on_gpu(tmp_path_factory: pytest.TempPathFactory) -> C:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    import cupy

    cupy.empty(1)  # makes a context current
    return compiled(tmp_path_factory.mktemp("export"), stub=False)


def test_c_gives_the_bits_of_python_for_300_random_problems(c_on_gpu, tmp_path):
    number = int(os.environ.get("EXPORT_SEED") or random.randrange(1 << 32))
    print(f"EXPORT_SEED={number}")
    seed, properties = random.Random(number), described(0)[0]
    wishes = random_wishes(seed)
    folders = [tmp_path / str(at) for at in range(len(wishes))]
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(16, len(os.sched_getaffinity(0))), mp_context=spawned) as pool:
        list(pool.map(export, wishes, folders, [properties] * len(wishes)))
    failures, done = [], 0
    for at, (wish, folder) in enumerate(zip(wishes, folders, strict=True)):
        opened = c_on_gpu.open(folder)
        for _ in range(PROBLEMS // len(wishes) + (at < PROBLEMS % len(wishes))):
            ns = tokens_of(wish.descriptor)
            n = seed.choice((ns[0], ns[-1], seed.choice(ns)))
            if isinstance(wish.descriptor, BlockSparseDescriptor):
                n = -(-n // 8) * 8  # which all of their kernels serve
            failures += [failed for failed in [differs(c_on_gpu, opened, wish, n, seed)] if failed]
            done += 1
        c_on_gpu.library.s24_close(opened)
    assert done == PROBLEMS
    assert failures == [], f"EXPORT_SEED={number}"
