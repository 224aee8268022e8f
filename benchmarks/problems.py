"""What is measured: the shapes of the record, operands on the device, and the contenders for each cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import cupy
import numpy as np

from sparse24_plans import (
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    PlanPreference,
    Sparse24Error,
    Sparse24Weight,
    TensorView,
)
from sparse24_plans.timing import Contender, Launch, copies_beyond_l2

LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
LLAMA_70B = ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))
SHAPES = LLAMA_8B + LLAMA_70B
PREPARE_SHAPES = ((8192, 8192), (28672, 4096))
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def random_bits(shape: tuple[int, int], element: ElementKind, seed: int) -> Any:
    """Normal random elements as raw bits on the current device."""
    values = cupy.random.default_rng(seed).standard_normal(shape, dtype=cupy.float32)
    if element is ElementKind.F32:
        return values.view(cupy.uint32)
    if element is ElementKind.F16:
        return values.astype(cupy.float16).view(cupy.uint16)
    wide = values.view(cupy.uint32)
    return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(cupy.uint16)  # round to nearest even


def typed(bits: Any, element: ElementKind) -> TensorView:
    """A view of raw bits as elements."""
    return TensorView.of(bits, element=element)


@dataclass
class Matrix:
    """A random 2:4 weight on the device, dense and compressed, in enough copies to leave the L2 cache."""

    m: int
    k: int
    element: ElementKind

    @cached_property
    def weights(self) -> list[Sparse24Weight]:
        bits = random_bits((self.m, self.k), self.element, seed=self.m + self.k)
        first = Sparse24Weight.prune_compress(typed(bits, self.element))
        return [first] + [_copy(first) for _ in range(copies_beyond_l2(first.nbytes) - 1)]

    @cached_property
    def dense(self) -> list[Any]:
        first = TensorView.of(self.weights[0].decompress(), element=self.element).bits()
        return [first] + [first.copy() for _ in range(copies_beyond_l2(first.nbytes) - 1)]

    @cached_property
    def cusparselt(self) -> list[Any] | None:
        """The same weight in cuSPARSELt's form, through PyTorch; None where that can't be had."""
        import torch

        try:
            return [torch._cslt_compress(_tensor(bits, self.element)) for bits in self.dense]
        except (AttributeError, RuntimeError):
            return None


def _tensor(bits: Any, element: ElementKind) -> Any:
    """Raw bits as a PyTorch tensor, zero-copy."""
    import torch

    kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[element]
    return torch.from_dlpack(bits.view(f"i{bits.itemsize}")).view(kind)


def _copy(weight: Sparse24Weight) -> Sparse24Weight:
    values = typed(weight.values_view.bits().copy(), weight.element)
    return Sparse24Weight(values, weight.metadata.copy(), validate=False)


class Cell:
    """One (matrix, n): inputs, the float64 reference on sampled results, and the contenders."""

    def __init__(self, matrix: Matrix, n: int) -> None:
        self.matrix, self.n = matrix, n
        self._x = random_bits((n, matrix.k), matrix.element, seed=n)
        self._y = cupy.empty((n, matrix.m), matrix.element.bits_dtype)

    def ours(self, name: str, preference: PlanPreference) -> tuple[Contender, GemmSparse24Plan] | None:
        """Our plan under ``preference``; None where no kernel can serve."""
        matrix = self.matrix
        desc = GemmSparse24Descriptor(n=self.n, m=matrix.m, k=matrix.k, element=matrix.element)
        try:
            plan = GemmSparse24Plan.select(desc, device=0, preference=preference)
        except Sparse24Error:
            return None
        x, y = typed(self._x, matrix.element), typed(self._y, matrix.element)
        space = cupy.empty(max(plan.workspace_size(), 1), cupy.uint8)
        launches = [
            plan.bind(GemmSparse24Args(plan.pack(weight), x, y), workspace=space).launch
            for weight in matrix.weights
        ]
        return Contender(name, launches), plan

    def dense(self) -> Contender:
        """cuBLAS through PyTorch."""
        element = self.matrix.element
        x, y = _tensor(self._x, element), _tensor(self._y, element)
        weights = [_tensor(bits, element) for bits in self.matrix.dense]
        return Contender("dense", [_on_torch_stream(_linear(x, w, y)) for w in weights])

    def cusparselt(self) -> Contender | None:
        """cuSPARSELt through PyTorch, with the algorithm that its own search finds best.

        None where it refuses the sizes or its result is wrong. PyTorch plans on every call, which costs
        host time that a captured graph doesn't see.
        """
        import torch

        if self.matrix.element is ElementKind.F16:
            # On an H200 the search of 0.8.0 ends in an illegal instruction, and the CUDA context with it.
            return None
        compressed, x = self.matrix.cusparselt, _tensor(self._x, self.matrix.element).t()
        if compressed is None:
            return None
        try:
            best = torch._cslt_sparse_mm_search(compressed[0], x, transpose_result=True)
            got = torch._cslt_sparse_mm(compressed[0], x, transpose_result=True, alg_id=best)
        except RuntimeError:
            return None
        exact = torch.mm(x.t(), _tensor(self.matrix.dense[0], self.matrix.element).t()).float()
        if not torch.linalg.norm(got.float() - exact) < 1e-2 * torch.linalg.norm(exact):
            return None

        def call(weight: Any) -> Callable[[], None]:
            return lambda: torch._cslt_sparse_mm(weight, x, transpose_result=True, alg_id=best)

        return Contender("cusparselt", [_on_torch_stream(call(weight)) for weight in compressed])

    def rel_error(self, launch: Launch) -> float:
        """||y - exact|| / ||exact|| against float64, on up to 64 x 256 sampled results."""
        self._y.fill(0xFFFF)
        launch(cupy.cuda.Stream.null.ptr)
        cupy.cuda.Device().synchronize()
        rng = np.random.default_rng(0)
        rows = cupy.asarray(np.sort(rng.choice(self.n, min(self.n, 64), replace=False)))
        columns = cupy.asarray(np.sort(rng.choice(self.matrix.m, min(self.matrix.m, 256), replace=False)))
        element = self.matrix.element
        x, w = _wide(self._x[rows], element), _wide(self.matrix.dense[0][columns], element)
        got, exact = _wide(self._y[rows][:, columns], element), x @ w.T
        return float(cupy.linalg.norm(got - exact) / cupy.linalg.norm(exact))


def _wide(bits: Any, element: ElementKind) -> Any:
    if element is ElementKind.BF16:
        return (bits.astype(cupy.uint32) << 16).view(cupy.float32).astype(cupy.float64)
    return bits.view(element.dtype).astype(cupy.float64)


def _linear(x: Any, w: Any, y: Any) -> Callable[[], None]:
    import torch

    return lambda: torch.mm(x, w.t(), out=y)


def _on_torch_stream(call: Callable[[], None]) -> Launch:
    import torch

    def launch(stream: int) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            call()

    return launch
