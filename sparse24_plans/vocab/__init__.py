"""The words of the package: enums with stable string values, and frozen models.

No code here touches a device. Every model is immutable, hashable and survives a round trip through JSON.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, SupportsIndex, TypeAlias

import ml_dtypes
import numpy as np
from pydantic import GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

from ..errors import InvalidProblemError, shown
from .fields import INT64_MAX as INT64_MAX
from .fields import DriverInt
from .fields import Eights as Eights
from .fields import Flag as Flag
from .fields import Integer as Integer
from .fields import Listed as Listed
from .fields import Number as Number
from .fields import Size as Size
from .fields import Text as Text
from .fields import checked_flag as checked_flag
from .fields import integer as integer
from .model import Model as Model

Dtype: TypeAlias = "np.dtype[Any]"
Float64s: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


class _Word(str, Enum):
    def __str__(self) -> str:
        return str(self.value)

    def __repr__(self) -> str:
        return repr(str(self.value))  # as callers write it

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(cls._readable, handler(source))

    @classmethod
    def _readable(cls, value: object) -> object:
        """``value`` if it is a string. Enums would compare and print other values, which may be broken."""
        if not isinstance(value, str):
            raise ValueError(f"expected one of {', '.join(cls)}, got {shown(value)}")
        return value


class ElementKind(_Word):
    """Element types of operands. ``dtype`` is the NumPy (or ml_dtypes) type with the same bits.

    Arguments and fields also take its name, NumPy's name, or a dtype of NumPy, ml_dtypes, JAX or PyTorch.
    ``s4`` is an element of quantized weights alone, which store two values in a byte.
    """

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    S8 = "s8"
    S4 = "s4"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    I32 = "i32"
    U16 = "u16"
    U8 = "u8"

    @classmethod
    def _missing_(cls, value: object) -> ElementKind | None:
        return _element_of_dtype(value)

    @classmethod
    def _readable(cls, value: object) -> object:
        return super()._readable(_element_of_dtype(value) or value)

    @property
    def dtype(self) -> Dtype:
        """The NumPy type, or the one of ml_dtypes if NumPy has none."""
        return _DTYPES[self]

    itemsize: int
    """Bytes of one element."""

    @property
    def bits_dtype(self) -> Dtype:
        """The unsigned integer type of the same size, which the package uses to move elements."""
        return np.dtype(f"u{self.itemsize}")

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding to nearest (0 for integers)."""
        return 0.0 if self in _INTEGERS else _finfo(self.dtype).eps / 2

    @property
    def is_integer(self) -> bool:
        """Whether its values are integers."""
        return self in _INTEGERS

    @property
    def smallest_subnormal(self) -> float:
        """Spacing of the values around zero (0 for integers)."""
        return 0.0 if self in _INTEGERS else _finfo(self.dtype).smallest_subnormal

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return float(np.iinfo(self.dtype).max) if self in _INTEGERS else _finfo(self.dtype).largest

    @property
    def smallest_normal(self) -> float:
        """The least positive value of full precision (0 for integers)."""
        return 0.0 if self in _INTEGERS else _finfo(self.dtype).smallest_normal


_DTYPES: dict[ElementKind, Dtype] = {
    ElementKind.F32: np.dtype(np.float32),
    ElementKind.F16: np.dtype(np.float16),
    ElementKind.BF16: np.dtype(ml_dtypes.bfloat16),
    ElementKind.S8: np.dtype(np.int8),
    ElementKind.S4: np.dtype(ml_dtypes.int4),
    ElementKind.FP8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    ElementKind.FP8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
    ElementKind.I32: np.dtype(np.int32),
    ElementKind.U16: np.dtype(np.uint16),
    ElementKind.U8: np.dtype(np.uint8),
}
_KIND_OF_NAME: dict[object, ElementKind] = {dtype.name: kind for kind, dtype in _DTYPES.items()}
for _kind, _dtype in _DTYPES.items():
    _kind.itemsize = _dtype.itemsize  # a plain attribute: every run asks for it
_INTEGERS = frozenset({ElementKind.S8, ElementKind.S4, ElementKind.I32, ElementKind.U16, ElementKind.U8})


FP8 = (ElementKind.FP8_E4M3, ElementKind.FP8_E5M2)
"""The 8-bit floats."""
IN_MEMORY = tuple(kind for kind in ElementKind if kind is not ElementKind.S4)
"""Elements that tensors may have. Values of ``s4`` share bytes, which tensors can't describe."""


class _FloatLimits(NamedTuple):
    eps: float
    smallest_subnormal: float
    smallest_normal: float
    largest: float


@cache
def _finfo(dtype: Dtype) -> _FloatLimits:
    about: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    found = about.eps, about.smallest_subnormal, about.smallest_normal, about.max
    return _FloatLimits(*map(float, found))


class TorchDtype(Protocol):
    """PyTorch's dtypes, for type checkers."""

    @property
    def itemsize(self) -> int: ...
    @property
    def is_floating_point(self) -> bool: ...


ElementLike: TypeAlias = ElementKind | str | np.dtype[Any] | type[Any] | TorchDtype
"""A name of an element: ``"bf16"``, ``ElementKind.BF16``, ``ml_dtypes.bfloat16``, ``torch.bfloat16``."""


def _element_of_dtype(value: object) -> ElementKind | None:
    """The element of a framework's dtype, or None. It calls no method of objects that are no dtypes."""
    kind = type(value)
    if kind is ElementKind:
        return ElementKind(value)
    if kind is str:
        return _KIND_OF_NAME.get(value)
    if issubclass(kind, type):  # np.float32, or a type of JAX, which has the dtype as an attribute
        value = vars(value).get("dtype", value)
    if isinstance(value, np.dtype):
        return next((one for one, dtype in _DTYPES.items() if dtype == value), None)
    if (kind.__module__, kind.__name__) == ("torch", "dtype"):
        return _KIND_OF_NAME.get(str(value).rpartition(".")[2])
    return next((one for one, dtype in _DTYPES.items() if dtype.type is value), None)


def element_kind(value: ElementLike, argument: str = "element") -> ElementKind:
    """``value`` as an ElementKind. Raises InvalidProblemError naming ``argument``."""
    if type(value) is ElementKind:
        return value
    try:
        return ElementKind(value) if isinstance(value, str) else _known(_element_of_dtype(value))
    except ValueError:
        names = ", ".join(ElementKind)
        raise InvalidProblemError(f"{argument}: expected one of {names}, got {shown(value)}") from None


def _known(found: ElementKind | None) -> ElementKind:
    if found is None:
        raise ValueError
    return found


class MathPrecision(_Word):
    """Precision of the operands of a product. The accumulator's type is another field."""

    F32 = "f32"
    TF32 = "tf32"
    F16 = "f16"
    BF16 = "bf16"
    INT8 = "int8"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"

    @classmethod
    def of(cls, element: ElementKind) -> MathPrecision:
        """The precision of products of the element itself."""
        return cls.INT8 if element.is_integer else cls(element.value)


class EpilogueKind(_Word):
    """The operation on ``alpha * acc``: an activation, with a bias or without.

    GELU is the exact one, x*Phi(x); GELU_TANH is its tanh approximation. RELU2 is the square of relu. SWIGLU,
    GEGLU and GEGLU_TANH make one result of two rows of W, activation(gate) * up: ``gated_rows``.
    """

    IDENTITY = "identity"
    RELU = "relu"
    GELU = "gelu"
    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    RELU2 = "relu2"
    SWIGLU = "swiglu"
    GEGLU = "geglu"
    GEGLU_TANH = "geglu_tanh"
    BIAS = "bias"
    BIAS_RELU = "bias_relu"
    BIAS_GELU = "bias_gelu"
    BIAS_SILU = "bias_silu"
    BIAS_GELU_TANH = "bias_gelu_tanh"
    BIAS_RELU2 = "bias_relu2"
    BIAS_SWIGLU = "bias_swiglu"
    BIAS_GEGLU = "bias_geglu"
    BIAS_GEGLU_TANH = "bias_geglu_tanh"

    @property
    def has_bias(self) -> bool:
        """Whether a bias is added before the activation."""
        return self.startswith(EpilogueKind.BIAS)

    @property
    def activation(self) -> EpilogueKind:
        """This epilogue without its bias."""
        if self is EpilogueKind.BIAS:
            return EpilogueKind.IDENTITY
        return EpilogueKind(self.removeprefix("bias_"))

    @property
    def is_gated(self) -> bool:
        """Whether two rows of W make one result: an activated gate times the other row's value."""
        return self.endswith((EpilogueKind.SWIGLU, EpilogueKind.GEGLU, EpilogueKind.GEGLU_TANH))


class GemmOp(_Word):
    """``forward``: Y[N,M] = epilogue(alpha * X[N,K] @ W[M,K]^T). ``dgrad``: dX[N,K] = alpha * dY[N,M] @ W."""

    FORWARD = "forward"
    DGRAD = "dgrad"


class GroupTokens(_Word):
    """How groups' tokens are given: ``offsets`` of sorted rows, ``counts`` of places, or ``experts``."""

    OFFSETS = "offsets"
    COUNTS = "counts"
    EXPERTS = "experts"


class MatrixOrder(_Word):
    """The adjacent elements of X or Y: those of one token (``row``), or of one feature (``column``)."""

    ROW = "row"
    COLUMN = "column"


class ScaleKind(_Word):
    """Scale factors of X or W: none, one for the ``tensor``, or one per ``row`` (token or out feature)."""

    NONE = "none"
    TENSOR = "tensor"
    ROW = "row"


class PrepareOp(_Word):
    """The work of a plan of ``prepare``. Its KernelSku's op is this name and ``_sparse24``."""

    PRUNE = "prune"
    COMPRESS = "compress"
    PRUNE_COMPRESS = "prune_compress"
    DECOMPRESS = "decompress"
    PACK = "pack"
    UNPACK = "unpack"
    TILE_PRUNE = "tile_prune"
    MASK = "mask"
    QUANTIZE = "quantize"
    PRUNE_QUANTIZE = "prune_quantize"
    DEQUANTIZE = "dequantize"


class ScaleRule(_Word):
    """The rule that gives a group of a weight's values its scale.

    ``largest``: the largest |value| over the largest stored value. ``least_squares``: of that scale and 17
    that a regression of the values on stored ones gives, the one with the least sum of squared errors.
    """

    LARGEST = "largest"
    LEAST_SQUARES = "least_squares"


class TileRule(_Word):
    """The rule that keeps at most two cells of each row and of each column of a 4x4 tile.

    ``greedy_magnitude``, ``greedy_value``: cells are kept from the largest |value|, or value, while their row
    and column have room, which may keep fewer than 8. ``causal_1122``: the rows, in order, keep their largest
    1, 1, 2 and 2 values while the column has room, so that no row depends on a later one. ``optimal``: the
    one of the 90 ways to keep two of each row and column that has the largest sum of |value|.
    """

    GREEDY_MAGNITUDE = "greedy_magnitude"
    GREEDY_VALUE = "greedy_value"
    CAUSAL_1122 = "causal_1122"
    OPTIMAL = "optimal"


class BlockSparseOp(_Word):
    """Products C = A @ B with one block-sparse (S) and two dense (D) matrices.

    The first letter is C's, then A's and B's: ``sdd`` computes the kept blocks of a dense product, ``dsd``
    multiplies a sparse matrix from the left, ``dds`` one from the right.
    """

    SDD = "sdd"
    DSD = "dsd"
    DDS = "dds"


class InnerPattern(_Word):
    """The cells inside the kept blocks of a block-sparse matrix.

    ``dense``: every cell. ``sparse24``: at most 2 of every 4 consecutive cells along the sums of the product,
    stored as kept values and metadata with their positions.
    """

    DENSE = "dense"
    SPARSE24 = "sparse24"


class BlockSparsePass(_Word):
    """A function itself (``forward``), or the gradients of its operands (``backward``)."""

    FORWARD = "forward"
    BACKWARD = "backward"


class BlockSparseConvOp(_Word):
    """A convolution, or the gradient of its input (``dgrad``) or of its filter (``wgrad``)."""

    FORWARD = "forward"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


class AttentionMask(_Word):
    """The effect of an attention mask on scores.

    ``none``: there is no mask. ``add``: the mask is added. ``mul``: scores are dropped where the mask is 0.
    """

    NONE = "none"
    ADD = "add"
    MUL = "mul"


class MaskLayout(_Word):
    """How a mask of [M, K] cells is stored, one bit a cell, as uint8.

    ``rows``: [M, K/8], cell 8j + i of a row in bit i of byte j. ``tiles``: [M/8, K/8, 8], of every 8x8 cells
    the four 4x4 quadrants (top left, top right, bottom left, bottom right), each 16 bits, low byte first:
    bit = column + 4 * row.
    """

    ROWS = "rows"
    TILES = "tiles"


CANONICAL_LAYOUT = "canonical"  # this layout of weights is defined in weights/weight.py
TILE64X128_LAYOUT = "tile64x128_16bit_v1"  # weights/packing.py defines all tiled layouts
TILE64X256_LAYOUT = "tile64x256_8bit_v1"
TILE64X64_LAYOUT = "tile64x64_32bit_v1"
TILE64X64_PARTS_LAYOUT = "tile64x64_2xbf16_v1"
TILE64X128_S4_LAYOUT = "tile64x128_s4_v1"  # weights/packing_quantized.py
TILE64X128_S8_LAYOUT = "tile64x128_s8_v1"
TILE64X128_FP8_LAYOUT = "tile64x128_fp8_v1"
CUSPARSELT_LAYOUT = "cusparselt_blob"  # gemm/backends/cusparselt.py
DENSE_F32_LAYOUT = "dense_f32"  # weights/dense.py
BLOCKS_LAYOUT = "blocks"  # blocksparse/layout.py
DENSE_BLOCKS_LAYOUT = "dense_blocks"  # blocksparse/packed.py


class OpCategory(_Word):
    """The kind of work that a kernel does."""

    GEMM = "gemm"
    PRUNE = "prune"
    COMPRESS = "compress"
    DECOMPRESS = "decompress"
    PACK = "pack"
    QUANTIZE = "quantize"
    SOFTMAX = "softmax"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"


class ArchSku(_Word):
    """The oldest architecture that a kernel is built for. A kernel of ``any`` is compiled for its device."""

    ANY = "any"
    SM80 = "sm80"
    SM89 = "sm89"
    SM90A = "sm90a"
    SM100 = "sm100"
    SM120 = "sm120"


class Tier(_Word):
    """The part of the machine that a kernel uses, and how it uses the sparsity.

    ``host``: NumPy on the CPU. ``inflate``: a GPU expands the sparse operand, in memory or while it reads
    it, and multiplies without sparse instructions, or multiplies kept blocks without tensor cores.
    ``memory``: a GPU moves or compares data and multiplies no matrices. ``tensor_core``: a GPU runs dense
    tensor-core instructions on kept blocks alone. ``sparse_tensor_core``: a GPU runs 2:4 instructions.
    """

    HOST = "host"
    INFLATE = "inflate"
    MEMORY = "memory"
    TENSOR_CORE = "tensor_core"
    SPARSE_TENSOR_CORE = "sparse_tensor_core"


class DeviceProperties(Model):
    """All that selection knows about a device.

    ``kind`` is ``host`` or ``cuda``, ``ordinal`` its number in CUDA, ``name`` the driver's ("NVIDIA H200").
    """

    kind: Literal["host", "cuda"]
    ordinal: Size = 0
    name: Text = "host"
    compute_capability: tuple[DriverInt, DriverInt] = (0, 0)
    """Major and minor number: (9, 0) for Hopper."""
    multiprocessors: DriverInt = 0
    """Number of streaming multiprocessors, at least 1 on a GPU."""
    cublaslt: Text | None = None
    """Version of the cuBLASLt library that loads, or None."""
    cusparselt: Text | None = None
    """Version of the cuSPARSELt library that loads ("0.8.0"), or None."""
    driver: Text | None = None
    """Version of the GPU driver, or None if it isn't known."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            kind: Literal["host", "cuda"],
            ordinal: SupportsIndex = ...,
            name: str = ...,
            compute_capability: tuple[SupportsIndex, SupportsIndex] = ...,
            multiprocessors: SupportsIndex = ...,
            cublaslt: str | None = ...,
            cusparselt: str | None = ...,
            driver: str | None = ...,
        ) -> None: ...

    @model_validator(mode="after")
    def _has_multiprocessors(self) -> DeviceProperties:
        if self.kind == "cuda" and not self.multiprocessors:
            raise ValueError("multiprocessors: expected at least 1 for kind cuda, got 0")
        return self

    @property
    def cuda_arch(self) -> str:
        """Target for the compiler: ``sm_XYa`` from Hopper on, else ``sm_XY``."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    def __str__(self) -> str:
        return self.name if self.kind == "host" else f"cuda:{self.ordinal} ({self.name})"
