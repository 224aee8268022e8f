"""Descriptors of the plans of prepare.py, and the operands that each asks for."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from ..vocab import CANONICAL_LAYOUT, ElementKind, MaskLayout, Model, OpCategory, PrepareOp, TileRule
from ..weights import packing
from .table import ELEMENTS, SCORE_ELEMENTS

_INT64_MAX = 2**63 - 1
NOTHING_FOUND = 2**64 - 1
"""The status of sound input. Else it is ``group << 8 | detail``; groups count through all rows."""


class Role(Enum):
    """What an operand is to a plan. ``WEIGHT``: a part of a weight object, which is read."""

    IN = 0
    OUT = 1
    WEIGHT = 2


class Operand(NamedTuple):
    """One tensor: its name to the kernels, the field of the arguments that holds it, and what it must be."""

    name: str
    argument: str
    role: Role
    shape: tuple[int, ...]
    element: ElementKind
    optional: bool = False
    may_be: str | None = None
    """The operand whose memory this one may share, exactly."""
    alignment: int = 1


class PrepareDescriptor(Model):
    """What the descriptors share: W [M, K] and its element."""

    m: int = Field(ge=0, le=_INT64_MAX, strict=True)
    k: int = Field(ge=0, le=_INT64_MAX, multiple_of=8, strict=True)
    element: ElementKind

    category: ClassVar[OpCategory] = OpCategory.COMPRESS

    @model_validator(mode="after")
    def _sizes(self) -> PrepareDescriptor:
        if self.element not in ELEMENTS:
            raise ValueError(f"element: expected one of {', '.join(ELEMENTS)}, got {self.element}")
        if self.m * self.k > _INT64_MAX // 16:
            raise ValueError("m, k: expected fewer than 2^59 elements")
        return self

    @property
    def kind(self) -> PrepareOp:
        raise NotImplementedError

    @property
    def layout_id(self) -> str:
        """The layout of the weight that is made or read."""
        return CANONICAL_LAYOUT

    def operands(self) -> tuple[Operand, ...]:
        """Every operand, in the order of the arguments."""
        raise NotImplementedError

    # Parts that several share.

    def _matrix(self, name: str, role: Role, *, optional: bool = False, may_be: str | None = None) -> Operand:
        return Operand(name, name, role, (self.m, self.k), self.element, optional, may_be)

    def _kept(self, role: Role, argument: str | None = None) -> tuple[Operand, Operand]:
        values, metadata = (self.m, self.k // 2), (self.m, self.k // 8)
        return (
            Operand("values", argument or "values", role, values, self.element),
            Operand("metadata", argument or "metadata", role, metadata, ElementKind.U16),
        )

    def _mask(self, layout: MaskLayout, role: Role, *, optional: bool = False) -> Operand:
        rows, tiles = (self.m, self.k // 8), (self.m // 8, self.k // 8, 8)
        shape = rows if layout is MaskLayout.ROWS else tiles
        return Operand("mask", "mask", role, shape, ElementKind.U8, optional)


_STATUS = Operand("status", "status", Role.OUT, (8,), ElementKind.U8, alignment=8)


class _Scored(PrepareDescriptor):
    scores: ElementKind | None = None
    """Element of the scores (f32, f16, bf16), or None to rank by |value|."""

    @model_validator(mode="after")
    def _score_element(self) -> _Scored:
        if self.scores is not None and self.scores not in SCORE_ELEMENTS:
            raise ValueError(f"scores: expected one of {', '.join(SCORE_ELEMENTS)}, got {self.scores}")
        return self

    def _scores(self) -> tuple[Operand, ...]:
        if self.scores is None:
            return ()
        return (Operand("scores", "scores", Role.IN, (self.m, self.k), self.scores),)


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

    @property
    def kind(self) -> PrepareOp:
        return PrepareOp.PRUNE

    def operands(self) -> tuple[Operand, ...]:
        return (
            self._matrix("dense", Role.IN),
            self._matrix("pruned", Role.OUT, optional=True, may_be="dense"),
            self._mask(MaskLayout.ROWS, Role.OUT, optional=True),
            *self._scores(),
        )


class CompressSparse24Descriptor(PrepareDescriptor):
    """Compress W [M, K], which is 2:4 already; fields as of PruneSparse24Descriptor. -0.0 counts as zero."""

    @property
    def kind(self) -> PrepareOp:
        return PrepareOp.COMPRESS

    def operands(self) -> tuple[Operand, ...]:
        return (self._matrix("dense", Role.IN), *self._kept(Role.OUT), _STATUS)


class PruneCompressSparse24Descriptor(_Scored):
    """Prune and compress W [M, K] in one pass; fields and rules as of PruneSparse24Descriptor."""

    @property
    def kind(self) -> PrepareOp:
        return PrepareOp.PRUNE_COMPRESS

    def operands(self) -> tuple[Operand, ...]:
        return (self._matrix("dense", Role.IN), *self._kept(Role.OUT), *self._scores())


class DecompressSparse24Descriptor(PrepareDescriptor):
    """Expand a canonical weight [M, K]; fields as of PruneSparse24Descriptor."""

    category: ClassVar[OpCategory] = OpCategory.DECOMPRESS

    @property
    def kind(self) -> PrepareOp:
        return PrepareOp.DECOMPRESS

    def operands(self) -> tuple[Operand, ...]:
        return (*self._kept(Role.WEIGHT, "weight"), self._matrix("dense", Role.OUT))


class PackSparse24Descriptor(PrepareDescriptor):
    """A weight [M, K] of f16, bf16, s8 or fp8_e4m3 from the canonical form to its element's tiles, or back.

    ``direction`` is ``pack`` or ``unpack``; packing.py has the layouts. The other fields as of
    PruneSparse24Descriptor.
    """

    direction: Literal["pack", "unpack"] = "pack"

    category: ClassVar[OpCategory] = OpCategory.PACK

    @property
    def kind(self) -> PrepareOp:
        return PrepareOp(self.direction)

    @property
    def layout_id(self) -> str:
        return packing.layout_of(self.element).layout_id

    def operands(self) -> tuple[Operand, ...]:
        back = self.direction == "unpack"
        shape, u8 = packing.layout_of(self.element).packed_shape(self.m, self.k), ElementKind.U8
        packed = Operand("packed", "packed", Role.WEIGHT if back else Role.OUT, shape, u8)
        if back:
            return (packed, *self._kept(Role.OUT), _STATUS)
        return (*self._kept(Role.WEIGHT, "weight"), packed)


class TilePruneSparse24Descriptor(PrepareDescriptor):
    """Keep at most two cells of each row and column of every 4x4 tile of W [M, K]; compress W and W^T.

    ``m`` is a multiple of 8 too. ``rule`` is a TileRule; the other fields as of PruneSparse24Descriptor.
    """

    rule: TileRule = TileRule.GREEDY_MAGNITUDE
    m: int = Field(ge=0, le=_INT64_MAX, multiple_of=8, strict=True)

    category: ClassVar[OpCategory] = OpCategory.PRUNE

    @property
    def kind(self) -> PrepareOp:
        return PrepareOp.TILE_PRUNE

    def operands(self) -> tuple[Operand, ...]:
        values_t, metadata_t = (self.k, self.m // 2), (self.k, self.m // 8)
        return (
            self._matrix("dense", Role.IN),
            *self._kept(Role.OUT),
            Operand("values_t", "values_t", Role.OUT, values_t, self.element),
            Operand("metadata_t", "metadata_t", Role.OUT, metadata_t, ElementKind.U16),
            self._mask(MaskLayout.TILES, Role.OUT),
        )


class MaskSparse24Descriptor(PrepareDescriptor):
    """Apply a mask to a matrix [M, K], a gradient of W for one.

    ``layout`` is a MaskLayout: ``rows``, as PruneSparse24 writes it, or ``tiles``, as TilePruneSparse24 does,
    where m is a multiple of 8. The other fields as of PruneSparse24Descriptor.
    """

    layout: MaskLayout = MaskLayout.ROWS

    category: ClassVar[OpCategory] = OpCategory.PRUNE

    @model_validator(mode="after")
    def _whole_tiles(self) -> MaskSparse24Descriptor:
        if self.layout is MaskLayout.TILES and self.m % 8:
            raise ValueError(f"m: expected a multiple of 8 for layout tiles, got {self.m}")
        return self

    @property
    def kind(self) -> PrepareOp:
        return PrepareOp.MASK

    def operands(self) -> tuple[Operand, ...]:
        return (
            self._matrix("dense", Role.IN),
            self._mask(self.layout, Role.IN),
            self._matrix("masked", Role.OUT, may_be="dense"),
        )
