"""What the host hands ``blocksparse/blocks_wgmma.cu``, whichever backend launches it."""

from __future__ import annotations

import ctypes

from .._vendor import cuda_driver_abi
from ..device.jit.codes import type_defines
from ..device.tensors import TensorView
from ..vocab import BlockSparseOp
from .descriptor import BlockSparseMatmulDescriptor
from .schedule import Schedule
from .shape import BlockSparseShape
from .tables import addresses, head_strips, words

SOURCE = "blocksparse/blocks_wgmma.cu"
K_MAJOR, MN_MAJOR = 0, 1
STEP, LINE_BYTES = 64, 128
"""Columns of a step, and rows or tokens of a box that isn't K-major; bytes of a line of a box."""


PARAMETERS = [
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
]
"""Fields of BlocksWgmmaParams of the kernel, but for images."""


class Parameters(ctypes.Structure):
    """BlocksWgmmaParams of products."""

    _fields_ = [*PARAMETERS, ("padding", ctypes.c_char * 20)]  # a tensor map's alignment is the struct's


class Form:
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
        self.left_major = MN_MAJOR if left_turned else K_MAJOR
        self.right_major = K_MAJOR if desc.dense_k_last else MN_MAJOR
        self.tokens_contiguous = not on_the_right

    def tables(self, start: int, shape: BlockSparseShape) -> dict[str, int | None]:
        """The kernel's parameters that are tables, of those of such layouts at ``start``."""
        found = addresses(start, shape)
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


def dense_map(view: TensorView, major: int, lines: int, step: int = STEP) -> bytes:
    """Boxes of ``step`` k of some rows or tokens."""
    box = (lines, step) if major == K_MAJOR else (step, STEP)
    return cuda_driver_abi.swizzled_matrices_map(
        view.address, matrices(view.shape), view.element.itemsize, box
    )


def values_map(view: TensorView, box: tuple[int, int]) -> bytes:
    batch, blocks, rows, columns = view.shape
    size = view.element.itemsize
    return cuda_driver_abi.swizzled_matrix_map(
        view.address, (batch * blocks * rows, columns), columns * size, size, box
    )


def matrices(shape: tuple[int, ...]) -> tuple[int, int, int]:
    batch, heads, rows, columns = shape
    return batch * heads, rows, columns


def defines(desc: BlockSparseMatmulDescriptor, schedule: Schedule, images: int = 0) -> dict[str, int]:
    """Macros of the kernel for one problem type and schedule; ``images``: of a convolution 1 or 2."""
    form = Form(desc)
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
        "IMAGES": images,
    }
