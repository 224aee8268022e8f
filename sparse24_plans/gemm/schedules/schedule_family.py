"""How every kernel that ``gemm/wgmma_sp.cu`` holds chooses its schedule: one chooser for all families.

A family says which schedules are tried, which of them a kernel refuses, what its cost model reads, and its
formula. The rest is done here: the fastest schedule, and the split-K that fixes bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, groupby
from typing import Any

import numpy as np

from ...plan.schedule_choice import constants, fastest, invariant_split
from ...vocab import ElementKind
from ..descriptor import GemmSparse24Descriptor
from ..kernel_table import GemmEntry
from .wgmma_sp import WgmmaSpSchedule

Array = Any
Pairs = Sequence[tuple[WgmmaSpSchedule, GemmSparse24Descriptor]]
"""Schedules, each with a problem that it is for."""
_SPLITS = (1, 2, 3, 4, 8)
"""Split-K that a batch-invariant kernel may have."""


class ScheduleFamily(ABC):
    """Kernels whose schedules one cost model ranks. Families are hashable."""

    @abstractmethod
    def candidates(
        self, desc: GemmSparse24Descriptor, split_k: int | None = None
    ) -> tuple[WgmmaSpSchedule, ...]:
        """The schedules that are tried. With ``split_k`` they sum K in so many pieces."""

    @abstractmethod
    def first_candidates(
        self, desc: GemmSparse24Descriptor, split_k: int | None = None
    ) -> Sequence[WgmmaSpSchedule]:
        """The candidates that the first fit compared, by which split-K is chosen for all n."""

    def refuses(self, schedule: WgmmaSpSchedule, desc: GemmSparse24Descriptor) -> bool:
        """Whether no kernel of the family runs the problem with the schedule."""
        return False

    @abstractmethod
    def model_of(self, desc: GemmSparse24Descriptor, *, first: bool = False) -> str:
        """The name of the model that serves the problem. ``first``: as the first fit had it."""

    @abstractmethod
    def split_rule(self, element: ElementKind) -> Mapping[str, Any]:
        """How much each n counts in the choice of split-K: ``judged``, and ``power``."""

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
        self, desc: GemmSparse24Descriptor, row: GemmEntry, whole_m: int | None = None
    ) -> tuple[WgmmaSpSchedule, ...]:
        """The schedules with which the kernel keeps its guarantee. Some of them need no workspace."""
        split_k = None if row.cuts_k_by_n(desc) else self.split_k(whole_m or desc.m, desc.k, desc.element)
        return tuple(one for one in self.candidates(desc, split_k) if not self.refuses(one, desc))

    def best(
        self,
        desc: GemmSparse24Descriptor,
        row: GemmEntry,
        whole_m: int | None = None,
        max_workspace: int | None = None,
    ) -> WgmmaSpSchedule:
        """The kernel's schedule of the least predicted time; column-major X is summed as row-major X is.

        ``whole_m``: M of the weight that W is a part of; ``max_workspace``: bytes that it may ask for.
        """
        return _best(self, desc, row, whole_m, max_workspace)

    def split_k(self, m: int, k: int, element: ElementKind) -> int:
        """The split-K of kernels whose bits must not depend on n. It is a function of the weight alone.

        It fixes bits, so its constants are those of their first fit, and no refit moves them.
        """
        return _split_k(self, m, k, element)


@lru_cache(4096)
def _best(
    family: ScheduleFamily,
    desc: GemmSparse24Descriptor,
    row: GemmEntry,
    whole_m: int | None,
    max_workspace: int | None,
) -> WgmmaSpSchedule:
    return fastest(
        family.allowed(desc, row, whole_m),
        lambda tried: family.predicted(tried, desc),
        WgmmaSpSchedule.workspace_bytes,
        max_workspace,
    )


@lru_cache(4096)
def _split_k(family: ScheduleFamily, m: int, k: int, element: ElementKind) -> int:
    rule = family.split_rule(element)
    problems = [GemmSparse24Descriptor(n=int(n), m=m, k=k, element=element) for n in rule["judged"]]
    # For each n the schedules that are free to differ, then those with each split-K.
    tried = [
        [family.first_candidates(desc), *(family.first_candidates(desc, split) for split in _SPLITS)]
        for desc in problems
    ]
    best = {}
    for model, some in groupby(
        zip(problems, tried, strict=True), lambda one: family.model_of(one[0], first=True)
    ):
        group = list(some)  # problems that share constants are one call
        pairs = [(one, desc) for desc, found in group for one in chain(*found)]
        lengths = [len(each) for _, found in group for each in found]
        least = np.minimum.reduceat(family.times(pairs, model), [0, *accumulate(lengths[:-1])])
        for (desc, _), (free, *split) in zip(group, least.reshape(len(group), -1).tolist(), strict=True):
            best[desc.n] = free, split
    return invariant_split(_SPLITS, best.__getitem__, judged=rule["judged"], power=rule["power"])
