"""Descriptors of plans that prepare a weight W [M, K], and the operands that each takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, SupportsIndex

from pydantic import model_validator

from ..plan.descriptor import AS_ELEMENT, Descriptor
from ..plan.operands import Operand, Role
from ..plan.weight_operand import weight_operand
from ..vocab import (
    CANONICAL_LAYOUT,
    INT64_MAX,
    Eights,
    ElementKind,
    ElementLike,
    Flag,
    MaskLayout,
    MatrixOrder,
    OpCategory,
    PrepareOp,
    ScaleRule,
    Size,
    TileRule,
)
from ..weights import quantized_weight
from ..weights.packed_layouts import Quantization, layout_of, memory_element, stored_width
from ..weights.quantize import LARGEST

ELEMENTS = (
    ElementKind.F32,
    ElementKind.F16,
    ElementKind.BF16,
    ElementKind.S8,
    ElementKind.U8,
    ElementKind.FP8_E4M3,
    ElementKind.FP8_E5M2,
)
"""Elements of weights that can be prepared."""
SCORE_ELEMENTS = (ElementKind.F32, ElementKind.F16, ElementKind.BF16)
"""Elements of scores."""
NOTHING_FOUND = 2**64 - 1
"""Status of sound input. Any other status is ``group << 8 | detail``; groups are counted through all rows."""


class PrepareDescriptor(Descriptor):
    """Base of the descriptors: W [M, K] and its element."""

    m: Size
    """Rows of W; 0 or more."""
    k: Eights
    """Columns of W, a multiple of 8; 0 or more."""

    category: ClassVar[OpCategory] = OpCategory.COMPRESS
    _op: ClassVar[PrepareOp]

    @model_validator(mode="after")
    def _sizes(self) -> PrepareDescriptor:
        self._expect("element", ELEMENTS)
        if self.m * self.k > INT64_MAX // 16:
            raise ValueError(f"m, k: expected fewer than 2^59 elements, got {self.m}, {self.k}")
        return self

    @property
    def op(self) -> PrepareOp:
        """The operation."""
        return self._op

    @property
    def op_name(self) -> str:
        return f"{self.op}_sparse24"

    @property
    def layout_id(self) -> str:
        """Layout of the weight that is made or read."""
        return CANONICAL_LAYOUT

    @property
    def has_status(self) -> bool:
        """Whether a run reports the first bad group."""
        return STATUS in self.operands()

    # Parts that several share.

    def _matrix(self, name: str, role: Role, *, optional: bool = False, may_be: str | None = None) -> Operand:
        return Operand(name, role, (self.m, self.k), self.element, optional=optional, may_be=may_be)

    def _results(self) -> tuple[Operand, Operand]:
        return (
            Operand("values", Role.OUT, (self.m, self.k // 2), self.element),
            Operand("metadata", Role.OUT, (self.m, self.k // 8), ElementKind.U16),
        )

    def _weight(self, name: str, layout: str, quantization: Quantization | None = None) -> Operand:
        return weight_operand(name, self.m, self.k, self.element, layout=layout, quantization=quantization)

    def _mask(self, layout: MaskLayout, role: Role, *, optional: bool = False) -> Operand:
        rows, tiles = (self.m, self.k // 8), (self.m // 8, self.k // 8, 8)
        shape = rows if layout is MaskLayout.ROWS else tiles
        return Operand("mask", role, shape, ElementKind.U8, optional=optional)


STATUS = Operand("status", Role.OUT, (8,), ElementKind.U8, alignment=8)


class _Scored(PrepareDescriptor):
    scores: ElementKind | None = None
    """Element of the scores (f32, f16, bf16), or None to rank by |value|."""

    @model_validator(mode="after")
    def _score_element(self) -> _Scored:
        self._expect("scores", (*SCORE_ELEMENTS, None))
        return self

    def _scores(self) -> tuple[Operand, ...]:
        if self.scores is None:
            return ()
        return (Operand("scores", Role.IN, (self.m, self.k), self.scores),)


class PruneSparse24Descriptor(_Scored):
    """Keep the two largest of every group of four of W [M, K], by |value| or by scores.

    Parameters
    ----------
    m, k : int
        Rows and columns; k a multiple of 8. Either may be 0.
    element : ElementKind
        ``f32``, ``f16``, ``bf16``, ``s8``, ``u8``, ``fp8_e4m3`` or ``fp8_e5m2``.
    scores : ElementKind, optional
        ``f32``, ``f16`` or ``bf16``: rank by scores [M, K] of this type, signed, instead of by |value|.

    Ties keep the lower index. NaN ranks highest and is kept. -0.0 ranks as 0, and keeps its sign where it is
    kept. Raises InvalidProblemError, naming the field.
    """

    category: ClassVar[OpCategory] = OpCategory.PRUNE
    _op: ClassVar[PrepareOp] = PrepareOp.PRUNE

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            m: SupportsIndex,
            k: SupportsIndex,
            element: ElementLike,
            scores: ElementLike | None = ...,
        ) -> None: ...

    def operands(self) -> tuple[Operand, ...]:
        return (
            self._matrix("dense", Role.IN),
            self._matrix("pruned", Role.OUT, optional=True, may_be="dense"),
            self._mask(MaskLayout.ROWS, Role.OUT, optional=True),
            *self._scores(),
        )


class CompressSparse24Descriptor(PrepareDescriptor):
    """Compress W [M, K], which is 2:4 already; fields as in PruneSparse24Descriptor. -0.0 counts as zero."""

    _op: ClassVar[PrepareOp] = PrepareOp.COMPRESS

    if TYPE_CHECKING:

        def __init__(self, *, m: SupportsIndex, k: SupportsIndex, element: ElementLike) -> None: ...

    def operands(self) -> tuple[Operand, ...]:
        return (self._matrix("dense", Role.IN), *self._results(), STATUS)


class PruneCompressSparse24Descriptor(_Scored):
    """Prune and compress W [M, K] in one pass; fields and rules as in PruneSparse24Descriptor."""

    _op: ClassVar[PrepareOp] = PrepareOp.PRUNE_COMPRESS

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            m: SupportsIndex,
            k: SupportsIndex,
            element: ElementLike,
            scores: ElementLike | None = ...,
        ) -> None: ...

    def operands(self) -> tuple[Operand, ...]:
        return (self._matrix("dense", Role.IN), *self._results(), *self._scores())


class DecompressSparse24Descriptor(PrepareDescriptor):
    """Expand a canonical weight [M, K]; fields as in PruneSparse24Descriptor."""

    category: ClassVar[OpCategory] = OpCategory.DECOMPRESS
    _op: ClassVar[PrepareOp] = PrepareOp.DECOMPRESS

    if TYPE_CHECKING:

        def __init__(self, *, m: SupportsIndex, k: SupportsIndex, element: ElementLike) -> None: ...

    def operands(self) -> tuple[Operand, ...]:
        return (self._weight("weight", CANONICAL_LAYOUT), self._matrix("dense", Role.OUT))


class PackSparse24Descriptor(PrepareDescriptor):
    """A weight [M, K] of any element but u8 from the canonical form to its element's tiles, or back.

    ``direction`` is ``pack`` or ``unpack``; weights/packing.py has the layouts. The other fields are those of
    PruneSparse24Descriptor.
    """

    direction: Literal["pack", "unpack"] = "pack"
    """``pack`` converts from the canonical form to tiles, ``unpack`` back."""

    category: ClassVar[OpCategory] = OpCategory.PACK

    if TYPE_CHECKING:

        def __init__(
            self, *, m: SupportsIndex, k: SupportsIndex, element: ElementLike, direction: str = ...
        ) -> None: ...

    @property
    def op(self) -> PrepareOp:
        return PrepareOp(self.direction)

    @property
    def layout_id(self) -> str:
        return layout_of(self.element).layout_id

    def operands(self) -> tuple[Operand, ...]:
        layout = layout_of(self.element)
        if self.op is PrepareOp.UNPACK:
            return (self._weight("packed", layout.layout_id), *self._results(), STATUS)
        shape = layout.packed_shape(self.m, self.k)
        return self._weight("weight", CANONICAL_LAYOUT), Operand("packed", Role.OUT, shape, ElementKind.U8)


class TilePruneSparse24Descriptor(PrepareDescriptor):
    """Keep at most two cells of each row and column of every 4x4 tile of W [M, K]; compress W and W^T.

    ``m`` is a multiple of 8 too. ``rule`` is a TileRule; the other fields are those of
    PruneSparse24Descriptor.
    """

    rule: TileRule = TileRule.GREEDY_MAGNITUDE
    """Rule that chooses the kept cells."""
    m: Eights
    """Rows of W, a multiple of 8."""

    category: ClassVar[OpCategory] = OpCategory.PRUNE
    _op: ClassVar[PrepareOp] = PrepareOp.TILE_PRUNE

    if TYPE_CHECKING:

        def __init__(
            self, *, m: SupportsIndex, k: SupportsIndex, element: ElementLike, rule: TileRule | str = ...
        ) -> None: ...

    def operands(self) -> tuple[Operand, ...]:
        values_t, metadata_t = (self.k, self.m // 2), (self.k, self.m // 8)
        return (
            self._matrix("dense", Role.IN),
            *self._results(),
            Operand("values_t", Role.OUT, values_t, self.element),
            Operand("metadata_t", Role.OUT, metadata_t, ElementKind.U16),
            self._mask(MaskLayout.TILES, Role.OUT),
        )


class QuantizeSparse24Descriptor(PrepareDescriptor):
    """Quantize the rows of a matrix [M, K], the tokens of an X for one: x / scale, rounded to 8 bits.

    Parameters
    ----------
    m, k : int
        Rows and columns; either may be 0.
    element : ElementKind
        ``f32``, ``f16`` or ``bf16``.
    out_element : ElementKind
        ``fp8_e4m3`` or ``s8``.
    static_scale : bool
        Whether one scale is given for all rows. Otherwise a row's scale is its largest |x| / 448 (s8: / 127),
        and at least 2^-100.

    Quotients are rounded to float32, clamped to 448 (127) in magnitude, and rounded to nearest even. NaN is
    0x7f in fp8_e4m3, and 0 in s8. A row with NaN or Inf has a scale of NaN or Inf.

    Raises InvalidProblemError, naming the field.
    """

    out_element: ElementKind = ElementKind.FP8_E4M3
    """Element of the quantized matrix."""
    static_scale: Flag = False
    """Whether the scale is given."""
    k: Size
    """Columns; 0 or more."""

    category: ClassVar[OpCategory] = OpCategory.QUANTIZE
    _op: ClassVar[PrepareOp] = PrepareOp.QUANTIZE

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            m: SupportsIndex,
            k: SupportsIndex,
            element: ElementLike,
            out_element: ElementLike = ...,
            static_scale: bool = ...,
        ) -> None: ...

    @model_validator(mode="after")
    def _elements(self) -> QuantizeSparse24Descriptor:
        self._expect("element", SCORE_ELEMENTS)
        self._expect("out_element", tuple(LARGEST))
        return self

    def operands(self) -> tuple[Operand, ...]:
        shape, f32 = (self.m, self.k), ElementKind.F32
        scale = Operand("scale", Role.OUT, (self.m,), f32)
        return (
            Operand("x", Role.IN, shape, self.element, lines=MatrixOrder.ROW),
            Operand("quantized", Role.OUT, shape, self.out_element, lines=MatrixOrder.ROW),
            Operand("scale", Role.IN, (1,), f32) if self.static_scale else scale,
        )


class _Quantized(PrepareDescriptor):
    """Base of the descriptors with a quantized weight, whose fields are those of Sparse24QuantizedWeight."""

    stored: ElementKind = ElementKind.S4
    """Element of the stored values: ``s4``, ``s8`` or ``fp8_e4m3``."""
    group: Size = 128
    """Adjacent columns of a row that share a scale: 32, 64 or 128, or 0 for the whole row."""
    scale_element: ElementKind = AS_ELEMENT
    """Type of the scales: ``element`` (default) or ``f32``."""

    @model_validator(mode="after")
    def _quantization(self) -> _Quantized:
        self._expect("element", quantized_weight.ELEMENTS)
        self._expect("stored", quantized_weight.STORED)
        self._expect("group", quantized_weight.GROUPS)
        self._expect("scale_element", (self.element, ElementKind.F32))
        return self

    @property
    def quantization(self) -> Quantization:
        """How W stores its values."""
        return Quantization(self.stored, self.group, self.scale_element)


class PruneQuantizeSparse24Descriptor(_Quantized, _Scored):
    """Prune W [M, K] and quantize what is kept, in one pass, as Sparse24QuantizedWeight.quantize does.

    Parameters
    ----------
    m, k : int
        Rows and columns; k a multiple of 8. Either may be 0.
    element : ElementKind
        ``f16`` or ``bf16``: the type of the quantized W when it is multiplied.
    dense_element : ElementKind, optional
        Type of the dense W: ``f32``, ``f16`` or ``bf16``; by default ``element``.
    stored, group, scale_element
        Arguments of Sparse24QuantizedWeight; ``s4`` in groups of 128 by default.
    rule : ScaleRule
        How a group's scale is chosen: ``largest`` (default) or ``least_squares``.
    scores : ElementKind, optional
        ``f32``, ``f16`` or ``bf16``: rank by scores [M, K] of this type, signed, instead of by |value|.
    sparse : bool
        Whether W is 2:4 already: nothing is pruned then, and ``check`` reports a group of more than two
        non-zeros, of which the first two were kept.

    Raises InvalidProblemError, naming the field.
    """

    dense_element: ElementKind = AS_ELEMENT
    """Element of the dense W."""
    rule: ScaleRule = ScaleRule.LARGEST
    """Rule that chooses scales."""
    sparse: Flag = False
    """Whether W is 2:4 already."""

    category: ClassVar[OpCategory] = OpCategory.QUANTIZE
    _op: ClassVar[PrepareOp] = PrepareOp.PRUNE_QUANTIZE

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            m: SupportsIndex,
            k: SupportsIndex,
            element: ElementLike,
            dense_element: ElementLike = ...,
            stored: ElementLike = ...,
            group: SupportsIndex = ...,
            scale_element: ElementLike = ...,
            rule: ScaleRule | str = ...,
            scores: ElementLike | None = ...,
            sparse: bool = ...,
        ) -> None: ...

    @model_validator(mode="after")
    def _source(self) -> PruneQuantizeSparse24Descriptor:
        self._expect("dense_element", quantized_weight.DENSE_ELEMENTS)
        if self.sparse and self.scores is not None:
            raise ValueError(f"scores: expected None where W is 2:4 already, got {self.scores}")
        return self

    def operands(self) -> tuple[Operand, ...]:
        by, m = self.quantization, self.m
        values = (m, stored_width(self.k, by)), memory_element(by.element)
        return (
            Operand("dense", Role.IN, (m, self.k), self.dense_element),
            Operand("values", Role.OUT, *values),
            Operand("metadata", Role.OUT, (m, self.k // 8), ElementKind.U16),
            Operand("scales", Role.OUT, (m, by.scales_of_a_row(self.k)), by.scale_element),
            *self._scores(),
            *((STATUS,) if self.sparse else ()),
        )


class DequantizeSparse24Descriptor(_Quantized):
    """The kept values [M, K/2] of a Sparse24QuantizedWeight W [M, K], whose fields these are.

    They are of ``element``, ``f16`` or ``bf16``, and the weight's metadata are theirs. Raises
    InvalidProblemError, naming the field.
    """

    category: ClassVar[OpCategory] = OpCategory.DECOMPRESS
    _op: ClassVar[PrepareOp] = PrepareOp.DEQUANTIZE

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            m: SupportsIndex,
            k: SupportsIndex,
            element: ElementLike,
            stored: ElementLike = ...,
            group: SupportsIndex = ...,
            scale_element: ElementLike = ...,
        ) -> None: ...

    def operands(self) -> tuple[Operand, ...]:
        return (
            self._weight("weight", CANONICAL_LAYOUT, self.quantization),
            Operand("dequantized", Role.OUT, (self.m, self.k // 2), self.element),
        )


class MaskSparse24Descriptor(PrepareDescriptor):
    """Apply a mask to a matrix [M, K], a gradient of W for one.

    ``layout`` is a MaskLayout: ``rows``, as PruneSparse24 writes it, or ``tiles``, as TilePruneSparse24 does,
    where m is a multiple of 8. The other fields are those of PruneSparse24Descriptor.
    """

    layout: MaskLayout = MaskLayout.ROWS
    """Layout of the mask's bits."""

    category: ClassVar[OpCategory] = OpCategory.PRUNE
    _op: ClassVar[PrepareOp] = PrepareOp.MASK

    if TYPE_CHECKING:

        def __init__(
            self, *, m: SupportsIndex, k: SupportsIndex, element: ElementLike, layout: MaskLayout | str = ...
        ) -> None: ...

    @model_validator(mode="after")
    def _whole_tiles(self) -> MaskSparse24Descriptor:
        if self.layout is MaskLayout.TILES and self.m % 8:
            raise ValueError(f"m: expected a multiple of 8 for layout tiles, got {self.m}")
        return self

    def operands(self) -> tuple[Operand, ...]:
        return (
            self._matrix("dense", Role.IN),
            self._mask(self.layout, Role.IN),
            self._matrix("masked", Role.OUT, may_be="dense"),
        )
