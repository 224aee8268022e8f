"""What is measured: the shapes of the record, operands on the device, and the contenders for each cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import cupy
import numpy as np

from .. import (
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    PackedWeight,
    PlanPreference,
    Sparse24Error,
    Sparse24Weight,
    TensorView,
)
from ..device.devices import cuda_properties
from ..gemm.backends import cusparselt
from ..gemm.tuned import shipped
from ..tuning.timing import Contender, Launch, copies_beyond_l2
from ..tuning.worker import random_bits, widened

LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
LLAMA_70B = ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))
SHAPES = LLAMA_8B + LLAMA_70B
PREPARE_SHAPES = ((8192, 8192), (28672, 4096))
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def typed(bits: Any, element: ElementKind) -> TensorView:
    """A view of raw bits as elements."""
    return TensorView.of(bits, element=element)


@dataclass
class Matrix:
    """A random 2:4 weight on the device, dense and compressed, in enough copies to leave the L2 cache."""

    m: int
    k: int
    element: ElementKind
    _packed: dict[str, list[PackedWeight]] = field(default_factory=dict, repr=False)

    @cached_property
    def weights(self) -> list[Sparse24Weight]:
        bits = random_bits((self.m, self.k), self.element, seed=self.m + self.k)
        first = Sparse24Weight.prune_compress(typed(bits, self.element))
        return [first] + [_copy(first) for _ in range(copies_beyond_l2(first.nbytes) - 1)]

    @cached_property
    def dense(self) -> list[Any]:
        first = TensorView.of(self.weights[0].decompress(), element=self.element).bits()
        return [first] + [first.copy() for _ in range(copies_beyond_l2(first.nbytes) - 1)]

    def packed(self, plan: GemmSparse24Plan) -> list[PackedWeight]:
        """The copies in the plan's layout, made once for all n."""
        layout = plan.sku.layout
        if layout not in self._packed:
            self._packed[layout] = [plan.pack(weight) for weight in self.weights]
        return self._packed[layout]


def torch_tensor(bits: Any, element: ElementKind) -> Any:
    """Raw bits as a PyTorch tensor, zero-copy."""
    import torch

    kinds = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "s8": "int8", "i32": "int32"}
    kind = getattr(torch, kinds.get(element, "float8_e4m3fn"))
    return torch.from_dlpack(bits.view(f"i{bits.itemsize}")).view(kind)


def host_call_of_torch(matrix: Matrix, n: int) -> Callable[[], object] | None:
    """PyTorch's product with a cuSPARSELt weight, which plans anew every time; None where it has none."""
    import torch

    x = torch_tensor(random_bits((n, matrix.k), matrix.element, seed=n), matrix.element).t()
    try:
        compressed = torch._cslt_compress(torch_tensor(matrix.dense[0], matrix.element))
        torch._cslt_sparse_mm(compressed, x, transpose_result=True)
    except (AttributeError, RuntimeError):
        return None
    return lambda: torch._cslt_sparse_mm(compressed, x, transpose_result=True)


def _copy(weight: Sparse24Weight) -> Sparse24Weight:
    values = typed(weight.values_view.bits().copy(), weight.element)
    return Sparse24Weight(values, weight.metadata.copy(), validate=False)


class Cell:
    """One (matrix, n): inputs, the float64 reference on sampled results, and the contenders."""

    def __init__(self, matrix: Matrix, n: int) -> None:
        self.matrix, self.n = matrix, n
        self.desc = GemmSparse24Descriptor(n=n, m=matrix.m, k=matrix.k, element=matrix.element)
        self._x = random_bits((n, matrix.k), matrix.element, seed=n)
        self._y = cupy.empty((n, matrix.m), self.desc.out_element.bits_dtype)

    def plan(self, preference: PlanPreference) -> GemmSparse24Plan | None:
        """Our plan under ``preference``; None where no kernel can serve."""
        try:
            return GemmSparse24Plan.select(self.desc, device=0, preference=preference)
        except Sparse24Error:
            return None

    def ours(self, name: str, plan: GemmSparse24Plan) -> Contender:
        x, y = typed(self._x, self.desc.element), typed(self._y, self.desc.out_element)
        space = cupy.empty(max(plan.workspace_size(), 1), cupy.uint8)
        launches = [
            plan.bind(GemmSparse24Args(packed, x, y), workspace=space).launch
            for packed in self.matrix.packed(plan)
        ]
        return Contender(name, launches)

    def peer_is_tuned(self) -> bool:
        """Whether cuSPARSELt runs the best algorithm of a search, and not the one that it takes by itself."""
        properties = cuda_properties(0)
        table, version = shipped(properties.name), cusparselt.Kernel.tuning_version(properties)
        return any(
            name.startswith("cusparselt") and table.mismatch(entry, properties, version) is None
            for name, entry in table.find(self.desc).items()
        )

    def dense(self) -> Contender | None:
        """cuBLAS through PyTorch; None where PyTorch has no product of the types for so few tokens."""
        import torch

        element = self.matrix.element
        x, y = torch_tensor(self._x, element), torch_tensor(self._y, self.desc.out_element)
        weights = [torch_tensor(bits, element).t() for bits in self.matrix.dense]
        if element is ElementKind.S8:
            if self.n <= 16:  # torch._int_mm needs more
                return None
            calls = [partial(torch._int_mm, x, w, out=y) for w in weights]
        elif element is ElementKind.FP8_E4M3:
            if self.n % 16:
                return None
            one = torch.ones((), device="cuda")
            options = {"scale_a": one, "scale_b": one, "out_dtype": y.dtype, "use_fast_accum": True}
            calls = [partial(torch._scaled_mm, x, w, **options) for w in weights]
        else:
            calls = [partial(torch.mm, x, w, out=y) for w in weights]
        return Contender("dense", [on_torch_stream(call) for call in calls])

    def rel_error(self, launch: Launch) -> float:
        """||y - exact|| / ||exact|| against float64, on up to 64 x 256 sampled results."""
        self._y.fill(np.iinfo(self._y.dtype).max)
        launch(cupy.cuda.Stream.null.ptr)
        cupy.cuda.Device().synchronize()
        rng = np.random.default_rng(0)
        rows = cupy.asarray(np.sort(rng.choice(self.n, min(self.n, 64), replace=False)))
        columns = cupy.asarray(np.sort(rng.choice(self.matrix.m, min(self.matrix.m, 256), replace=False)))
        element = self.matrix.element
        x, w = widened(self._x[rows], element), widened(self.matrix.dense[0][columns], element)
        got, exact = widened(self._y[rows][:, columns], self.desc.out_element), x @ w.T
        return float(cupy.linalg.norm(got - exact) / cupy.linalg.norm(exact))


def on_torch_stream(call: Callable[[], None]) -> Launch:
    import torch

    def launch(stream: int) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            call()

    return launch
