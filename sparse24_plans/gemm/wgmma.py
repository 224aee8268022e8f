"""What the host hands ``gemm/wgmma_sp.cu``, whichever backend launches it: its parameters and macros."""

from __future__ import annotations

import ctypes

from .._vendor import cuda_driver_abi
from ..device.jit.codes import type_defines
from ..vocab import ElementKind, ScaleKind
from .descriptor import GemmSparse24Descriptor
from .schedules.wgmma_sp import Lines, Schedule

SOURCE = "gemm/wgmma_sp.cu"


class Parameters(ctypes.Structure):
    """WgmmaSpParams of the kernel."""

    _fields_ = [
        ("x_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("x_tail_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("x_rest_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("x_tail_rest_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("y_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("x", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scale_x", ctypes.c_void_p),
        ("scale_w", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("flags", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("mark", ctypes.c_uint64),
        ("n", ctypes.c_int64),
        ("m", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("row_tiles", ctypes.c_int64),
        ("k_tiles", ctypes.c_int64),
        ("alpha", ctypes.c_float),
        ("token_blocks", ctypes.c_uint32),
        ("items", ctypes.c_uint32),
        ("aligned", ctypes.c_uint32),
        ("tail_rows", ctypes.c_uint32),
        ("whole", ctypes.c_uint32),
        ("range", ctypes.c_uint32),
        ("longer", ctypes.c_uint32),
        ("padding", ctypes.c_char * 32),  # a tensor map's alignment is the struct's
    ]


_SCALE_CODES = {ScaleKind.NONE: 0, ScaleKind.TENSOR: 1, ScaleKind.ROW: 2}


def defines(
    desc: GemmSparse24Descriptor,
    schedule: Schedule,
    promote: bool,
    parts: int = 0,
    *,
    after_pass: bool = False,
) -> dict[str, int]:
    """Macros of the kernel for one problem type and schedule. ``parts``: of every float32; ``after_pass``:
    whether the launch before it writes the X that it reads, and nothing else that it does.
    """
    lines = Lines.of(desc)
    weight_stages, source_stages = schedule.stages(lines, parts)
    return {
        **type_defines(desc),
        "WARPGROUPS": schedule.warpgroups,
        "ROW_BLOCKS": schedule.row_blocks,
        "TOKENS": schedule.tokens,
        "SHARE": schedule.share,
        "SLICES": schedule.slices,
        "PARTS": schedule.parts,
        "RANGES": int(schedule.ranges > 0),
        "X_PARTS": parts,
        "PROMOTE": int(promote),
        "RAW": int(desc.out_element is ElementKind.I32 and desc.is_plain),
        "SCALE_X": _SCALE_CODES[desc.scale_x],
        "SCALE_W": _SCALE_CODES[desc.scale_w],
        "BLOCKS_PER_SM": schedule.blocks_per_sm,
        "WEIGHT_STAGES": weight_stages,
        "SOURCE_STAGES": source_stages,
        "STEP_TOKENS": schedule.step_tokens(lines.out_bytes),
        "AFTER_PASS": int(after_pass),
        "X_COLUMNS": int(lines.x_columns),
        "X_BY_THREADS": int(lines.x_columns and schedule.copied_by_threads(desc.n)),
        "Y_COLUMNS": int(lines.y_columns),
    }
