"""The plans of one product for any number of tokens, as a serving loop needs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from ..device.devices import PlaceLike
from ..device.jit.cache import CompiledKernel
from ..errors import BackendUnavailableError, InvalidProblemError, UnsupportedError, refusing, shown
from ..plan.kernel import Choice, Kernel
from ..plan.kernel_table import choose
from ..plan.plan import Plan, considered_by
from ..plan.preference import PlanPreference
from ..vocab import INT64_MAX, DeviceProperties, integer
from .descriptor import GemmSparse24Descriptor, of_places
from .tuned import TuningTable, shipped

P = TypeVar("P", bound=Plan)
_PERIOD = 16
"""Whether a limit refuses n depends on the size of n and on n modulo this number alone."""


class GemmSparse24TokenPlans(Generic[P]):
    """The plans of one product for 1 to ``most_n`` tokens, or the multiples of the descriptor's ``step``.

    Immutable; threads may share it.

    ``plans[n]`` is what ``select`` gives for n tokens. It is selected when it is first asked for, and kept.
    ``GemmSparse24Plan.for_tokens`` makes one.
    """

    def __init__(
        self,
        kind: type[P],
        descriptor: GemmSparse24Descriptor,
        most_n: int,
        preference: PlanPreference,
        device: DeviceProperties,
        place: PlaceLike,
        tuning: TuningTable,
    ) -> None:
        """``place`` is the device as ``select`` takes it."""
        most, self._step = integer(most_n), descriptor.step
        if most is None or not self._step <= most <= INT64_MAX or most % self._step:
            wanted = f"{self._kind_of_number()} from {self._step} to 2^63 - 1"
            raise InvalidProblemError(f"most_n: expected a {wanted}, got {shown(most_n)}")
        self.descriptor, self.most_n = of_places(descriptor, most), most
        self._kind, self._preference, self._device, self._tuning = kind, preference, device, tuning
        self._options: dict[str, Any] = {"preference": preference, "device": place, "tuning": tuning}
        self._plans: dict[int, P] = {}
        self._largest: dict[str, Choice] = {}
        """For each kernel's name, the choice for the largest n that it serves."""
        self._find_kernels()

    def __getitem__(self, n: int) -> P:
        """The plan of n tokens, 0 to ``most_n``. Raises InvalidProblemError, and what ``select`` raises."""
        count = self._number(n)
        plan = self._plans.get(count)
        if plan is None:
            plan = self._plans.setdefault(count, self._kind.select(self._problem(count), **self._options))
        return plan

    def __iter__(self) -> Iterator[P]:
        """The plans of 0 to ``most_n`` tokens, in order."""
        return map(self.__getitem__, range(0, self.most_n + 1, self._step))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles hold the arguments of ``for_tokens``. Reading them calls it again."""
        tuning = None if self._tuning is shipped(self._device.name) else self._tuning
        options = {**self._options, "tuning": tuning}
        return _selected_again, (self._kind, self.descriptor, self.most_n, options)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of the kernels that serve some number of tokens."""
        return tuple(self._largest)

    @property
    def layouts(self) -> tuple[str, ...]:
        """The layouts that these kernels read. One ``plan.pack(weight)`` for each serves all plans."""
        return tuple(
            dict.fromkeys(choice.entry.layout_of(choice.descriptor) for choice in self._largest.values())
        )

    def workspace_size(self) -> int:
        """An upper bound of every plan's ``workspace_size``, in bytes.

        Raises UnsupportedError if cuSPARSELt serves and the preference has no ``max_workspace_bytes``.
        """
        most: int = max(_kernel_of(choice).most_workspace(choice) for choice in self._largest.values())
        allowed = self._preference.max_workspace_bytes
        return most if allowed is None else min(most, allowed)

    @property
    def workspace_alignment(self) -> int:
        """Bytes that must divide the workspace's address, for every plan."""
        most: int = max(_kernel_of(choice).workspace_alignment for choice in self._largest.values())
        return most

    def compile(self, ns: Iterable[int] | None = None) -> tuple[CompiledKernel, ...]:
        """Compile every kernel of these numbers of tokens, by default of all, into the kernel cache.

        A kernel that several numbers share comes once. Name the numbers that you serve: all up to 16384 take
        minutes. Raises what ``GemmSparse24Plan.compile`` raises.
        """
        found: dict[Any, CompiledKernel] = {}
        every = range(self._step, self.most_n + 1, self._step)
        for n in every if ns is None else self._numbers(ns):
            for kernel in self._kind.compile(self._problem(n), **self._options):
                found.setdefault(kernel.path, kernel)
        return tuple(found.values())

    def __repr__(self) -> str:
        return f"GemmSparse24TokenPlans({', '.join(self.kernels)} on {self._device}: {self.descriptor!r})"

    def _number(self, n: object) -> int:
        count = integer(n)
        if count is None or not 0 <= count <= self.most_n or count % self._step:
            wanted = f"{self._kind_of_number()} from 0 to {self.most_n}"
            raise InvalidProblemError(f"n: expected a {wanted}, got {shown(n)}")
        return count

    def _kind_of_number(self) -> str:
        return "number of tokens" if self._step == 1 else f"multiple of {self._step}"

    def _numbers(self, ns: Iterable[int]) -> list[int]:
        """The numbers, checked one at a time, because an iterable of other objects may have no end."""
        with refusing("ns", "numbers of tokens", ns):
            return [self._number(n) for n in ns]

    # Which kernels serve ------------------------------------------------------------------------------

    def _problem(self, n: int) -> GemmSparse24Descriptor:
        return of_places(self.descriptor, n)

    def _find_kernels(self) -> None:
        """Find the kernels without a look at every n.

        Among the n of one residue modulo _PERIOD, each kernel serves up to some n and none beyond, because
        limits only ask whether n is too large. As n grows, the chosen kernel therefore only moves down the
        table, and between two n with the same kernel every n has it. (Promises of single tuned n matter to
        cuSPARSELt alone, which serves what no other kernel does.) One token has limits of its own. An
        arithmetic depends on each n's schedule, so if one is required, every n is looked at.
        """
        named, most = self._preference.require.arithmetic is not None, self.most_n // self._step
        for number in range(1, (most if named else 1) + 1):
            self._note(number)
        for first in range(2, min(_PERIOD + 1, 0 if named else most) + 1):
            self._search(first, most - (most - first) % _PERIOD)

    def _search(self, first: int, last: int) -> None:
        """Note every kernel that serves some n / step from ``first`` to ``last`` in steps of _PERIOD."""
        steps = (last - first) // _PERIOD
        if self._note(first) != self._note(last) and steps > 1:
            middle = first + steps // 2 * _PERIOD
            self._search(first, middle)
            self._search(middle, last)

    def _note(self, number: int) -> str:
        """The name of the kernel that serves ``number`` steps of tokens. Raises what ``select`` raises."""
        n = number * self._step
        problem = self._problem(n)
        try:
            wanted = self._preference, self._device, self._tuning
            entry = choose(considered_by(self._kind, problem, *wanted, until_served=True))
        except (UnsupportedError, BackendUnavailableError) as error:
            raise type(error)(f"{n} tokens: {error}") from error
        if entry.name not in self._largest or self._largest[entry.name].descriptor.n < n:
            self._largest[entry.name] = Choice(problem, self._device, entry, self._preference, {})
        return str(entry.name)


def _kernel_of(choice: Choice) -> type[Kernel[Any]]:
    found: type[Kernel[Any]] = choice.entry.kernel_for(choice.descriptor)
    return found


def _selected_again(
    kind: Any, descriptor: GemmSparse24Descriptor, most_n: int, options: dict[str, Any]
) -> GemmSparse24TokenPlans[Any]:
    plans: GemmSparse24TokenPlans[Any] = kind.for_tokens(descriptor, most_n, **options)
    return plans
