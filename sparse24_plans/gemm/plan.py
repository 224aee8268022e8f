"""The gemm plan: ``Y[N,M] = epilogue(alpha * X[N,K] @ W[M,K]^T)`` with W 2:4 sparse, and its gradient dX."""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import Self

from ..device.devices import PlaceLike, described, home_of
from ..device.streams import on_stream
from ..device.subnormals import check_subnormals
from ..errors import InvalidProblemError, UnsupportedError
from ..plan.arithmetic import Arithmetic
from ..plan.plan import Plan, PreferenceLike, Tuning
from ..plan.preference import PlanPreference
from ..plan.weight_operand import CANONICAL_WEIGHTS, WeightPacking
from ..vocab import DeviceProperties, GemmOp, GroupTokens
from ..weights.weight import CanonicalWeight, PackedWeight
from .args import DgradSparse24Args, GemmSparse24Args
from .arithmetic.results import results_of
from .descriptor import GemmSparse24Descriptor
from .kernel import GemmKernel
from .kernel_table import ENTRIES
from .replay import OnBlock, Replay, check_c_is_kept, chosen_results, replayed
from .token_plans import GemmSparse24TokenPlans
from .tuned import TuningTable, shipped


class GemmSparse24Plan(Plan):
    """A kernel chosen for a product on a device. Immutable; share it between threads and streams.

    :meth:`select` makes one. ``descriptor`` is its problem. Its arguments are GemmSparse24Args, or
    DgradSparse24Args for the op ``dgrad``.
    """

    descriptor_type = GemmSparse24Descriptor
    table = ENTRIES
    args_types: ClassVar = {GemmOp.FORWARD: GemmSparse24Args, GemmOp.DGRAD: DgradSparse24Args}
    descriptor: GemmSparse24Descriptor
    _kernel: GemmKernel

    @classmethod
    def select(
        cls,
        descriptor: GemmSparse24Descriptor,
        *,
        preference: PreferenceLike = None,
        device: PlaceLike = None,
        tuning: TuningTable | None = None,
    ) -> Self:
        """Select a kernel as :meth:`Plan.select` does. ``tuning`` holds configurations of tunable kernels.

        None means the package's table for the device. Entries stamped for another machine are ignored with a
        TuningWarning.
        """
        return cls._selected(descriptor, preference, described(device), tuning)

    @classmethod
    def for_tokens(
        cls,
        descriptor: GemmSparse24Descriptor,
        most_n: int,
        *,
        preference: PreferenceLike = None,
        device: PlaceLike = None,
        tuning: TuningTable | None = None,
    ) -> GemmSparse24TokenPlans[Self]:
        """The plans of 1 to ``most_n`` tokens; the descriptor's own n doesn't matter.

        With ``group_tokens`` counts or experts, the numbers are the multiples of ``groups`` or ``top_k``, and
        with experts ``x_rows`` and ``y_rows`` follow. Nothing is compiled yet. Other arguments are those of
        :meth:`select`. Raises what that raises for any of the numbers, and InvalidProblemError for a
        ``most_n`` that is no such number, or for rows that don't follow it.
        """
        cls._check_descriptor(descriptor)
        given = descriptor.x_rows is not None or descriptor.y_rows is not None
        if given and descriptor.group_tokens is not GroupTokens.EXPERTS:
            raise InvalidProblemError(
                "descriptor: expected no x_rows and y_rows for any number of tokens, unless group_tokens is "
                f"experts, got {descriptor.group_tokens}"
            )
        properties, absent = described(device)
        place = properties if absent else home_of(properties)
        wishes, table = PlanPreference.of(preference), cls._tuning_for(tuning, properties)
        return GemmSparse24TokenPlans(cls, descriptor, most_n, wishes, properties, place, table)

    @classmethod
    def _tuning_for(cls, given: Tuning | None, device: DeviceProperties) -> TuningTable:
        if given is None:
            return shipped(device.name)
        if type(given) is not TuningTable:
            raise InvalidProblemError(f"tuning: expected a TuningTable, got {type(given).__name__}")
        return given

    def replay(
        self, args: Any, samples: Any = None, *, seed: int = 0, on_block: OnBlock | None = None
    ) -> Replay:
        """Compute results again on the host, and compare their bits with the results in ``args``.

        ``args`` are host copies of the arguments of a run, its result included, with a canonical weight.
        ``samples`` chooses the results: None for all, a number of random ones (drawn with ``seed``), or pairs
        (token, output) as integers [P, 2]; tokens of batches follow each other, and tokens in no group are
        left out. ``on_block`` is called with the number of results just compared.

        Raises UnsupportedError if the plan's guarantee names no arithmetic, or the thread flushes subnormal
        numbers, and InvalidProblemError or MisalignedOperandError for wrong arguments.
        """
        name = self.guarantee.arithmetic
        if name is None:
            raise UnsupportedError(
                f"replay: expected a plan that names its arithmetic, got {self._entry.name}, which names none"
            )
        if on_block is not None and not callable(on_block):
            raise InvalidProblemError(f"on_block: expected a function, got {type(on_block).__name__}")
        if self.device.kind != "host":
            preference = {"require": {"arithmetic": name}}
            host = GemmSparse24Plan.select(self.descriptor, preference=preference, device="host")
            return host.replay(args, samples, seed=seed, on_block=on_block)
        tokens, outputs = chosen_results(samples, seed, self.descriptor)
        views = self._check(args)
        check_c_is_kept(args)
        check_subnormals()
        results = results_of(self.descriptor, views, Arithmetic.of(name))
        written = results.written(tokens)
        return replayed(results, views, tokens[written], outputs[written], on_block)

    def pack(self, weight: CanonicalWeight, *, stream: Any = None) -> PackedWeight:
        """Pack ``weight`` in the layout of this plan's kernel, on its device. Plans of every n can use it.

        A quantized product takes a Sparse24QuantizedWeight, any other a Sparse24Weight.

        On a GPU the work is enqueued on ``stream``, as for :meth:`run`; a host plan takes only None.
        Raises InvalidProblemError if shape, element, quantization or device differ from the plan's.
        """
        if type(weight) not in CANONICAL_WEIGHTS:
            raise InvalidProblemError(f"weight: expected Sparse24Weight, got {type(weight).__name__}")
        packing = self._operands[0].packing
        assert isinstance(packing, WeightPacking)
        packing.check_fits(weight, "weight", self._home)
        with on_stream(self._home, stream):
            packed = self._kernel.pack(weight)
        packing.check(packed, "weight", (self._entry.layout_of(self.descriptor),), self._home)
        return packed
