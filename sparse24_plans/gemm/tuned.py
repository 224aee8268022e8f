"""Tables of tuned configurations, and the conditions under which an entry applies. Nothing is timed here.

A table is JSON: a stamp (GPU, driver) and one entry per problem and kernel, with the version of the library
or kernel that was measured. ``sparse24 tune`` writes tables (tuning/search.py). ``select`` reads them, and so
stays a function of its arguments. An entry whose stamp differs is ignored with a TuningWarning, because an
algorithm's number may mean another algorithm in another version (pytorch#115178).
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ..device.files import read_whole, written_whole
from ..device.log import TUNING
from ..errors import FormatError, InvalidProblemError, shown
from ..vocab import INT64_MAX, DeviceProperties, Integer, Listed, Model, Number, Text
from .descriptor import GemmSparse24Descriptor
from .kernel_table import GemmEntry

SCHEMA = 1
_PACKAGE = f"{__package__.partition('.')[0]}."
_MAX_BYTES = 100_000_000
_FOLDER = Path(__file__).parent.parent / "tuning" / "tables"


Confirmable = Literal["deterministic", "bit_stable_on_same_hardware"]
"""Flags of a guarantee that a self-test can confirm. A table promises no others."""


class TuningWarning(UserWarning):
    """A tuned configuration was ignored because its stamp differs from this machine."""


class TunedKernel(Model):
    """The fastest correct configuration of a kernel for one problem.

    ``promises`` are the flags of the guarantee that the configuration's self-test confirmed.
    ``microseconds`` is the kernel's time with the configuration, ``default_microseconds`` its time without a
    table. An empty ``configuration`` means that none was faster than the default by enough.
    """

    kernel: Text
    version: Text
    problem: GemmSparse24Descriptor
    configuration: Mapping[Text, Annotated[int, Integer(least=-INT64_MAX, most=INT64_MAX)]] = Field(
        default_factory=dict
    )
    promises: Annotated[tuple[Confirmable, ...], Listed] = ()
    microseconds: Annotated[float, Number(above=0)]
    default_microseconds: Annotated[float, Number(above=0)]


class TuningTable:
    """Tuned configurations of one GPU and driver. Immutable; pass it to ``select(tuning=...)``.

    ``gpu`` and ``driver`` are the name and the version with which ``entries`` were measured.

    Raises InvalidProblemError if two entries have the same problem and kernel, or something is no entry.
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
        """Read a table that :meth:`save` wrote. Raises StorageError, or FormatError for any other content."""
        raw = read_whole(path, _MAX_BYTES)
        try:
            stamp, listed = _parts_of(json.loads(raw))
            entries = [TunedKernel.model_validate(entry) for entry in listed]
            return cls(stamp["gpu"], stamp["driver"], entries)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"tuning table {path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write JSON, one entry per line; the whole file or nothing. Raises StorageError."""
        lines = [json.dumps(_plain(entry)) for entry in self.entries]
        stamp = json.dumps({"gpu": self.gpu, "driver": self.driver})
        body = ",\n  ".join(lines)
        text = f'{{"schema": {SCHEMA},\n "stamp": {stamp},\n "entries": [\n  {body}\n]}}\n'
        with written_whole(path) as file:
            file.write(text.encode())

    def merged(self, newer: TuningTable) -> TuningTable:
        """The sorted entries of both tables; ``newer`` wins where both have one.

        Raises InvalidProblemError if the stamps differ.
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
        """Kernel -> entry for exactly this problem, or its one batch, whether its stamp matches or not."""
        if type(problem) is not GemmSparse24Descriptor:
            raise InvalidProblemError(f"problem: expected GemmSparse24Descriptor, got {shown(problem)}")
        return self._by_problem.get(problem.one_batch, {})

    def promises(
        self, descriptor: GemmSparse24Descriptor, kernels: Sequence[GemmEntry], device: DeviceProperties
    ) -> dict[str, tuple[str, ...]]:
        """Kernel -> flags that its configuration's self-test confirmed, for entries that apply."""
        return {name: entry.promises for name, entry in self._applicable(descriptor, kernels, device).items()}

    def configurations(
        self, descriptor: GemmSparse24Descriptor, kernels: Sequence[GemmEntry], device: DeviceProperties
    ) -> dict[str, Mapping[str, int]]:
        """Kernel -> configuration, for entries that apply on the device."""
        found = self._applicable(descriptor, kernels, device)
        return {name: entry.configuration for name, entry in found.items()}

    def _applicable(
        self, descriptor: GemmSparse24Descriptor, kernels: Sequence[GemmEntry], device: DeviceProperties
    ) -> dict[str, TunedKernel]:
        entries = self.find(descriptor)
        named = {one.name: one for one in kernels if one.name in entries}
        return {
            name: entries[name]
            for name, one in named.items()
            if self._misfit(entries[name], device, one) is None
        }

    def configuration(
        self, descriptor: GemmSparse24Descriptor, kernel: GemmEntry, device: DeviceProperties
    ) -> Mapping[str, int]:
        """The kernel's configuration; empty without an entry, or with a TuningWarning if it can't apply."""
        entry = self.find(descriptor).get(kernel.name)
        if entry is None:
            return {}
        reason = self._misfit(entry, device, kernel)
        if reason is None:
            return entry.configuration
        self._warn(entry, reason)
        return {}

    def _misfit(self, entry: TunedKernel, device: DeviceProperties, kernel: GemmEntry) -> str | None:
        """Return why the entry can't apply to the kernel on a device, or None."""
        if not kernel.kernel.tunable:
            return "the kernel takes no configuration"
        return self.mismatch(entry, device, kernel.kernel.tuning_version(device))

    def mismatch(self, entry: TunedKernel, device: DeviceProperties, version: str) -> str | None:
        """Return why the entry can't apply on a device with this version of the kernel, or None."""
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
        warnings.warn(message, TuningWarning, stacklevel=1 + _depth_of_caller())

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"TuningTable({self.gpu!r}, driver {self.driver}, {len(self)} entries)"


def _order(entry: TunedKernel) -> tuple[Any, ...]:
    """Sort key of an entry: kernel, type, shape, n."""
    one = entry.problem
    return entry.kernel, one.element.value, one.m * one.k, one.m, one.n, one.model_dump_json()


def _parts_of(document: Any) -> tuple[dict[str, str], list[Any]]:
    """The stamp and the entries of a table's JSON. Raises ValueError for anything but a table."""
    if not isinstance(document, dict) or "schema" not in document:
        raise ValueError("expected a table that sparse24 tune wrote, got other JSON")
    if document["schema"] != SCHEMA:
        raise ValueError(f"expected schema {SCHEMA}, got {shown(document['schema'])}")
    stamp, entries = document.get("stamp"), document.get("entries")
    if not isinstance(stamp, dict) or not all(isinstance(stamp.get(one), str) for one in ("gpu", "driver")):
        raise ValueError(f"stamp: expected the names of a gpu and a driver, got {shown(stamp)}")
    if not isinstance(entries, list):
        raise ValueError(f"entries: expected a list, got {shown(entries)}")
    return stamp, entries


def _plain(entry: TunedKernel) -> dict[str, Any]:
    """JSON of an entry. Its problem leaves out default values."""
    document = entry.model_dump(mode="json")
    document["problem"] = entry.problem.model_dump(mode="json", exclude_defaults=True)
    return document


def _depth_of_caller() -> int:
    """Depth of the nearest caller outside this package, as the ``stacklevel`` of a warning."""
    depth, frame = 0, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        depth, frame = depth + 1, frame.f_back
    return depth


def _checked(entries: Iterable[TunedKernel]) -> tuple[TunedKernel, ...]:
    """Check the entries one at a time, because an iterable of other objects may have no end."""
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


_SHIPPED: dict[str, TuningTable] = {}


def shipped(gpu: str) -> TuningTable:
    """The package's table for a GPU of this name, or EMPTY. It is one object, by which plans know it."""
    found = _SHIPPED.get(gpu)
    if found is None:  # threads may get here at once, and all take the first one's table
        found = _SHIPPED.setdefault(gpu, _loaded(gpu))
    return found


def _loaded(gpu: str) -> TuningTable:
    wanted = f"{gpu.lower().replace(' ', '_')}.json"
    # The name is compared and never opened, since it may hold anything.
    return next((TuningTable.load(path) for path in _FOLDER.glob("*.json") if path.name == wanted), EMPTY)
