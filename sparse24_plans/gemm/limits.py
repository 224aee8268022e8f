"""The limits of the gemm kernels: each function returns why a kernel refuses a problem or device, or None."""

from __future__ import annotations

import re

from .._vendor import cusparselt_abi as abi
from ..arithmetic.epilogue import NO_BOUNDS
from ..device.install import install_advice
from ..device.transpose import Matrices
from ..plan.cublaslt import beyond_alpha
from ..plan.kernel import align_up
from ..plan.kernel_table import dotted, grid_limit_refusal
from ..plan.schedule_choice import constants
from ..vocab import DeviceProperties, ElementKind, EpilogueKind, MatrixOrder, ScaleKind
from ..weights.inflate import BLOCK_BYTES
from ..weights.packed_layouts import TILE_M
from .descriptor import GemmSparse24Descriptor
from .group_checks import MAX_GROUPS

F32, F16, BF16 = ElementKind.F32, ElementKind.F16, ElementKind.BF16
S8, E4M3, I32 = ElementKind.S8, ElementKind.FP8_E4M3, ElementKind.I32

WITH_FP8 = 8, 9
"""Least compute capability with conversions and tensor cores of fp8."""

_INTEGER_K = 2**18  # k/2 kept products of at most 2^14
SPLIT_CTA_ELEMENTS = 2048
"""Elements of X that one CTA of the pre-pass kernel splits."""
SPLIT_CHUNK_BYTES, _MIN_CHUNK = 512 << 20, 128
"""Most bytes of bf16 terms of X that the workspace holds at once, and tokens whose terms it always holds."""
_MAX_LAUNCHED_BATCHES = 1024
"""Most batches that are launched one after the other: they take the host several milliseconds."""
_LARGE_WEIGHT = 1 << 20
"""Cells of a float32 weight from which a launch for each batch is faster than one of the strict kernel, as
measured on an H200."""
DIRECT_TOKENS, _SECTOR = 64, 32
"""A column-major X of at most DIRECT_TOKENS tokens is not transposed. One of more tokens is not transposed if
its columns begin at multiples of a memory sector, _SECTOR bytes."""
STRICT_SMALL_TILE = (32, 16)
"""Outputs x tokens of the strict kernel's smallest tile, which bounds its grid."""


def strict(problem: GemmSparse24Descriptor) -> str | None:
    rows, tokens = STRICT_SMALL_TILE
    return grid_limit_refusal(
        -(-problem.sums // rows) * most_token_tiles(problem, tokens) * problem.batch_count
    )


def most_token_tiles(problem: GemmSparse24Descriptor, tokens: int) -> int:
    """Tiles of so many tokens, or the most there can be: each group may end within a tile."""
    if not problem.groups:
        return -(-problem.n // tokens)
    return problem.n // tokens + min(problem.groups, problem.n)


def _tile_blocks(problem: GemmSparse24Descriptor) -> str | None:
    """Refuse problems whose smallest tiles, each with at most 8 split-K slices, exceed the grid."""
    return grid_limit_refusal(-(-problem.m // 64) * -(-problem.n // 8) * 8 * problem.batch_count)


def _stacked_tiles(problem: GemmSparse24Descriptor) -> str | None:
    """Refuse stacked weights of batches that share packed tiles."""
    if problem.is_batched and not problem.shared_weight and problem.m % TILE_M:
        return f"needs m a multiple of {TILE_M} with a weight for each batch, got {problem.m}"
    return None


def _many_batches(problem: GemmSparse24Descriptor) -> str | None:
    """Refuse more batches than are launched one after the other."""
    if problem.batch_count > _MAX_LAUNCHED_BATCHES:
        return (
            f"launches at most {_MAX_LAUNCHED_BATCHES} batches one after the other, got {problem.batch_count}"
        )
    return None


def has_small_batches(problem: GemmSparse24Descriptor) -> bool:
    """Whether there are batches of weights so small that one launch for all is faster than one for each.

    A launch for each batch takes some microseconds. Neither n nor the number of batches decides, because the
    kernels' weights have different layouts.
    """
    return problem.is_batched and problem.m * problem.k < _LARGE_WEIGHT


def mma_sp(problem: GemmSparse24Descriptor) -> str | None:
    return _stacked_tiles(problem) or _unaligned_columns(problem) or _tile_blocks(problem)


def mma_sp_fp8(problem: GemmSparse24Descriptor) -> str | None:
    return _unaligned_rows(problem) or mma_sp(problem)


def mma_sp_few(problem: GemmSparse24Descriptor) -> str | None:
    """Refuse what mma_sp refuses, and more tokens than it multiplies faster than inflate_cublas does."""
    limits = constants("mma_sp_max_n")
    most = limits["large" if problem.m * problem.k >= limits["large_weight"] else "small"]
    return mma_sp(problem) if problem.n <= most else f"is preferred for n <= {most}, not {problem.n}"


def wgmma_sp(problem: GemmSparse24Descriptor) -> str | None:
    if problem.k == 0:
        return "serves no empty sums"
    largest = max(problem.n, problem.m, problem.k, problem.batch_count)
    if largest >= 2**31:
        return f"dimension {largest} exceeds a tensor map's coordinates, {2**31 - 1}"
    if (reason := _unaligned_rows(problem)) is not None:
        return reason
    if must_transpose_x(problem) and problem.is_batched:
        return (
            f"transposes no batches of X: needs n a multiple of 16 bytes in x_order column, got {problem.n}"
        )
    if problem.is_fp8 and problem.y_order is MatrixOrder.COLUMN:
        return f"serves y_order row for out_element {problem.out_element}"
    if must_transpose_x(problem) and (reason := grid_limit_refusal(_transpose_tiles(problem))) is not None:
        return reason
    return _stacked_tiles(problem) or _integer_sums(problem) or _tile_blocks(problem)


def wgmma_sp_grouped(problem: GemmSparse24Descriptor) -> str | None:
    if problem.m % TILE_M:
        return f"needs m a multiple of {TILE_M} with groups, got {problem.m}"
    if problem.groups > MAX_GROUPS:
        return f"serves at most {MAX_GROUPS} groups, got {problem.groups}"
    if problem.weight_rows >= 2**31:
        return f"{problem.weight_rows} rows of all weights exceed a tensor map's coordinates, {2**31 - 1}"
    # Offsets may give every group all rows: work tiles are counted in 32 bits.
    tiles = problem.groups * (problem.m // TILE_M) * -(-problem.n // 8)
    return wgmma_sp(problem) or grid_limit_refusal(tiles)


def must_transpose_x(problem: GemmSparse24Descriptor) -> bool:
    """Return whether X has contiguous columns that begin between multiples of 16 bytes: no load reads it."""
    return problem.x_order is MatrixOrder.COLUMN and problem.n * problem.element.itemsize % 16 != 0


def should_transpose_x(problem: GemmSparse24Descriptor) -> bool:
    """Return whether a column-major X is multiplied faster after a transposition, as measured on an H200."""
    return must_transpose_x(problem) or (
        problem.x_order is MatrixOrder.COLUMN
        and not problem.is_batched
        and problem.n > DIRECT_TOKENS
        and problem.n * problem.element.itemsize % _SECTOR != 0
        and grid_limit_refusal(_transpose_tiles(problem)) is None
    )


def transpose_bytes(problem: GemmSparse24Descriptor) -> int:
    """Bytes of the transposed X."""
    return problem.n * problem.k * problem.element.itemsize


def wgmma_sp_workspace(problem: GemmSparse24Descriptor) -> int:
    """Bytes of workspace without which the kernel can't run."""
    return transpose_bytes(problem) if must_transpose_x(problem) and not problem.is_empty else 0


def _transpose_tiles(problem: GemmSparse24Descriptor) -> int:
    return Matrices(problem.k, problem.n, problem.element.itemsize).ctas


def _unaligned_rows(problem: GemmSparse24Descriptor) -> str | None:
    """Refuse row-major X whose rows can't be loaded 16 bytes at a time."""
    if problem.x_order is MatrixOrder.ROW and problem.k * problem.element.itemsize % 16:
        return f"needs rows of X in multiples of 16 bytes, got k = {problem.k}"
    return None


def _unaligned_columns(problem: GemmSparse24Descriptor) -> str | None:
    """Refuse a contiguous column-major X whose columns can't be loaded 16 bytes at a time."""
    if problem.x_order is MatrixOrder.COLUMN and problem.n * problem.element.itemsize % 16:
        return f"needs columns of X in multiples of 16 bytes, got n = {problem.n}"
    return None


def f32_split(terms: int, problem: GemmSparse24Descriptor) -> str | None:
    """Refuse problems of which the pre-pass kernel can't write ``terms`` bf16 terms of a chunk of X.

    Batches are launched one after the other, so the other limits are those of one batch.
    """
    blocks = -(-most_chunk(terms, problem) * problem.k // SPLIT_CTA_ELEMENTS)
    return (
        _many_batches(problem)
        or _stacked_tiles(problem)
        or wgmma_sp(problem.one_batch)
        or grid_limit_refusal(blocks)
    )


def most_chunk(terms: int, problem: GemmSparse24Descriptor, room: int = SPLIT_CHUNK_BYTES) -> int:
    """Most tokens of a chunk: the workspace holds the terms of one chunk of X at a time, in ``room`` bytes.

    A chunk of the fewest tokens may need more.
    """
    if problem.n <= _MIN_CHUNK:
        return problem.n
    room = min(room, SPLIT_CHUNK_BYTES) // 256 * 256
    return min(max(room // (terms * max(problem.k, 1) * BF16.itemsize), _MIN_CHUNK), problem.n)


def producers_split(m: int, k: int, tokens: int) -> bool:
    """Return whether producers split X, in tiles of so many tokens. Otherwise a pre-pass kernel does.

    A launch less is then worth more than producers that only load.
    """
    limits = constants("f32_producer_split")
    return bool(tokens <= limits["max_tokens"] and m * k <= limits["max_weight"])


def split_bytes(terms: int, problem: GemmSparse24Descriptor) -> int:
    """Bytes of the bf16 terms of X, whose tokens are one chunk."""
    return terms * problem.n * problem.k * BF16.itemsize


def _integer_sums(problem: GemmSparse24Descriptor) -> str | None:
    """Refuse sums of k/2 products of s8 that may exceed the int32 accumulators of the tensor cores."""
    if problem.element is S8 and problem.k >= _INTEGER_K:
        return f"sums of s8 may exceed int32 for k >= {_INTEGER_K}, got {problem.k}"
    return None


def cublas(problem: GemmSparse24Descriptor) -> str | None:
    largest = max(problem.n, problem.m, problem.k)
    if largest >= 2**31:
        return f"dimension {largest} exceeds cuBLAS's limit {2**31 - 1}"
    if (reason := beyond_alpha(problem.alpha)) is not None:
        return reason
    return grid_limit_refusal(-(-problem.m * problem.k * problem.element.itemsize // BLOCK_BYTES))


def cublas_regions(problem: GemmSparse24Descriptor) -> tuple[int, int]:
    """Bytes of the inflated weight, and of the float32 accumulators that an epilogue needs."""
    if 0 in (problem.n, problem.outputs, problem.reduction):  # nothing is multiplied
        return 0, 0
    dense = align_up(problem.m * problem.k * problem.element.itemsize)
    plain = problem.epilogue is EpilogueKind.IDENTITY and not problem.has_c
    accumulators = 0 if plain else 4 * problem.n * problem.m
    return dense, align_up(accumulators)


# cuSPARSELt's result types by element. The bias has the result's type, or f32 for integer results.
_CUSPARSELT_OUT = {F16: (F16,), BF16: (BF16,), S8: (I32, S8, F16, BF16), E4M3: (BF16, F16, F32)}
CUSPARSELT_ACTIVATIONS = (EpilogueKind.IDENTITY, EpilogueKind.RELU, EpilogueKind.GELU_TANH)
_CUSPARSELT_GELU = ((S8, S8), (E4M3, BF16))


def cusparselt(problem: GemmSparse24Descriptor) -> str | None:
    out, element = problem.out_element, problem.element
    if problem.tokens == 0 or problem.m == 0 or problem.k == 0:
        return "serves no empty operands"
    if (reason := _many_batches(problem)) is not None:
        return reason
    size = element.itemsize
    for name, unit in (("n", 16 // size), ("m", 16 if size == 2 else 32), ("k", 16 if size == 2 else 32)):
        if getattr(problem, name) % unit:
            return f"needs {name} a multiple of {unit} for {element}, got {getattr(problem, name)}"
    if max(problem.m * problem.k, problem.n * problem.k, problem.n * problem.m) >= 2**31:
        return "serves operands of fewer than 2^31 elements: beyond, the library is not tested"
    if (reason := _integer_sums(problem)) is not None:
        return reason
    if problem.x_element is not element:
        return f"serves x_element {element} for {element}, not {problem.x_element}"
    if out not in _CUSPARSELT_OUT[element]:
        return f"serves out_element {', '.join(_CUSPARSELT_OUT[element])} for {element}, not {out}"
    gelu = problem.epilogue.activation is EpilogueKind.GELU_TANH
    if gelu and (element, out) not in _CUSPARSELT_GELU:
        return f"serves gelu_tanh from s8 to s8 and from fp8_e4m3 to bf16, not from {element} to {out}"
    if problem.relu_bounds != NO_BOUNDS:
        return f"serves relu without bounds, not {problem.relu_bounds}"
    bias = F32 if out.is_integer else out
    if problem.epilogue.has_bias and problem.bias_element is not bias:
        return f"needs bias_element {bias} for out_element {out}, got {problem.bias_element}"
    if problem.x_order is MatrixOrder.COLUMN and size == 1:
        return f"serves x_order row for {element}"
    if problem.scale_x is not ScaleKind.NONE or problem.scale_w is ScaleKind.TENSOR:
        return "takes no scale but a scale_w of rows"
    if problem.scale_w is ScaleKind.ROW and (element is not S8 or problem.alpha != 1):
        return f"takes a scale_w for s8 with alpha 1, not for {element} with alpha {problem.alpha}"
    return None


def needs_cusparselt(device: DeviceProperties) -> str | None:
    install = install_advice("cusparselt")
    if device.cusparselt is None:
        return f"cuSPARSELt doesn't load; {install}"
    found = re.match(r"(\d{1,9})\.(\d{1,9})(\.|$)", device.cusparselt, re.ASCII)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if not abi.OLDEST[:2] <= version < abi.BELOW[:2]:
        known = f"from {dotted(abi.OLDEST)} to below {dotted(abi.BELOW)}"
        return f"cuSPARSELt {device.cusparselt:.80} loads, but one {known} is needed; {install}"
    return None
