"""Launches ``blocksparse/blocks_wgmma.cu``: kept blocks and the rows that they meet, multiplied by wgmma."""

from __future__ import annotations

import ctypes

from ..._vendor import cuda_driver_abi
from ..._vendor.library_error import LibraryError
from ...device.jit.codes import type_defines
from ...device.jit.launcher import load
from ...device.streams import Launch, driver_error
from ...device.tensors import TensorView
from ...plan.kernel import Choice, nothing
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Alignment, Views
from ...vocab import BlockSparseOp
from ..descriptor import BlockSparseMatmulDescriptor
from ..schedule import Schedule, best_schedule
from ..tables import addresses, groups, head_strips, words

_SOURCE = "blocksparse/blocks_wgmma.cu"
_K_MAJOR, _MN_MAJOR = 0, 1
_STEP, _LINE_BYTES = 64, 128
"""Columns of a step, and rows or tokens of a box that isn't K-major; bytes of a line of a box."""


class _Parameters(ctypes.Structure):
    """BlocksWgmmaParams of the kernel."""

    _fields_ = [
        ("left_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("right_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("out_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("order", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("pointers", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("blocks", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("strips", ctypes.c_uint32),
        ("head_strips", ctypes.c_uint32),
        ("head_lines", ctypes.c_uint32),
        ("words", ctypes.c_uint32),
        ("heads", ctypes.c_uint32),
        ("batch", ctypes.c_uint32),
        ("tokens", ctypes.c_uint32),
        ("token_clusters", ctypes.c_uint32),
        ("band", ctypes.c_uint32),
        ("groups", ctypes.c_uint32),
        ("steps", ctypes.c_uint32),
        ("padding", ctypes.c_char * 20),  # a tensor map's alignment is the struct's
    ]


class _Form:
    """How the operands of a product lie, in the kernel's terms: op(S) times X, of ``dds`` its transpose.

    Of ``sdd`` the left operand is op(A) and the right one op(B).
    """

    def __init__(self, desc: BlockSparseMatmulDescriptor) -> None:
        op, one = desc.op, desc.layout
        self.sampled, on_the_right = op is BlockSparseOp.SDD, op is BlockSparseOp.DDS
        self.left, self.right = ("b", "a") if on_the_right else ("a", "b")
        self.turned = desc.trans_sparse != on_the_right
        """Whether the sparse matrix enters transposed: its columns of blocks are the kernel's lines."""
        lines, across = (one.block_cols, one.block_rows) if self.turned else (one.block_rows, one.block_cols)
        self.head_lines, self.words = lines, words(across)
        self.head_strips = head_strips(lines * one.block)
        self.strips = one.heads * self.head_strips
        left_turned = desc.trans_a if self.sampled else self.turned
        self.left_major = _MN_MAJOR if left_turned else _K_MAJOR
        self.right_major = _K_MAJOR if desc.dense_k_last else _MN_MAJOR
        self.tokens_contiguous = not on_the_right

    def tables(self, start: int, desc: BlockSparseMatmulDescriptor) -> dict[str, int | None]:
        """The kernel's parameters that are tables, of those at ``start``."""
        found = addresses(start, desc.layout)
        if self.sampled:
            names = {"order": "group_rows", "counts": "group_firsts", "pointers": "row_pointers"}
            names["columns"] = "columns"
        elif self.turned:
            names = {"order": "column_strips", "counts": "column_strip_rows", "kept": "column_bits"}
            names |= {"pointers": "column_pointers", "places": "column_order"}
        else:
            names = {"order": "row_strips", "counts": "row_strip_columns", "kept": "row_bits"}
            names["pointers"] = "row_pointers"
        return {field: found[name] for field, name in names.items()}


class Kernel(BaseKernel[BlockSparseMatmulDescriptor]):
    default_alignment = Alignment(16)
    sources = (_SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        self._form = form = _Form(desc)
        self._schedule = schedule = best_schedule(desc, device.multiprocessors)
        items = schedule.items(desc)
        self._blocks = min(items, schedule.resident_clusters(device.multiprocessors)) * schedule.share
        self.details = (
            f"{items * schedule.share} tiles of {schedule.rows} rows x {schedule.tokens} tokens on "
            f"{self._blocks} blocks, clusters of {schedule.share}, {schedule.stages} stages"
        )
        self._function = load(
            _SOURCE,
            "blocks_wgmma",
            schedule.threads,
            device,
            defines(desc, schedule),
            _Parameters,
            shared_bytes=schedule.shared_bytes(),
        )
        self._parameters = _Parameters(
            blocks=desc.layout.blocks,
            alpha=desc.alpha,
            strips=form.strips,
            head_strips=form.head_strips,
            head_lines=form.head_lines,
            words=form.words,
            heads=desc.layout.heads,
            batch=desc.batch,
            tokens=desc.n,
            token_clusters=schedule.token_clusters(desc),
            band=schedule.band(desc),
            groups=groups(desc.layout),
            steps=-(-desc.n // _STEP),
        )

    def launcher(self, views: Views, workspace: int) -> Launch:
        desc, form = self.descriptor, self._form
        if self._blocks == 0:
            return nothing
        parameters = _Parameters.from_buffer_copy(self._parameters)
        for field, at in form.tables(views["layout"].address, desc).items():
            setattr(parameters, field, at)
        try:
            maps = self._maps(views)
        except LibraryError as error:
            raise driver_error(error) from error
        ctypes.memmove(ctypes.addressof(parameters), maps, len(maps))  # the maps come first
        if "bias" in views:
            parameters.bias = views["bias"].address
        return self._function.bind(self._blocks, parameters, overlapping=True)

    def _maps(self, views: Views) -> bytes:
        """Of the left and the right operand and the result."""
        desc, form, one = self.descriptor, self._form, self._schedule
        found = bytes(2 * cuda_driver_abi.TENSOR_MAP_BYTES)
        if desc.layout.blocks and desc.reduction:  # else nothing is read
            block = desc.layout.block
            if form.sampled:
                found = _dense_map(views["a"], form.left_major, block)
                found += _dense_map(views["b"], form.right_major, min(block, one.tokens))
            else:
                step = min(block, _STEP)
                lines = block if form.left_major == _K_MAJOR else step
                found = _values_map(views[form.left], (lines // one.share, step))
                found += _dense_map(views[form.right], form.right_major, one.tokens, step)
        out = views["c"]
        wide = _LINE_BYTES // out.element.itemsize  # the kernel's staging area has 64 lines of 128 bytes
        if form.sampled:
            return found + _values_map(out, (_STEP, wide))
        box = (_STEP if form.tokens_contiguous else wide), wide
        return found + cuda_driver_abi.swizzled_matrices_map(
            out.address, _matrices(out.shape), out.element.itemsize, box
        )


def _dense_map(view: TensorView, major: int, lines: int, step: int = _STEP) -> bytes:
    """Boxes of ``step`` k of some rows or tokens."""
    box = (lines, step) if major == _K_MAJOR else (step, _STEP)
    return cuda_driver_abi.swizzled_matrices_map(
        view.address, _matrices(view.shape), view.element.itemsize, box
    )


def _values_map(view: TensorView, box: tuple[int, int]) -> bytes:
    batch, blocks, rows, columns = view.shape
    size = view.element.itemsize
    return cuda_driver_abi.swizzled_matrix_map(
        view.address, (batch * blocks * rows, columns), columns * size, size, box
    )


def _matrices(shape: tuple[int, ...]) -> tuple[int, int, int]:
    batch, heads, rows, columns = shape
    return batch * heads, rows, columns


def defines(desc: BlockSparseMatmulDescriptor, schedule: Schedule) -> dict[str, int]:
    """Macros of the kernel for one problem type and schedule."""
    form = _Form(desc)
    return {
        **type_defines(desc),
        "BLOCK": desc.layout.block,
        "TOKENS": schedule.tokens,
        "WARPGROUPS": schedule.warpgroups,
        "SHARE": schedule.share,
        "STAGES": schedule.stages,
        "BUFFERS": schedule.buffers,
        "SPARSE_MAJOR": form.left_major,
        "DENSE_MAJOR": form.right_major,
        "TOKENS_CONTIGUOUS": int(form.tokens_contiguous),
        "SAMPLED": int(form.sampled),
    }
