"""The product: ``Y[N,M] = epilogue(alpha * X[N,K] @ W[M,K]^T)`` with W 2:4 sparse, and its gradient dX."""

from __future__ import annotations

from typing import Any

from typing_extensions import Self

from ..device.devices import DeviceLike, resolve
from ..device.jit.cache import CompiledKernel
from ..device.streams import on_stream
from ..errors import InvalidProblemError, UnsupportedError
from ..plan.arithmetic import Arithmetic
from ..plan.explanation import Explanation
from ..plan.operands import Args, check_weight, check_weight_fits
from ..plan.plan import Plan, PreferenceLike, Tuning
from ..vocab import DeviceProperties, GemmOp
from ..weights.weight import PackedWeight, Sparse24Weight
from .args import DgradSparse24Args, GemmSparse24Args
from .arithmetic.results import Results
from .descriptor import GemmSparse24Descriptor
from .kernel import GemmKernel
from .kernel_table import ENTRIES
from .replay import OnBlock, Replay, chosen_results, replayed
from .tuned import TuningTable, shipped


class GemmSparse24Plan(Plan):
    """A kernel chosen for a product on a device. Immutable; share it between threads and streams.

    Make one with :meth:`select`. ``descriptor`` is its problem. Its arguments are GemmSparse24Args, for the
    op ``dgrad`` DgradSparse24Args.
    """

    descriptor_type = GemmSparse24Descriptor
    table = ENTRIES
    descriptor: GemmSparse24Descriptor
    _kernel: GemmKernel

    @classmethod
    def args_type(cls, descriptor: GemmSparse24Descriptor) -> type[Args]:
        cls._check_descriptor(descriptor)
        return GemmSparse24Args if descriptor.op is GemmOp.FORWARD else DgradSparse24Args

    @classmethod
    def select(
        cls,
        descriptor: GemmSparse24Descriptor,
        *,
        preference: PreferenceLike = None,
        device: DeviceLike = None,
        tuning: TuningTable | None = None,
    ) -> Self:
        """:meth:`Plan.select`, with ``tuning``: configurations for the kernels that can be tuned.

        None is the table that comes with the package for the device. What is stamped for another machine is
        ignored with a TuningWarning.
        """
        properties = resolve(device)
        return cls._selected(descriptor, preference, properties, _table(tuning, properties))

    @classmethod
    def explain_choice(
        cls,
        descriptor: GemmSparse24Descriptor,
        *,
        preference: PreferenceLike = None,
        device: DeviceLike | DeviceProperties = None,
        tuning: Any = None,
    ) -> Explanation:
        """:meth:`Plan.explain_choice`, with ``tuning`` as of :meth:`select`."""
        properties = device if isinstance(device, DeviceProperties) else resolve(device)
        return super().explain_choice(
            descriptor, preference=preference, device=properties, tuning=_table(tuning, properties)
        )

    @classmethod
    def compile(
        cls,
        descriptor: GemmSparse24Descriptor,
        *,
        preference: PreferenceLike = None,
        device: DeviceLike | DeviceProperties = None,
        tuning: Any = None,
    ) -> tuple[CompiledKernel, ...]:
        """:meth:`Plan.compile`, with ``tuning`` as of :meth:`select`."""
        properties = device if isinstance(device, DeviceProperties) else resolve(device)
        return super().compile(
            descriptor, preference=preference, device=properties, tuning=_table(tuning, properties)
        )

    def _given_tuning(self) -> Tuning | None:
        return None if self._tuning is shipped(self.device.name) else self._tuning

    def replay(
        self, args: Any, samples: Any = None, *, seed: int = 0, on_block: OnBlock | None = None
    ) -> Replay:
        """Compute results again on the host, and compare their bits with those that ``args`` hold.

        ``args``: what the plan was run with, as host copies, its result included; the weight canonical.
        ``samples``: which results: all (None), so many random ones (``seed`` draws them), or pairs
        (token, output) as integers [P, 2]. ``on_block`` is called with how many more have been compared.

        Raises UnsupportedError where the plan's guarantee names no arithmetic; InvalidProblemError,
        MisalignedOperandError for arguments that are wrong.
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
        results = Results(self.descriptor, views, Arithmetic.of(name))
        return replayed(results, views, tokens, outputs, on_block)

    def pack(self, weight: Sparse24Weight, *, stream: Any = None) -> PackedWeight:
        """``weight`` in the layout of this plan's kernel, on its device. Usable by every n.

        On a GPU the work is queued on ``stream``, as of :meth:`run`; a host plan takes None alone.
        Raises InvalidProblemError where shape, element or device differ from the plan's.
        """
        if type(weight) is not Sparse24Weight:
            raise InvalidProblemError(f"weight: expected Sparse24Weight, got {type(weight).__name__}")
        operand = self._operands[0]
        check_weight_fits(weight, operand, self._home)
        with on_stream(self._home, stream):
            packed = self._kernel.pack(weight)
        return check_weight(packed, operand, (self._entry.layout,), self._home)


def _table(tuning: object, properties: DeviceProperties) -> TuningTable:
    if tuning is None:
        return shipped(properties.name)
    if type(tuning) is not TuningTable:
        raise InvalidProblemError(f"tuning: expected a TuningTable, got {type(tuning).__name__}")
    return tuning
