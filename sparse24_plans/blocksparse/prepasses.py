"""Pre-passes that copy dense operands into the workspace in a form that TMA and the tensor cores read."""

from __future__ import annotations

from ..device import pad_rows, transpose
from ..device.streams import Launch
from ..device.tensors import TensorView
from ..plan.kernel import align_up
from ..plan.operands import Views
from ..vocab import DeviceProperties
from .kernel_problem import Prepared, launched, prepared_bytes

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
