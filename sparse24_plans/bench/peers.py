"""PyTorch as a peer: dense cuBLAS and its own 2:4 calls. All peers are None without PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from typing import Any

from ..device.install import import_cupy
from ..tuning.data import Array, Matrix, random_bits
from ..tuning.timing import Contender, Launch, copies_beyond_l2
from ..vocab import FP8, ElementKind, TileRule
from .steady import StreamRuler

try:
    torch: Any = import_module("torch")
except ImportError:
    torch = None

_KINDS = {
    ElementKind.F32: "float32",
    ElementKind.F16: "float16",
    ElementKind.BF16: "bfloat16",
    ElementKind.S8: "int8",
    ElementKind.I32: "int32",
    ElementKind.FP8_E4M3: "float8_e4m3fn",
    ElementKind.FP8_E5M2: "float8_e5m2",
}
_INT4_GROUP = 128
_TILE_RULES = {TileRule.GREEDY_MAGNITUDE: "largest_abs_values_greedy"}


def torch_tensor(bits: Array, element: ElementKind) -> Any:
    """Raw bits as a PyTorch tensor, zero-copy."""
    return torch.from_dlpack(bits.view(f"i{bits.itemsize}")).view(getattr(torch, _KINDS[element]))


def on_torch_stream(call: Callable[[], object]) -> Launch:
    """Wrap ``call`` as a launch, which runs it on PyTorch's stream with the given handle."""

    def launch(stream: int) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            call()

    return launch


@cache
def _stream() -> Any:
    """One stream for all, since PyTorch keeps freed memory by stream."""
    return import_cupy().cuda.Stream(non_blocking=True)


@contextmanager
def torch_ruler() -> Iterator[StreamRuler]:
    """A stream that PyTorch's calls in the block run on, with the ruler that marks its moments.

    A backward pass runs on the stream of its forward pass, so both belong in the block.
    """
    stream = _stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        yield StreamRuler(stream)
        stream.synchronize()


def dense(x_bits: Array, y_bits: Array, weights: Sequence[Array], element: ElementKind) -> Contender | None:
    """cuBLAS; also None for what PyTorch refuses: fp8_e5m2, and 8-bit products of few tokens or ragged sizes.

    f32 is true float32: PyTorch takes TF32 only where it is told to.
    """
    if torch is None:
        return None
    x = torch_tensor(x_bits, element)
    columns = [torch_tensor(bits, element).t() for bits in weights]
    if element in FP8:
        one = torch.ones((), device="cuda")
        options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        calls = [partial(torch._scaled_mm, x, w, **options) for w in columns]
    else:
        multiply = torch._int_mm if element is ElementKind.S8 else torch.mm
        y = torch_tensor(y_bits, ElementKind.I32 if element is ElementKind.S8 else element)
        calls = [partial(multiply, x, w, out=y) for w in columns]
    try:
        calls[0]()
    except RuntimeError:  # PyTorch's checks; an error of the device shows in what comes next, too
        return None
    return Contender("dense", [on_torch_stream(call) for call in calls])


def int4(x_bits: Array, m: int, k: int) -> list[Contender]:
    """PyTorch's product with a dense weight of 4 bits and scales of 128 columns, if it has such a product."""
    if not hasattr(torch, "_weight_int4pack_mm"):
        return []
    x = torch_tensor(x_bits, ElementKind.BF16)
    values = torch.randint(0, 256, (m, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.rand(k // _INT4_GROUP, m, 2, dtype=torch.bfloat16, device="cuda")
    try:
        packed = torch._convert_weight_to_int4pack(values, 8)
        torch._weight_int4pack_mm(x, packed, _INT4_GROUP, scales)
    except RuntimeError:
        return []
    copies = [packed] + [packed.clone() for _ in range(copies_beyond_l2(m * k // 2) - 1)]
    calls = [partial(torch._weight_int4pack_mm, x, one, _INT4_GROUP, scales) for one in copies]
    return [Contender("int4", [on_torch_stream(call) for call in calls])]


def cusparselt_call(matrix: Matrix, n: int) -> Callable[[], object] | None:
    """PyTorch's product with a cuSPARSELt weight, which plans anew every time; None where it has none."""
    if torch is None:
        return None
    x = torch_tensor(random_bits((n, matrix.k), matrix.element, seed=~n), matrix.element).t()
    try:
        compressed = torch._cslt_compress(torch_tensor(matrix.dense[0], matrix.element))
        torch._cslt_sparse_mm(compressed, x, transpose_result=True)
    except (AttributeError, RuntimeError):
        return None
    return lambda: torch._cslt_sparse_mm(compressed, x, transpose_result=True)


def tile_pruning(
    shape: tuple[int, int], element: ElementKind, rule: TileRule
) -> tuple[str, Contender] | None:
    """PyTorch's tile packer, by its name, with our rule; None where PyTorch refuses it."""
    if not hasattr(torch, "_sparse_semi_structured_tile") or element.itemsize != 2:
        return None
    name = _TILE_RULES[rule]
    count = copies_beyond_l2(shape[0] * shape[1] * element.itemsize)
    matrices = [torch_tensor(random_bits(shape, element, seed=i), element) for i in range(count)]
    calls = [
        partial(torch._sparse_semi_structured_tile, matrix, algorithm=name, use_cutlass=True)
        for matrix in matrices
    ]
    try:
        calls[0]()
    except (RuntimeError, TypeError):
        return None
    launches = [on_torch_stream(call) for call in calls]
    return f"torch._sparse_semi_structured_tile({name!r})", Contender("torch", launches)
