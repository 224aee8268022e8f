"""Computes the tensor cores' arithmetics on the host, bit for bit, for audits and tests."""

from __future__ import annotations

import numpy as np

from ...device.streams import Launch
from ...device.subnormals import check_subnormals
from ...plan.arithmetic import Arithmetic
from ...plan.kernel import Choice
from ...plan.operands import Views
from ...weights import threads
from ..arithmetic.results import Results, blocks_of, places
from ..descriptor import GemmSparse24Descriptor
from ..groups import part_problems
from ..kernel import GemmKernel


class Kernel(GemmKernel):
    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        self._arithmetic = Arithmetic.of(self.arithmetic(choice))
        self.details = f"NumPy, {self._arithmetic}"

    @classmethod
    def arithmetic(cls, choice: Choice) -> str | None:
        """Return the required arithmetic if tensor cores have it and it is defined for the problem."""
        required, desc = choice.preference.require.arithmetic, choice.descriptor
        if required is None:
            return None
        named = Arithmetic.of(required)
        return required if named.on_tensor_cores and named.takes(desc.element) else None

    def launcher(self, views: Views, workspace: int) -> Launch:
        return lambda stream: self._run(views)

    def _run(self, views: Views) -> None:
        check_subnormals()
        for problem, operands in part_problems(self.descriptor, views):
            self._fill(problem, operands)

    def _fill(self, desc: GemmSparse24Descriptor, views: Views) -> None:
        results = Results(desc, views, self._arithmetic, raises_amax=True)
        out = views["result"].bits()

        def fill(block: slice) -> None:
            tokens, outputs = places(np.arange(block.start, block.stop), desc)
            out[tokens, outputs] = results.at(tokens, outputs)

        threads.for_each(fill, blocks_of(out.size))
