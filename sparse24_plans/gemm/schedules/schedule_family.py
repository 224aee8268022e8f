"""How every kernel that ``gemm/wgmma_sp.cu`` holds chooses its schedule: one chooser for all families.

A family says which schedules are tried, which of them a kernel refuses, what its cost model reads, and its
formula. The rest is done here: the fastest schedule, and the split-K that fixes bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain, groupby
from typing import Any

import numpy as np

from ...plan.schedule_choice import constants, fastest, invariant_split
from ...vocab import ElementKind
from ..descriptor import GemmSparse24Descriptor
from ..kernel_table import GemmEntry
from .wgmma_sp import Schedules, WgmmaSpSchedule

Array = Any
Pairs = Sequence[tuple[WgmmaSpSchedule, GemmSparse24Descriptor]]
"""Schedules, each with a problem that it is for."""
_SPLITS = (1, 2, 3, 4, 8)
"""Split-K that a batch-invariant kernel may have."""


class ScheduleFamily(ABC):
    """Kernels whose schedules one cost model ranks. Families are hashable and live as long as the process.

    ``first`` asks for what the first fit had: bits depend on the split-K that it chose, which no refit moves.
    """

    @abstractmethod
    def candidates(
        self, desc: GemmSparse24Descriptor, split_k: int | None = None, *, first: bool = False
    ) -> Schedules:
        """The schedules that are tried. With ``split_k`` they sum K in so many pieces."""

    def refuses(self, schedule: WgmmaSpSchedule, desc: GemmSparse24Descriptor) -> bool:
        """Whether no kernel of the family runs the problem with the schedule."""
        return False

    @abstractmethod
    def model_of(self, desc: GemmSparse24Descriptor, *, first: bool = False) -> str:
        """The name of the model that serves the problem."""

    @abstractmethod
    def split_rule(self, element: ElementKind) -> str:
        """The name of the constants that say how much each n counts in the choice of split-K."""

    @abstractmethod
    def inputs(self, pairs: Pairs) -> Any:
        """The facts that the model reads of the pairs."""

    @abstractmethod
    def microseconds(self, work: Any, fit: Any) -> Array:
        """Predicted time of one launch of each pair, weights coming from memory."""

    def constants_of(self, model: str) -> Any:
        """The constants of a model, as ``microseconds`` takes them."""
        return constants(model)

    def times(self, pairs: Pairs, model: str) -> Array:
        """Predicted microseconds of the pairs by a model."""
        return self.microseconds(self.inputs(pairs), self.constants_of(model))

    def predicted(self, tried: Sequence[WgmmaSpSchedule], desc: GemmSparse24Descriptor) -> Array:
        """Predicted microseconds of the problem with each schedule."""
        return self.times([(one, desc) for one in tried], self.model_of(desc))

    def allowed(
        self, desc: GemmSparse24Descriptor, entry: GemmEntry, whole_m: int | None = None
    ) -> Schedules:
        """The schedules with which the kernel keeps its guarantee. Some of them need no workspace."""
        split_k = None if entry.cuts_k_by_n(desc) else self.split_k(whole_m or desc.m, desc.k, desc.element)
        return tuple(one for one in self.candidates(desc, split_k) if not self.refuses(one, desc))

    @lru_cache(4096)  # noqa: B019 - families are few and stay
    def best(
        self,
        desc: GemmSparse24Descriptor,
        entry: GemmEntry,
        whole_m: int | None = None,
        max_workspace: int | None = None,
    ) -> WgmmaSpSchedule:
        """The kernel's schedule of the least predicted time; column-major X is summed as row-major X is.

        ``whole_m``: M of the weight that W is a part of; ``max_workspace``: bytes that it may ask for.
        """
        return fastest(
            self.allowed(desc, entry, whole_m),
            lambda tried: self.predicted(tried, desc),
            WgmmaSpSchedule.workspace_bytes,
            max_workspace,
        )

    @lru_cache(4096)  # noqa: B019 - families are few and stay
    def split_k(self, m: int, k: int, element: ElementKind) -> int:
        """The split-K of kernels whose bits must not depend on n. It is a function of the weight alone.

        It fixes bits, so its constants are those of their first fit, and no refit moves them.
        """
        rule = constants(self.split_rule(element))
        problems = [GemmSparse24Descriptor(n=int(n), m=m, k=k, element=element) for n in rule["judged"]]
        best = {}
        for model, some in groupby(problems, lambda one: self.model_of(one, first=True)):
            group = list(some)  # problems that share constants are one call
            # For each n the schedules that are free to differ, then those with each split-K.
            tried = [[self.candidates(one, of, first=True) for of in (None, *_SPLITS)] for one in group]
            pairs = [(one, desc) for desc, found in zip(group, tried, strict=True) for one in chain(*found)]
            begins = [0, *accumulate(len(each) for found in tried for each in found)][:-1]
            least = np.minimum.reduceat(self.times(pairs, model), begins).reshape(len(group), -1)
            for desc, (free, *split) in zip(group, least.tolist(), strict=True):
                best[desc.n] = free, split
        return invariant_split(_SPLITS, best.__getitem__, judged=rule["judged"], power=rule["power"])
