"""Records of runs: a safetensors file with everything that is needed to replay a run elsewhere.

The metadata has ``sparse24_run`` = "1", ``descriptor`` (JSON), ``arithmetic``, and for people ``device``,
``kernel`` and ``version``. The tensors are the operands in row-major order, named like the arguments (``x``,
``y``, ``bias`` ...), and the canonical weight: ``weight.values24``, ``weight.meta24`` and, if W is quantized,
``weight.scales24``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .._version import __version__
from ..device.files import StrPath, path_of
from ..device.tensors import TensorView
from ..errors import FormatError, InvalidProblemError, Sparse24Error, UnsupportedError, check_type
from ..gemm.args import DgradSparse24Args, GemmSparse24Args
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.plan import GemmSparse24Plan
from ..gemm.replay import OnBlock, Replay, check_c_is_kept
from ..plan.operands import Operand, Role, reinterpretable
from ..vocab import CANONICAL_LAYOUT, ElementKind, GemmOp, MatrixOrder
from ..weights.packing import unpack
from ..weights.quantized_weight import Sparse24QuantizedWeight
from ..weights.weight import CanonicalWeight, PackedWeight, Sparse24Weight
from .folder import DTYPES
from .layers import FORMAT_KEY, FORMAT_VERSION, Layer, stored_tensors, write_note, write_weight
from .safetensors_file import SafetensorsReader, SafetensorsWriter, TensorInfo
from .weights_file import Weight, load_weight

RUN_KEY, RUN_VERSION = "sparse24_run", "1"
_WEIGHT = "weight"
_DTYPES = {**DTYPES, ElementKind.I32: "I32"}


@dataclass(frozen=True)
class RecordedRun:
    """A run that :func:`save_run` has written: ``descriptor`` and ``arithmetic`` of its plan, and operands.

    ``device`` and ``kernel`` say where and by which kernel it was computed; ``version`` is the package's.
    ``args`` lie in host memory and include the recorded result.
    """

    descriptor: GemmSparse24Descriptor
    arithmetic: str
    device: str
    kernel: str
    version: str
    args: GemmSparse24Args | DgradSparse24Args

    def replay(self, samples: Any = None, *, seed: int = 0, on_block: OnBlock | None = None) -> Replay:
        """Compute results again on the host and compare them, by :meth:`GemmSparse24Plan.replay`."""
        plan = _plan(self.descriptor, self.arithmetic)
        return plan.replay(self.args, samples, seed=seed, on_block=on_block)


def save_run(path: StrPath, plan: GemmSparse24Plan, args: GemmSparse24Args | DgradSparse24Args) -> None:
    """Write the arguments of a run of ``plan``, the result included, for :func:`load_run`.

    ``args`` may lie on a GPU that has finished the run: synchronise first. A packed weight is unpacked there
    into a copy.

    Raises UnsupportedError if the plan names no arithmetic; InvalidProblemError or MisalignedOperandError
    for wrong arguments; StorageError if the file can't be written.
    """
    path = path_of("path", path)
    check_type("plan", plan, GemmSparse24Plan, "GemmSparse24Plan")
    named, desc, kernel = plan.guarantee.arithmetic, plan.descriptor, str(plan.explain().chosen)
    if named is None:
        raise UnsupportedError(
            f"plan: expected a kernel that names its arithmetic, got {kernel}, which names none"
        )
    if (error := plan.can_implement(args).error) is not None:
        raise error
    check_c_is_kept(args)
    operands = [one for one in _tensors(desc) if getattr(args, one.argument) is not None]
    about = {"arithmetic": named, "device": plan.device.name, "kernel": kernel, "version": __version__}
    metadata = {
        FORMAT_KEY: FORMAT_VERSION,
        RUN_KEY: RUN_VERSION,
        "descriptor": desc.model_dump_json(),
        **about,
    }
    layer = Layer(_WEIGHT, desc.weight_rows, desc.k, desc.element, (), quantization=desc.quantization)
    write_note(metadata, layer)
    infos = [*stored_tensors(layer), *map(_info, operands)]
    with SafetensorsWriter(path, infos, metadata) as writer:
        write_weight(writer, _WEIGHT, _canonical(args.weight))
        for one in operands:
            writer.write(one.argument, _bits(getattr(args, one.argument), one))


def load_run(path: StrPath) -> RecordedRun:
    """Read a record that :func:`save_run` wrote. Raises StorageError; FormatError for any other file."""
    path = path_of("path", path)
    with SafetensorsReader(path) as reader:
        about = reader.metadata
        if about.get(RUN_KEY) != RUN_VERSION:
            found = about.get(RUN_KEY)
            raise FormatError(
                f"{path}: expected the record of a run, with {RUN_KEY} = {RUN_VERSION!r}, got {found!r:.80}"
            )
        for key in ("descriptor", "arithmetic", "device", "kernel", "version"):
            if key not in about:
                raise FormatError(f"{path}: expected the metadata {key}, got none")
        try:
            desc = GemmSparse24Descriptor.model_validate_json(about["descriptor"])
            _plan(desc, about["arithmetic"])
        except Sparse24Error as error:
            raise FormatError(f"{path}: {error}") from error
        given = {
            one.argument: _read(reader, one)
            for one in _tensors(desc)
            if not one.optional or one.argument in reader.tensors
        }
    kind = GemmSparse24Args if desc.op is GemmOp.FORWARD else DgradSparse24Args
    args = kind(weight=_weight(path, desc), **given)
    return RecordedRun(desc, about["arithmetic"], about["device"], about["kernel"], about["version"], args)


def _plan(desc: GemmSparse24Descriptor, arithmetic: str) -> GemmSparse24Plan:
    """The host's plan with this arithmetic."""
    return GemmSparse24Plan.select(desc, preference={"require": {"arithmetic": arithmetic}}, device="host")


def _tensors(desc: GemmSparse24Descriptor) -> list[Operand]:
    """The operands but the weight."""
    return [one for one in desc.operands() if one.role is not Role.WEIGHT]


def _canonical(weight: CanonicalWeight | PackedWeight) -> Weight:
    """The canonical weight in host memory."""
    if isinstance(weight, PackedWeight):
        by = weight.quantization
        if weight.layout_id != CANONICAL_LAYOUT:
            weight = unpack(weight)
        elif by is None:
            weight = Sparse24Weight(*weight.buffers, validate=False)
        else:
            weight = Sparse24QuantizedWeight(
                *weight.buffers, element=weight.element, **by.arguments, validate=False
            )
    assert isinstance(weight, (Sparse24Weight, Sparse24QuantizedWeight))
    return weight.to("host")


def _info(operand: Operand) -> TensorInfo:
    nbytes = int(np.prod(operand.shape)) * operand.element.itemsize
    return TensorInfo(operand.argument, _DTYPES[operand.element], operand.shape, nbytes)


def _bits(given: Any, operand: Operand) -> Any:
    view = TensorView.of(given, element=reinterpretable(operand.element), argument=operand.argument)
    bits = view.bits()
    return bits if isinstance(bits, np.ndarray) else bits.get()


def _read(reader: SafetensorsReader, operand: Operand) -> Any:
    expected, name = _info(operand), operand.argument
    found = reader.tensors.get(name)
    if found != expected:
        got = "none" if found is None else f"{found.dtype}{list(found.shape)}"
        raise FormatError(
            f"{reader.path}: {name}: expected {expected.dtype}{list(expected.shape)}, like the descriptor, "
            f"got {got}"
        )
    rows = reader.read(name).view(operand.element.dtype).reshape(operand.shape)
    if operand.lines is not MatrixOrder.COLUMN:
        return rows
    return np.ascontiguousarray(rows.swapaxes(-1, -2)).swapaxes(-1, -2)


def _weight(path: str, desc: GemmSparse24Descriptor) -> Weight:
    try:
        weight = load_weight(path, _WEIGHT)
    except InvalidProblemError as error:  # no tensor has that name
        raise FormatError(f"{path}: expected a compressed tensor {_WEIGHT}, got none") from error
    if (weight.m, weight.k, weight.element) != (desc.weight_rows, desc.k, desc.element):
        raise FormatError(
            f"{path}: {_WEIGHT}: expected {desc.element}[{desc.weight_rows}, {desc.k}], like the descriptor, "
            f"got {weight.element}[{weight.m}, {weight.k}]"
        )
    if weight.quantization != desc.quantization:
        wanted, got = (
            one or "values that are not quantized" for one in (desc.quantization, weight.quantization)
        )
        raise FormatError(f"{path}: {_WEIGHT}: expected {wanted}, like the descriptor, got {got}")
    return weight
