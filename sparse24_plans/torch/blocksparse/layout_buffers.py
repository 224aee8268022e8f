"""``Layout``: a BlockSparseLayout and its look-up tables as tensors, which move with a model."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...blocksparse.device_tables import table_kernel
from ...blocksparse.layout import BlockSparseLayout
from ...blocksparse.lookup_tables import BlockSparseTables, longest_panel
from ...blocksparse.shape import BlockSparseShape
from ...device.devices import cuda_properties
from ...errors import FormatError, InvalidProblemError, Sparse24Error, UnsupportedError, shown
from ..elements import current_stream, device_of
from .plan_dispatch import check_dims, numbers_of, shape_of

# Conversions by PyTorch's own operations, on any device ---------------------------------------------


def _block_places(layout: Tensor, shape: Sequence[int]) -> Tensor:
    """The index of each kept block among all blocks of all heads.

    Its column and its row follow the row pointers in the tables. Integers alone say where, because
    torch.compile traces this.
    """
    heads, rows, cols, block, blocks = shape
    begin = heads * (rows // block) + 1
    columns, block_rows = layout[begin : begin + 2 * blocks].view(2, blocks)
    places: Tensor = block_rows.long() * (cols // block) + columns
    return places


def to_dense(values: Tensor, layout: Tensor, shape: Sequence[int]) -> Tensor:
    """``values`` [Z, blocks, block, block] as [Z, heads, rows, cols] with zeros elsewhere; differentiable."""
    heads, rows, cols, block, count = shape
    check_dims(values, "values", "Z, blocks, block, block")
    if tuple(values.shape[1:]) != (count, block, block):
        raise InvalidProblemError(
            f"values: expected [Z, {count}, {block}, {block}], got {list(values.shape)}"
        )
    if values.element_size() == 1 and values.dtype != torch.uint8:  # no gradients, and no indexing of fp8
        return to_dense(values.view(torch.uint8), layout, shape).view(values.dtype)
    batch, down, across = values.shape[0], rows // block, cols // block
    blocks = values.new_zeros(batch, heads * down * across, block, block)
    blocks = blocks.index_copy(1, _block_places(layout, shape), values)
    tiles = blocks.view(batch, heads, down, across, block, block)
    return tiles.transpose(3, 4).reshape(batch, heads, rows, cols)


def kept_blocks(dense: Tensor, layout: Tensor, shape: Sequence[int]) -> Tensor:
    """The values [Z, blocks, block, block] of ``dense`` [Z, heads, rows, cols]; differentiable."""
    heads, rows, cols, block, _ = shape
    check_dims(dense, "dense", "Z, heads, rows, cols")
    if tuple(dense.shape[1:]) != (heads, rows, cols):
        raise InvalidProblemError(f"dense: expected [Z, {heads}, {rows}, {cols}], got {list(dense.shape)}")
    if dense.element_size() == 1 and dense.dtype != torch.uint8:
        return kept_blocks(dense.view(torch.uint8), layout, shape).view(dense.dtype)
    batch, down, across = dense.shape[0], rows // block, cols // block
    tiles = dense.reshape(batch, heads, down, block, across, block)
    blocks = tiles.transpose(3, 4).reshape(batch, heads * down * across, block, block)
    return blocks.index_select(1, _block_places(layout, shape))


_COPYING = threading.Lock()


class Layout(nn.Module):
    """A block-sparse layout for PyTorch: made once, moved by ``to``, read by every op of its matrices.

    Functions and modules take operands on any device: the layout keeps a copy of its tables there.

    Parameters
    ----------
    layout : BlockSparseLayout, Tensor or array
        The layout, or its bitmap of 0 and 1 on any device: [heads, rows/block, cols/block], or
        [rows/block, cols/block] for one head.
    block : int, optional
        16, 32, 64 or 128. A BlockSparseLayout needs none.
    persistent : bool
        Whether the bitmap is in the state_dict.
    device : optional
        Device of the tables.

    A state_dict has the bool tensor ``bitmap``. Loading another mask replaces the layout's; it must keep as
    many blocks.

    Raises InvalidProblemError naming the argument.
    """

    sizes: tuple[int, ...]
    """Heads, rows, cols, block and blocks: the argument ``shape`` of the ops."""
    panels: tuple[int, int]
    """The longest row panel and column panel, of which a product's is its descriptor's ``longest_panel``:
    the argument ``panels`` of the op. Zeros where the GPU may have another mask than the host knows."""
    is_behind: bool
    """Whether the GPU may have another mask than the host knows: after ``update_on_device``, and for good
    once a CUDA graph has captured it, since the host sees no replay."""
    bitmap: Tensor
    """Bool [heads, rows/block, cols/block]. Change the layout with :meth:`update`, not here."""
    tables: Tensor
    """The look-up tables of BlockSparseTables in one int32 tensor: the argument ``layout`` of the ops."""

    def __init__(
        self, layout: Any, block: int | None = None, *, persistent: bool = True, device: Any = None
    ) -> None:
        super().__init__()
        device_of(device)
        self._is_captured = False
        self._take(_layout_of(layout, block))
        self.sizes = numbers_of(self._layout.shape)
        with torch.inference_mode(False):  # training may follow a first call in that mode
            bitmap, tables = (one.to(device) for one in _tensors(self._layout))
        self.register_buffer("bitmap", bitmap, persistent=persistent)
        self.register_buffer("tables", tables, persistent=False)
        self._copies: dict[torch.device, Tensor] = {}

    @property
    def shape(self) -> BlockSparseShape:
        """Heads, rows, cols, block and blocks."""
        return shape_of(self.sizes)

    @property
    def layout(self) -> BlockSparseLayout:
        """The layout that says which blocks are kept. Waits for the device after ``update_on_device``.

        Raises InvalidProblemError if that bitmap keeps another number of blocks.
        """
        if self.is_behind:
            found = BlockSparseLayout(self.bitmap, self.shape.block)
            if found.shape != self.shape:
                raise InvalidProblemError(f"bitmap: expected {self.shape!r}, got {found.shape!r}")
            self._take(found)
        return self._layout

    def _take(self, layout: BlockSparseLayout) -> None:
        self._layout, self.is_behind = layout, self._is_captured
        self.panels = (0, 0)
        if not self.is_behind:
            rows, columns = (longest_panel(layout, by_columns=one) for one in (False, True))
            self.panels = rows, columns

    def tables_on(self, device: Any) -> Tensor:
        """The look-up tables on a device: ``tables`` itself, or a copy that follows every ``update``.

        A copy is made at the first call and kept until the layout moves. Threads may share the layout. Raises
        UnsupportedError while a CUDA graph is captured, whose replays would copy again: call it before, as
        before ``torch.compile(fullgraph=True)``.
        """
        place = device if type(device) is torch.device else device_of(device)
        found = self.tables if place == self.tables.device else self._copies.get(place)
        if found is None:
            found = untraced(lambda: self._copy_on(place))
        return found

    def _copy_on(self, place: torch.device) -> Tensor:
        if place.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"layout: expected tables on {place} before a CUDA graph is captured, got those on "
                f"{self.tables.device}; call layout.tables_on({str(place)!r}) before"
            )
        with _COPYING, torch.inference_mode(False):
            found = self._copies.get(place)
            if found is None:
                found = _tensors(self.layout)[1].to(place)
                if place.type == "cuda":  # other streams may read it
                    torch.cuda.current_stream(place).synchronize()
                self._copies[place] = found
        return found

    def update(self, layout: Any) -> None:
        """Take another mask of the same shape, the number of kept blocks included, in place.

        The tables stay where they are, so a captured CUDA graph reads the new mask from then on. Raises
        InvalidProblemError for another shape, before anything is written.
        """
        untraced(lambda: self._update(layout))

    def _update(self, layout: Any) -> None:
        other = _layout_of(layout, self.shape.block)
        if other.shape != self.shape:
            raise InvalidProblemError(f"layout: expected {self.shape!r}, got {other.shape!r}")
        self._take(other)
        self._fill()

    def update_on_device(self, bitmap: Tensor) -> None:
        """Take the mask in a bool ``bitmap`` on the tables' GPU, in place and without waiting for it.

        For masks that are made on a GPU, with blocks of 64 or 128. The bitmap [heads, rows/block, cols/block]
        must keep as many blocks as the layout: with another number none is kept, and ``layout`` raises. After
        the first call of a shape, which compiles, a CUDA graph may capture it.

        Raises InvalidProblemError naming the argument; UnsupportedError for other blocks, tables on the CPU
        and layouts that are too large: call ``update``.
        """
        place = self.tables.device
        if place.type != "cuda":
            raise UnsupportedError(f"layout: expected tables on a GPU, got those on {place}; call update")
        given = tuple(getattr(bitmap, name, None) for name in ("dtype", "device"))
        if given != (torch.bool, place) or bitmap.shape != self.bitmap.shape:
            raise InvalidProblemError(
                f"bitmap: expected torch.bool {list(self.bitmap.shape)} on {place}, got {shown(bitmap)}"
            )
        kernel = table_kernel(self.shape, cuda_properties(place.index))
        with torch.no_grad(), torch.cuda.device(place):
            self.bitmap.copy_(bitmap)
            self._is_captured |= torch.cuda.is_current_stream_capturing()
            self.is_behind, self.panels = True, (0, 0)
            kernel.bind(self.bitmap.data_ptr(), self.tables.data_ptr())(current_stream(place.index))
            # PyTorch does not see the kernel write: a backward pass must refuse tables of another mask.
            torch.autograd.graph.increment_version(self.tables)
            for copy in self._copies.values():
                copy.copy_(self.tables)

    def _fill(self) -> None:
        """Write the layout into the tensors, unless they are on the meta device."""
        bitmap, tables = _tensors(self._layout)
        with torch.no_grad(), _COPYING:
            for copy in self._copies.values():
                copy.copy_(tables)
            if not self.tables.is_meta:
                self.bitmap.copy_(bitmap)
                self.tables.copy_(tables)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Layout:
        before, _ = self.tables, self.layout
        super()._apply(fn, recurse)
        if self.tables is not before:
            self._copies = {}
            self._fill()  # to_empty leaves the memory uninitialised
        return self

    def __getstate__(self) -> dict[str, Any]:
        """The state without copies of the tables, which a copied layout makes for itself."""
        return {**self.__dict__, "_copies": {}}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *about: Any) -> None:
        given, error_msgs = state_dict.get(f"{prefix}bitmap"), about[-1]
        errors = len(error_msgs)
        found: BlockSparseLayout | None = None
        expected = "bitmap" not in self._non_persistent_buffers_set
        if expected and isinstance(given, Tensor) and not given.is_meta:
            try:
                found = BlockSparseLayout(given, self.shape.block)
                if found.shape != self.shape:
                    raise InvalidProblemError(f"expected {self.shape!r}, got {found.shape!r}")
            except Sparse24Error as error:
                error_msgs.append(f"{prefix}bitmap: {error}")
                return
            # The bitmap may come as integers, or without the dimension of heads.
            own = torch.from_numpy(found.bitmap.copy()).to(given.device)
            state_dict = {**state_dict, f"{prefix}bitmap": own}
        super()._load_from_state_dict(state_dict, prefix, *about)
        if found is not None and len(error_msgs) == errors:
            self._take(found)
            if self.tables.is_meta:  # the bitmap was assigned; without tables the layout could not move
                place = self.bitmap.device
                self.tables = self._copies.pop(place, torch.empty_like(self.tables, device=place))
            self._fill()

    # Conversions ------------------------------------------------------------------------------------

    def to_dense(self, values: Tensor) -> Tensor:
        """``values`` [Z, blocks, block, block] as [Z, heads, rows, cols], zero elsewhere; differentiable.

        Raises InvalidProblemError for other sizes.
        """
        return to_dense(values, self.tables_on(values.device), self.sizes)

    def kept_blocks(self, dense: Tensor) -> Tensor:
        """The values [Z, blocks, block, block] of ``dense`` [Z, heads, rows, cols]; all else is dropped.

        Differentiable. Raises InvalidProblemError for other sizes.
        """
        return kept_blocks(dense, self.tables_on(dense.device), self.sizes)

    def values_of(self, dense: Tensor) -> Tensor:
        """The values of a matrix that is zero outside of the kept blocks. Waits for the device.

        Raises FormatError, naming the first block with other cells.
        """
        values = self.kept_blocks(dense)
        heads, rows, cols, block, _ = self.sizes
        cells = dense.detach()
        cells = cells.float() if cells.element_size() == 1 else cells  # PyTorch doesn't compare fp8
        others = (cells != 0).view(torch.uint8)
        tiles = others.reshape(len(cells), heads, rows // block, block, cols // block, block)
        lost = (tiles.sum((0, 3, 5)) > 0) & ~self.bitmap.to(cells.device)
        if bool(lost.any()):
            head, row, column = lost.nonzero()[0].tolist()
            raise FormatError(
                "dense: expected zeros outside of the kept blocks, got others in "
                f"block ({row}, {column}) of head {head}"
            )
        return values

    @classmethod
    def from_torch_bsr(cls, tensor: Tensor, **options: Any) -> tuple[Layout, Tensor]:
        """Layout and values of a ``torch.sparse_bsr`` tensor [rows, cols] or [heads, rows, cols].

        The values [1, blocks, block, block] share the tensor's memory. The layout's tables are made on its
        device. ``options`` go to the constructor. Raises InvalidProblemError.
        """
        found, values = BlockSparseLayout.from_torch_bsr(tensor)
        return cls(found, **{"device": values.device, **options}), values

    def to_torch_bsr(self, values: Tensor) -> Tensor:
        """``values`` [blocks, block, block], or [1, ...] of it, as a ``torch.sparse_bsr`` tensor.

        The result is [rows, cols] for one head, else [heads, rows, cols]. PyTorch wants the same number of
        blocks in every head. Raises InvalidProblemError if the numbers differ, and for other sizes.
        """
        one, size = self.shape, tuple(values.shape)
        blocks = (one.blocks, one.block, one.block)
        if size not in (blocks, (1, *blocks)):
            raise InvalidProblemError(f"values: expected {list(blocks)}, or one such batch, got {list(size)}")
        crow, col = self.layout.to_bsr()
        counts = {int(row[-1]) for row in crow}
        if len(counts) > 1:
            raise InvalidProblemError(
                f"layout: expected as many blocks in every head, as BSR has, got {sorted(counts)}"
            )
        pointers, columns = (torch.from_numpy(part).to(values.device) for part in (crow, col))
        sides: tuple[int, ...] = one.rows, one.cols
        cells = values.reshape(blocks)
        if one.heads == 1:
            pointers = pointers[0]
        else:
            each = one.blocks // max(one.heads, 1)
            columns = columns.view(one.heads, each)
            cells, sides = cells.view(one.heads, each, one.block, one.block), (one.heads, *sides)
        # A layout holds the invariants that PyTorch would check.
        return torch.sparse_bsr_tensor(pointers, columns, cells, sides, check_invariants=False)

    def extra_repr(self) -> str:
        return repr(self.layout)


def _layout_of(given: Any, block: int | None) -> BlockSparseLayout:
    if isinstance(given, Layout):
        given = given.layout
    if not isinstance(given, BlockSparseLayout):
        if block is None:
            raise InvalidProblemError("block: expected 16, 32, 64 or 128 beside a bitmap, got None")
        return BlockSparseLayout(given, block)
    if block not in (None, given.shape.block):
        raise InvalidProblemError(f"block: expected {given.shape.block}, as the layout's, got {block!r}")
    return given


def layout_of(given: Any, block: int | None, device: Any = None) -> Layout:
    """``given`` itself if it is a Layout, which modules may share; else a Layout made from it."""
    if isinstance(given, Layout):
        device_of(device)
        _layout_of(given, block)
        return given
    return Layout(given, block, device=device)


def untraced(call: Callable[[], Any]) -> Any:
    """The result of a call that works with NumPy on layouts, which torch.compile would fail to trace."""
    dynamo = sys.modules.get("torch._dynamo")  # importing it takes seconds
    return call() if dynamo is None else dynamo.disable(call)()


def _tensors(layout: BlockSparseLayout) -> tuple[Tensor, Tensor]:
    tables = BlockSparseTables(layout).view.array().copy()
    return torch.from_numpy(layout.bitmap.copy()), torch.from_numpy(tables)
