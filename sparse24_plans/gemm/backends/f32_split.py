"""Launches ``gemm/f32_split.cu`` and ``gemm/wgmma_sp.cu``: float32 in bf16 terms on sparse tensor cores.

The workspace holds the bf16 terms of X, then the flags and partial sums of stream-K, then blocked sums. The
terms of many tokens would take much memory, so tokens are multiplied in chunks, one after the other. So are
batches. All chunks use the same workspace.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ...device.jit.launcher import load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.streams import Launch
from ...device.tensors import TensorView
from ...plan.arithmetic import Arithmetic
from ...plan.kernel import Choice, launch_in_order, nothing
from ...plan.operands import Views
from ..arithmetic.tensor_core import named
from ..groups import PER_TOKEN, batches_of, lines_of
from ..limits import BF16, SPLIT_CTA_ELEMENTS, most_chunk, producers_split
from ..schedules.f32_split_heuristics import RANGE_TILES, Chunking, Regions, needed_workspace
from ..schedules.wgmma_sp import WgmmaSpSchedule
from ..wgmma import SOURCE, WgmmaKernel, WgmmaSpParams, possible_schedules

_SPLIT = "gemm/f32_split.cu"
_THREADS = 256
"""Threads of a CTA of the pre-pass kernel."""


@kernel_params("gemm/params/f32_split.cuh")
class F32SplitParams(KernelParams):
    """Parameters of ``gemm/f32_split.cu``."""

    x = field("const float*", "X[n, k].")
    terms = field("u16*", "The bf16 terms of X: [terms][n][k].")
    n = field("i64", "Number of tokens.")
    k = field("i64", "Number of columns of X.")
    x_stride = field("i64", "Elements from one row of X to the next.")


class Kernel(WgmmaKernel):
    """The kernel of f32_split3 and f32_split6. Their entries differ in the number of bf16 terms."""

    sources = (_SPLIT, SOURCE)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc = self.descriptor
        if desc.is_empty:
            return
        schedule, tokens = _chunking_of(choice)
        count, rest = -(-desc.n // tokens), desc.n % tokens
        choice = _of_one_batch(choice)
        first = _Chunk(choice, schedule, tokens)
        self._chunks = [first] * count
        if rest:
            self._chunks[-1] = _Chunk(choice, schedule, rest)
        self.launches = desc.batch_count * sum(one.launches for one in self._chunks)
        self.workspace_size = max(one.workspace_size for one in self._chunks)
        self.details = f"{count} chunks of {tokens} tokens: {first.details}" if count > 1 else first.details
        if desc.is_batched:
            self.details = (
                f"{desc.batch_count} batches one after the other in {self.launches} launches: {self.details}"
            )

    def launcher(self, views: Views, workspace: int) -> Launch:
        if self.descriptor.is_empty:
            return nothing
        packed_bytes = prod(self.tiles.packed_shape(self.descriptor.m, self.descriptor.k))
        batches = batches_of(self.descriptor, views, packed_bytes)
        return launch_in_order(*(one for batch in batches for one in self._launches(batch, workspace)))

    def _launches(self, views: Views, workspace: int) -> Iterator[Launch]:
        """The launches of each chunk of one batch."""
        begin = 0
        for chunk in self._chunks:
            tokens = slice(begin, begin := begin + chunk.descriptor.n)
            own = {
                name: lines_of(view, tokens) if name in PER_TOKEN else view for name, view in views.items()
            }
            yield chunk.launcher(own, workspace)

    @classmethod
    def needed_workspace(cls, choice: Choice) -> int:
        one = choice.descriptor.one_batch
        return needed_workspace(one, choice.entry, choice.device, choice.preference.whole_m)

    @classmethod
    def most_workspace(cls, choice: Choice) -> int:
        choice = _of_one_batch(choice)
        desc, terms = choice.descriptor, choice.entry.split_terms
        chunk = desc.model_copy(update={"n": most_chunk(terms, desc)})
        tried = possible_schedules(choice, {1})
        return max(Regions.of(one, chunk, terms, choice.device).end for one in tried)

    @classmethod
    def arithmetic(cls, choice: Choice) -> str | None:
        if choice.descriptor.is_empty:
            return super().arithmetic(choice)
        terms, slices = choice.entry.split_terms, _chunking_of(choice).schedule.split_k
        return named(choice.descriptor, str(Arithmetic.split(terms, slices)))


class _Chunk(WgmmaKernel):
    """The launches of one chunk of tokens: the pre-pass kernel and the product."""

    def __init__(self, choice: Choice, schedule: WgmmaSpSchedule, tokens: int) -> None:
        """``choice`` and ``schedule`` are those of all tokens of a batch."""
        desc = choice.descriptor.model_copy(update={"n": tokens})
        super().__init__(choice._replace(descriptor=desc))
        device, terms = choice.device, self.entry.split_terms
        self._split, prepass, element = None, "", desc.element
        if not producers_split(desc.m, desc.k, schedule.tokens):
            self._split = load(_SPLIT, "f32_split", _THREADS, device, {"SPLIT_TERMS": terms})
            self.launches, prepass, element = 2, f"X in {terms} bf16 terms", BF16
        unit = RANGE_TILES[terms]
        self._load(desc, schedule, device, x_bytes=element.itemsize, prepass=prepass, tiles_per_unit=unit)
        self._regions = Regions.of(schedule, desc, terms, device)
        self.workspace_size = self._regions.end

    def launcher(self, views: Views, workspace: int) -> Launch:
        desc, x = self.descriptor, views["source"]
        if self._split is None:
            return self._multiply(self._product(views, x, workspace))
        terms = TensorView(workspace, (self.entry.split_terms * desc.n, desc.k), BF16, x.device)
        split = self._split.bind(
            -(-desc.n * desc.k // SPLIT_CTA_ELEMENTS),
            F32SplitParams(x=x.address, terms=workspace, n=desc.n, k=desc.k, x_stride=x.strides[0]),
            overlapping=True,
        )
        return launch_in_order(split, self._multiply(self._product(views, terms, workspace)))

    def _product(self, views: Views, x: TensorView, workspace: int) -> WgmmaSpParams:
        """The parameters of a product. TMA loads ``x``, unless the producers split X."""
        parameters = self._parameters.of(views, x, workspace + self._regions.partials)
        parameters.blocked_sums = workspace + self._regions.groups
        return parameters


def _of_one_batch(choice: Choice) -> Choice:
    return choice._replace(descriptor=choice.descriptor.one_batch)


def _chunking_of(choice: Choice) -> Chunking:
    desc, device, entry, preference, _ = _of_one_batch(choice)
    return Chunking.of(desc, entry, device, preference.whole_m, preference.max_workspace_bytes)
