"""Tuned configurations: what they hold, where they come from, and when they apply. Nothing is timed here.

A table is JSON: a stamp (GPU, driver) and one entry a problem and row of the table, each with the version
of the library or kernel that it was measured with. ``sparse24 tune`` writes them (tuning/search.py),
``select`` reads them, and so stays a function of its arguments. What doesn't match is ignored with a
TuningWarning, never applied: an algorithm's number means another algorithm in another version
(pytorch#115178).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ..device.files import read_whole, written_whole
from ..device.log import TUNING
from ..errors import FormatError, InvalidProblemError, shown
from ..vocab import INT64_MAX, DeviceProperties, Integer, Listed, Model, Number
from .descriptor import GemmSparse24Descriptor
from .kernel_table import GemmEntry

SCHEMA = 1
_MAX_BYTES = 100_000_000
_FOLDER = Path(__file__).parent.parent / "tuning" / "tables"


Confirmable = Literal["deterministic", "bit_stable_on_same_hardware"]
"""Flags of a guarantee that a self-test can confirm: a table promises no others."""


class TuningWarning(UserWarning):
    """A tuned configuration was left out, because its stamp doesn't match this machine."""


class TunedKernel(Model):
    """The configuration that was the fastest right one for one problem.

    ``promises`` are the flags of the guarantee that the configuration's self-test confirmed;
    ``microseconds`` and ``default_microseconds`` are those of the kernel in this configuration and in the
    one that it has without a table. An empty ``configuration`` is that one: nothing beat it by enough.
    """

    kernel: str
    version: str
    problem: GemmSparse24Descriptor
    configuration: Mapping[str, Annotated[int, Integer(least=-INT64_MAX, most=INT64_MAX)]] = Field(
        default_factory=dict
    )
    promises: Annotated[tuple[Confirmable, ...], Listed] = ()
    microseconds: Annotated[float, Number(above=0)]
    default_microseconds: Annotated[float, Number(above=0)]


class TuningTable:
    """Tuned configurations of one GPU and driver. Immutable; pass it to ``select(tuning=...)``.

    ``gpu`` and ``driver`` are the name and the version that it was measured with, ``entries`` its contents.

    Raises InvalidProblemError where two entries are for one problem and kernel, or something is no entry.
    """

    __slots__ = ("_by_problem", "driver", "entries", "gpu")

    def __init__(self, gpu: str, driver: str, entries: Iterable[TunedKernel]) -> None:
        for name, value in (("gpu", gpu), ("driver", driver)):
            if not isinstance(value, str):
                raise InvalidProblemError(f"{name}: expected a string, got {shown(value)}")
        self.gpu, self.driver, self.entries = gpu, driver, _checked(entries)
        self._by_problem: dict[GemmSparse24Descriptor, dict[str, TunedKernel]] = {}
        for entry in self.entries:
            kernels = self._by_problem.setdefault(entry.problem, {})
            if entry.kernel in kernels:
                raise InvalidProblemError(
                    f"entries: expected one for {entry.kernel}, got two: {entry.problem}"
                )
            kernels[entry.kernel] = entry

    @classmethod
    def load(cls, path: str | Path) -> TuningTable:
        """Read what :meth:`save` wrote. Raises StorageError, or FormatError for anything else."""
        raw = read_whole(path, _MAX_BYTES)
        try:
            document: dict[str, Any] = json.loads(raw)
            if document["schema"] != SCHEMA:
                raise ValueError(f"expected schema {SCHEMA}, got {shown(document['schema'])}")
            stamp = document["stamp"]
            entries = [TunedKernel.model_validate(entry) for entry in document["entries"]]
            return cls(str(stamp["gpu"]), str(stamp["driver"]), entries)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(f"tuning table {path}: {type(error).__name__}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write JSON, one entry a line; the whole file or none of it. Raises StorageError."""
        lines = [json.dumps(_plain(entry)) for entry in self.entries]
        stamp = json.dumps({"gpu": self.gpu, "driver": self.driver})
        body = ",\n  ".join(lines)
        text = f'{{"schema": {SCHEMA},\n "stamp": {stamp},\n "entries": [\n  {body}\n]}}\n'
        with written_whole(path) as file:
            file.write(text.encode())

    def merged(self, newer: TuningTable) -> TuningTable:
        """Both tables' entries, sorted; where both have one, the newer.

        Raises InvalidProblemError where the stamps differ.
        """
        if type(newer) is not TuningTable:
            raise InvalidProblemError(f"newer: expected a TuningTable, got {shown(newer)}")
        if (self.gpu, self.driver) != (newer.gpu, newer.driver):
            raise InvalidProblemError(
                f"tables: expected one GPU and driver, got {shown((self.gpu, self.driver))} and "
                f"{shown((newer.gpu, newer.driver))}"
            )
        entries = {(one.kernel, one.problem): one for one in (*self.entries, *newer.entries)}
        return TuningTable(self.gpu, self.driver, sorted(entries.values(), key=_order))

    def find(self, problem: GemmSparse24Descriptor) -> Mapping[str, TunedKernel]:
        """Row of the table -> entry for exactly this problem, whether its stamp matches or not."""
        if type(problem) is not GemmSparse24Descriptor:
            raise InvalidProblemError(f"problem: expected GemmSparse24Descriptor, got {shown(problem)}")
        return self._by_problem.get(problem, {})

    def promises(
        self, descriptor: GemmSparse24Descriptor, rows: Sequence[GemmEntry], device: DeviceProperties
    ) -> dict[str, tuple[str, ...]]:
        """Row -> what the self-test of its configuration confirmed, where that applies on the device."""
        return {name: entry.promises for name, entry in self._applicable(descriptor, rows, device).items()}

    def configurations(
        self, descriptor: GemmSparse24Descriptor, rows: Sequence[GemmEntry], device: DeviceProperties
    ) -> dict[str, Mapping[str, int]]:
        """Row -> its configuration, where that applies on the device."""
        found = self._applicable(descriptor, rows, device)
        return {name: entry.configuration for name, entry in found.items()}

    def _applicable(
        self, descriptor: GemmSparse24Descriptor, rows: Sequence[GemmEntry], device: DeviceProperties
    ) -> dict[str, TunedKernel]:
        entries = self.find(descriptor)
        named = {row.name: row for row in rows if row.name in entries}
        return {
            name: entries[name]
            for name, row in named.items()
            if self.mismatch(entries[name], device, row.kernel.tuning_version(device)) is None
        }

    def configuration(
        self, descriptor: GemmSparse24Descriptor, row: GemmEntry, device: DeviceProperties
    ) -> Mapping[str, int]:
        """That of the row; empty where there is none, or, with a TuningWarning, where it doesn't apply."""
        entry = self.find(descriptor).get(row.name)
        if entry is None:
            return {}
        reason = self.mismatch(entry, device, row.kernel.tuning_version(device))
        if reason is None:
            return entry.configuration
        self._warn(entry, reason)
        return {}

    def mismatch(self, entry: TunedKernel, device: DeviceProperties, version: str) -> str | None:
        """Why the entry must not be applied on a device with this version of the kernel, or None."""
        for name, wanted, found in (
            ("GPU", self.gpu, device.name),
            ("driver", self.driver, device.driver),
            (entry.kernel, entry.version, version),
        ):
            if wanted != found:
                return f"tuned for {name} {wanted}, this is {found}"
        return None

    def _warn(self, entry: TunedKernel, reason: str) -> None:
        problem = entry.problem
        message = (
            f"the tuned configuration of {entry.kernel} for n={problem.n}, m={problem.m}, k={problem.k}, "
            f"{problem.element} is not applied: {reason}; run `sparse24 tune`"
        )
        TUNING.warning("%s", message)
        warnings.warn(message, TuningWarning, stacklevel=7)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"TuningTable({self.gpu!r}, driver {self.driver}, {len(self)} entries)"


def _order(entry: TunedKernel) -> tuple[Any, ...]:
    """Where an entry stands in a table: by kernel, type, shape and n."""
    one = entry.problem
    return entry.kernel, one.element.value, one.m * one.k, one.m, one.n, one.model_dump_json()


def _plain(entry: TunedKernel) -> dict[str, Any]:
    """JSON of an entry, its problem without what is at its default."""
    document = entry.model_dump(mode="json")
    document["problem"] = entry.problem.model_dump(mode="json", exclude_defaults=True)
    return document


def _checked(entries: Iterable[TunedKernel]) -> tuple[TunedKernel, ...]:
    """The entries, one at a time: what isn't a sequence of them may have no end."""
    found = []
    try:
        for entry in entries:
            if type(entry) is not TunedKernel:
                raise TypeError
            found.append(entry)
    except Exception:  # noqa: BLE001 - whatever a broken object raises
        raise InvalidProblemError(f"entries: expected TunedKernels, got {shown(entries)}") from None
    return tuple(found)


EMPTY = TuningTable("", "", ())


@cache
def shipped(gpu: str) -> TuningTable:
    """The table that comes with the package for a GPU of this name; EMPTY where there is none."""
    wanted = f"{gpu.lower().replace(' ', '_')}.json"
    # A name is looked for, never opened: it may hold anything.
    return next((TuningTable.load(path) for path in _FOLDER.glob("*.json") if path.name == wanted), EMPTY)
