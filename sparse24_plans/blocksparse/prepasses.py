"""Pre-passes that copy dense operands into the workspace in a form that TMA and the tensor cores read.

The base of the backends that multiply kept blocks after them.
"""

from __future__ import annotations

from ..device import pad_rows, transpose
from ..device.jit.launcher import Function
from ..device.jit.structs import KernelParams
from ..device.streams import Launch
from ..device.tensors import TensorView
from ..plan.kernel import Choice, Kernel, align_up, launch_in_order, nothing
from ..plan.operands import Alignment, Views
from ..vocab import DeviceProperties
from .descriptor import BlockSparseMatmulDescriptor
from .kernel_problem import KernelProblem, Prepared, launched, prepared_bytes

SOURCES = (transpose.SOURCE, pad_rows.SOURCE)


class PrePasses:
    """The pre-passes of one plan, compiled."""

    def __init__(self, prepared: tuple[Prepared, ...], itemsize: int, device: DeviceProperties) -> None:
        self._launched = launched(prepared)
        kinds = {one.transposes for one in prepared}
        self._transpose = transpose.Transpose(itemsize, device) if True in kinds else None
        self._pad = pad_rows.PadRows(itemsize, device) if False in kinds else None
        self.workspace_size = prepared_bytes(prepared)
        self.details = "".join(
            f"; {one.name} is {'transposed' if one.transposes else 'padded'} first" for one in self._launched
        )

    def __len__(self) -> int:
        return len(self._launched)

    def bind(self, views: Views, workspace: int) -> tuple[Views, list[Launch]]:
        """Return the operands as they are multiplied, and the launches that copy some of them."""
        found, launches, at = dict(views), [], workspace
        for one in self._launched:
            view = views[one.name]
            launches.append(self._launch(one, view.address, at))
            shape = (*view.shape[:-2], *one.sides)
            found[one.name] = TensorView(at, shape, view.element, view.device, owner=view.owner)
            at += align_up(one.nbytes)
        return found, launches

    def _launch(self, one: Prepared, source: int, target: int) -> Launch:
        matrices = one.matrices
        if one.transposes:
            assert self._transpose is not None
            return self._transpose.bind(matrices, source, target)
        assert self._pad is not None
        rows, width = matrices.batch * matrices.rows, one.sides[1]
        return self._pad.bind(rows, matrices.columns, width, source, target)


class PreparingKernel(Kernel[BlockSparseMatmulDescriptor]):
    """Base of the backends that multiply kept blocks by one launch after the pre-passes."""

    workspace_alignment = 256
    default_alignment = Alignment(16)
    _function: Function
    _ctas: int
    """CTAs of the product; 0: there is no result."""

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        self._problem = KernelProblem(self.descriptor)

    def _prepare(
        self, prepared: tuple[Prepared, ...], device: DeviceProperties, product_bytes: int = 0
    ) -> None:
        """Compile the pre-passes. The product's own ``product_bytes`` of workspace lie behind the copies."""
        self._prepasses = PrePasses(prepared, self.descriptor.element.itemsize, device)
        self.workspace_size = self._prepasses.workspace_size + product_bytes
        self.launches = 1 + len(self._prepasses)

    def launcher(self, views: Views, workspace: int) -> Launch:
        if self._ctas == 0:
            return nothing
        views, prepasses = self._prepasses.bind(views, workspace)
        parameters = self._parameters_of(views, workspace + self._prepasses.workspace_size)
        return launch_in_order(*prepasses, self._function.bind(self._ctas, parameters, overlapping=True))

    def _parameters_of(self, views: Views, workspace: int) -> KernelParams:
        """The product's parameters for operands that are prepared, and for its own workspace."""
        raise NotImplementedError
