"""Launches cuSPARSELt with a reused plan: weights in the library's blob, an algorithm pinned at select.

Row-major Y[N,M] is the column-major D[M,N] of the library, so W is its operand A and X, transposed, its B. A
``column`` order of X or Y is the other order of the same matrix. Each pair of strides has its own plan.
Batches are launched one after the other. Stacked weights are packed as a blob for each batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ..._vendor import cusparselt_abi as abi
from ..._vendor.library_error import LibraryError
from ...device.install import import_cupy, install_advice
from ...device.jit.launcher import is_sizing
from ...device.streams import Launch, driver_error
from ...device.tensors import TensorView
from ...errors import BackendUnavailableError, UnsupportedError
from ...plan.kernel import Choice, align_up, launch_in_order
from ...plan.operands import Alignment, Views, leading_dimension
from ...vocab import DeviceProperties, ElementKind, EpilogueKind, MatrixOrder, ScaleKind
from ...vocab.fields import INT32_MAX
from ...weights import canonical
from ...weights.weight import CanonicalWeight, PackedWeight, Sparse24Weight
from ..descriptor import GemmSparse24Descriptor
from ..groups import batches_of, lines_of
from ..kernel import MAX_STRIDES, GemmKernel

_TYPES = {
    ElementKind.F32: abi.R_32F,
    ElementKind.F16: abi.R_16F,
    ElementKind.BF16: abi.R_16BF,
    ElementKind.S8: abi.R_8I,
    ElementKind.I32: abi.R_32I,
    ElementKind.FP8_E4M3: abi.R_8F_E4M3,
}
_ACTIVATIONS = {EpilogueKind.RELU: abi.RELU, EpilogueKind.GELU_TANH: abi.GELU}
# Keys of a configuration -> cusparseLtMatmulAlgAttribute_t
_ATTRIBUTES = {
    "algorithm": abi.CONFIG_ID,
    "split_k": abi.SPLIT_K,
    "split_k_mode": abi.SPLIT_K_MODE,
    "split_k_buffers": abi.SPLIT_K_BUFFERS,
}
# Pairs of split-K and mode (one kernel, two kernels) to try. The library lets one choose except on Hopper.
_SPLITS = tuple((split, mode) for split in (2, 4, 8) for mode in (1, 2))
# Algorithms that end the CUDA context with an illegal instruction for every n, as measured on an H200. The
# key is (version, compute capability, element). A search would survive them, but each would cost it a
# process.
_FATAL = {("0.8.0", (9, 0), ElementKind.F16): range(36, 52)}
# A plan with a bias is made before the bias's address is known; any address selects the fused kernels.
_SOME_ADDRESS = 256
_ON = 1


class Kernel(GemmKernel):
    workspace_alignment = 256
    alignments = {  # noqa: RUF012
        "weight": Alignment(abi.ALIGNMENT),
        "source": Alignment(abi.ALIGNMENT, abi.ALIGNMENT),
        "result": Alignment(abi.ALIGNMENT, abi.ALIGNMENT),
    }
    launches = 2  # the library enqueues at least one kernel; 2 makes bind record a graph
    tunable = True

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device, self._configuration = self.descriptor, choice.device, choice.configuration
        self._ordinal, self._version = device.ordinal, device.cusparselt
        self._blob_bytes, batches = 0, ""
        if desc.is_batched:
            aligned = Alignment(abi.ALIGNMENT, abi.ALIGNMENT)
            self.alignments = {**self.alignments, "bias": aligned, "scale_w": aligned}
            self.launches *= desc.batch_count
            batches = f"{desc.batch_count} batches one after the other: "
        for name, number in self._configuration.items():
            # The library's attributes are C ints, and ctypes would cut off the rest of a larger number.
            if name not in _ATTRIBUTES or not 0 <= number <= INT32_MAX:
                raise UnsupportedError(f"configuration: {self.entry.name} has no {name} {number}")
        allowed = choice.preference.max_workspace_bytes
        if is_sizing():
            if allowed is None:
                raise UnsupportedError(
                    "cuSPARSELt: tells its workspace on the GPU alone; max_workspace_bytes bounds it"
                )
            self.workspace_size, self.workspace_is_exact = allowed, False
            return
        self._matmul = lru_cache(MAX_STRIDES)(self._make_matmul)
        packed = self._matmul(*_packed_strides(desc))
        self.workspace_size = packed.workspace_size
        if allowed is not None and self.workspace_size > allowed:
            raise UnsupportedError(
                f"{self.entry.name}: needs a workspace of {self.workspace_size} bytes, "
                f"max_workspace_bytes is {allowed}"
            )
        origin = "tuned" if self._configuration else "the library's default"
        self.details = f"{batches}cuSPARSELt {device.cusparselt}, {_describe(packed)} ({origin})"
        if desc.is_batched:
            with import_cupy().cuda.Device(self._ordinal):
                self._blob_bytes = align_up(_compressor(self._ordinal, desc.m, desc.k, desc.element).size)

    def launcher(self, views: Views, workspace: int) -> Launch:
        batches = batches_of(self.descriptor, views, self._blob_bytes)
        return launch_in_order(*(self._launch(batch, workspace) for batch in batches))

    def _launch(self, views: Views, workspace: int) -> Launch:
        """The launch of one batch."""
        desc = self.descriptor
        strides = (
            leading_dimension(views["source"], desc.x_order),
            leading_dimension(views["result"], desc.y_order),
        )
        matmul = self._matmul(*strides)
        if matmul.workspace_size > self.workspace_size:
            raise UnsupportedError(
                f"cuSPARSELt needs {matmul.workspace_size} bytes of workspace for strides {strides}; "
                f"the plan has {self.workspace_size}"
            )
        return matmul.bind(
            views["packed"].address,
            views["source"].address,
            views["result"].address,
            workspace,
            alpha=views["scale_w"].address if "scale_w" in views else None,
            bias=views["bias"].address if "bias" in views else None,
        )

    def pack(self, weight: CanonicalWeight) -> PackedWeight:
        """Compress ``weight`` to the library's blob, uint8, on CuPy's current stream.

        Stacked weights of batches become a blob each. A dense matrix and the library's scratch memory are
        allocated meanwhile.
        """
        assert isinstance(weight, Sparse24Weight)  # the kernel serves no quantized weights
        cupy = import_cupy()
        with cupy.cuda.Device(self._ordinal):
            if not _values_come_first(self._ordinal, weight.element):
                raise UnsupportedError(
                    f"weight: cuSPARSELt {self._version} stores {weight.element} in a way that this package "
                    "doesn't know"
                )
            blob = self._blobs(weight) if weight.m > self.descriptor.m else _compress(self._ordinal, weight)
        layout = self.entry.layout_of(self.descriptor)
        return PackedWeight(layout, weight.m, weight.k, weight.element, weight.device, (TensorView.of(blob),))

    def _blobs(self, weight: Sparse24Weight) -> Any:
        """The blobs of the batches' weights, ``_blob_bytes`` apart."""
        m = self.descriptor.m
        found = import_cupy().zeros((weight.m // m, self._blob_bytes), np.uint8)
        for batch in range(len(found)):
            rows = slice(batch * m, (batch + 1) * m)
            values, metadata = (lines_of(view, rows) for view in weight.views)
            blob = _compress(self._ordinal, Sparse24Weight(values, metadata, validate=False))
            found[batch, : blob.size] = blob
        return found

    def _make_matmul(self, source_stride: int, result_stride: int) -> abi.Matmul:
        """The library's plan for these strides, made at select for contiguous operands, else at first use."""
        return _make(self.descriptor, self._ordinal, self._configuration, source_stride, result_stride)

    @classmethod
    def candidates(cls, descriptor: GemmSparse24Descriptor, device: DeviceProperties) -> list[dict[str, int]]:
        """Every algorithm id that is not known to be fatal, with each split-K that the library accepts.

        Nothing is launched.
        """
        strides = _packed_strides(descriptor)
        count = _make(descriptor, device.ordinal, {}, *strides).algorithm(abi.CONFIG_MAX_ID)
        fatal = _FATAL.get((device.cusparselt or "", device.compute_capability, descriptor.element), ())
        ids = [number for number in range(count) if number not in fatal]
        found = [{"algorithm": number} for number in ids]
        for split, mode in _SPLITS:
            setting = {"split_k": split, "split_k_mode": mode}
            try:
                _make(descriptor, device.ordinal, setting, *strides)
            except UnsupportedError:
                continue
            found += [{"algorithm": number, **setting} for number in ids]
        return found

    @classmethod
    def tuning_version(cls, device: DeviceProperties) -> str:
        return f"cuSPARSELt {device.cusparselt}"


# The library's plan -------------------------------------------------------------------------------


def _packed_strides(desc: GemmSparse24Descriptor) -> tuple[int, int]:
    columns = MatrixOrder.COLUMN
    source = desc.n if desc.x_order is columns else desc.k
    result = desc.n if desc.y_order is columns else desc.m
    return source, result


def _make(
    desc: GemmSparse24Descriptor,
    ordinal: int,
    configuration: Mapping[str, int],
    source_stride: int,
    result_stride: int,
) -> abi.Matmul:
    element, out = _TYPES[desc.element], _TYPES[desc.out_element]
    x_order = abi.ORDER_COL if desc.x_order is MatrixOrder.COLUMN else abi.ORDER_ROW
    d_order = abi.ORDER_ROW if desc.y_order is MatrixOrder.COLUMN else abi.ORDER_COL
    attributes: dict[int, Any] = {}
    if desc.epilogue.has_bias:
        attributes[abi.BIAS_POINTER] = ctypes.c_void_p(_SOME_ADDRESS)
    if desc.epilogue.activation in _ACTIVATIONS:
        attributes[_ACTIVATIONS[desc.epilogue.activation]] = ctypes.c_int(_ON)
    scaled = desc.scale_w is ScaleKind.ROW
    if scaled:
        attributes[abi.ALPHA_VECTOR] = ctypes.c_int(_ON)
    d = abi.Operand(desc.m, desc.n, result_stride, out, d_order)
    try:
        with import_cupy().cuda.Device(ordinal):
            return abi.Matmul(
                abi.handle(ordinal),
                abi.Operand(desc.m, desc.k, desc.k, element, abi.ORDER_ROW, sparse=True),
                abi.Operand(desc.n, desc.k, source_stride, element, x_order, transpose=True),
                d,
                d,
                compute=abi.COMPUTE_32I if desc.element is ElementKind.S8 else abi.COMPUTE_32F,
                alpha=None if scaled else desc.alpha,
                attributes=attributes,
                algorithm={_ATTRIBUTES[name]: number for name, number in configuration.items()},
            )
    except LibraryError as error:
        if error.status == abi.ARCH_MISMATCH:
            raise BackendUnavailableError(
                f"this cuSPARSELt has no kernels for the GPU; {install_advice('cusparselt')}"
            ) from error
        raise UnsupportedError(
            f"cuSPARSELt refuses strides {source_stride}, {result_stride} or configuration "
            f"{dict(configuration)}: {error}"
        ) from error


def _describe(matmul: abi.Matmul) -> str:
    number, count = matmul.algorithm(abi.CONFIG_ID), matmul.algorithm(abi.CONFIG_MAX_ID)
    split = matmul.algorithm(abi.SPLIT_K)
    return f"algorithm {number} of {count}" + (f", split-K {split}" if split > 1 else "")


# Packing ------------------------------------------------------------------------------------------


def _compress(ordinal: int, weight: Sparse24Weight) -> Any:
    """The blob, with exactly the positions and bits of the canonical weight.

    The library chooses positions by searching for non-zeros, so it could move a kept zero, and its treatment
    of -0.0 differs between versions. Therefore it is given ones at the kept positions to compress. The values
    then overwrite the ones at the beginning of the blob, row by row (_values_come_first checks that).
    """
    values, metadata = weight.values_view.bits(), weight.metadata
    codes = canonical.from_metadata(metadata)
    blob = _compress_dense(ordinal, canonical.scatter(_ones_like(values, weight.element), codes), weight)
    flat = values.reshape(-1).view(np.uint8)
    blob[: flat.size] = flat
    return blob


def _ones_like(values: Any, element: ElementKind) -> Any:
    one = np.ones(1, np.float32).astype(element.dtype).view(element.bits_dtype)[0]
    return import_cupy().full(values.shape, one, values.dtype)


def _compressor(ordinal: int, m: int, k: int, element: ElementKind) -> abi.Compressor:
    """The library's compressor of weights [m, k]. Needs the device current."""
    matrix = abi.Operand(m, k, k, _TYPES[element], abi.ORDER_ROW, sparse=True)
    try:
        return abi.Compressor(abi.handle(ordinal), matrix, first_operand=True)
    except LibraryError as error:
        raise driver_error(error) from error


def _compress_dense(ordinal: int, dense: Any, weight: Sparse24Weight) -> Any:
    cupy = import_cupy()
    compressor = _compressor(ordinal, weight.m, weight.k, weight.element)
    blob = cupy.zeros(compressor.size, np.uint8)
    scratch = cupy.empty(max(compressor.scratch, 1), np.uint8)
    stream = cupy.cuda.get_current_stream().ptr
    try:
        compressor.compress(dense.data.ptr, blob.data.ptr, scratch.data.ptr, stream)
    except LibraryError as error:
        raise driver_error(error) from error
    return blob


@cache
def _values_come_first(ordinal: int, element: ElementKind) -> bool:
    """Return whether blobs begin with the values, row by row. A small weight without zeros shows it."""
    rng = np.random.default_rng(0)
    dense = rng.integers(1, 9, (64, 128)).astype(np.float32).astype(element.dtype)
    weight = Sparse24Weight.prune_compress(dense).to(ordinal)
    codes = canonical.from_metadata(weight.metadata)
    own = _compress_dense(ordinal, canonical.scatter(weight.values_view.bits(), codes), weight)
    return bool((own == _compress(ordinal, weight)).all())
