"""Searches the configurations of kernels that can be tuned: opt-in, and the only place that times anything.

Every configuration that a backend lists for a problem is run once on poisoned memory and its whole result is
checked before its time counts (some of cuSPARSELt's algorithms are wrong for some sizes, pytorch#155333). The
fastest right ones are then timed by the benchmarks' method (timing.py), interleaved with the default one, and
one of them replaces the default only for a gain above 3%. A configuration that ends the CUDA context costs
one worker process and is left out from then on.

The winner is self-tested: its bits must repeat, on two streams at once, and in a second process. The promises
that it keeps become part of the guarantee of plans that pin it, through the table (gemm/tuned.py).
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..device.devices import resolve
from ..device.log import TUNING
from ..errors import BackendUnavailableError, DriverError, InvalidProblemError, UnsupportedError
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.kernel_table import ENTRIES, GemmEntry, find
from ..gemm.tuned import Confirmable, TunedKernel, TuningTable
from ..plan.cublaslt import needs_cublaslt
from ..plan.kernel_table import consider
from ..plan.preference import PlanPreference
from ..vocab import DeviceProperties
from .process import python_command

MIN_GAIN = 1.03
"""How many times faster than the default a configuration must be to replace it."""
_SILENCE_S = 20.0
"""Seconds of silence after which a worker that was at work must hang in a kernel."""
_START_S = 120.0
"""Seconds that a worker may take to start: it imports CuPy, makes weights and compiles CuPy's kernels."""
Configuration = dict[str, int]


@dataclass
class Trials:
    """The fate of the configurations of one kernel for one problem."""

    problem: GemmSparse24Descriptor
    kernel: str
    right: int = 0
    refused_or_wrong: int = 0
    fatal: list[Configuration] = field(default_factory=list)
    """The configurations that ended the CUDA context, here or for an earlier problem of the same types."""
    chosen: TunedKernel | None = None
    """None where no configuration was right."""


def tunable(desc: GemmSparse24Descriptor, device: DeviceProperties) -> list[GemmEntry]:
    """The kernels that can be tuned and serve the problem: the first one of each backend.

    An empty result has none, because its kernels launch nothing.
    """
    if desc.is_empty:
        return []
    first: dict[str, GemmEntry] = {}
    for one in consider(ENTRIES, desc, PlanPreference(), device):
        if one.reason is None:
            first.setdefault(one.entry.backend, one.entry)
    return [kernel_entry for kernel_entry in first.values() if kernel_entry.kernel.tunable]


def tune(
    problems: Iterable[GemmSparse24Descriptor],
    *,
    kernels: Sequence[str] | None = None,
    device: int | None = None,
    on_trials: Callable[[Trials], None] | None = None,
) -> TuningTable:
    """Measure on the device, in other processes; the table is for it alone.

    ``kernels`` are names of kernels, all that can be tuned by default; a problem that one doesn't
    serve is left out for it. Problems have the epilogue ``identity`` and no scales.

    Raises
    ------
    UnsupportedError
        The device is the host, or no kernel that can be tuned serves any of the problems.
    BackendUnavailableError
        The device or a library is missing.
    DriverError
        A worker died of something that isn't a configuration's fault.
    """
    properties = resolve("cuda" if device is None else device)
    if properties.kind == "host":
        raise UnsupportedError("device: expected a CUDA device, the host has nothing to tune")
    if (missing := needs_cublaslt(properties)) is not None:
        raise BackendUnavailableError(f"results are checked by cuBLAS: {missing}")
    jobs = _jobs(problems, kernels, properties)
    if not jobs:
        raise UnsupportedError("no kernel that can be tuned serves any of the problems")
    tuner = _Tuner(properties)
    try:
        entries = []
        for problem, kernel_entry in jobs:
            trials = tuner.search(problem, kernel_entry)
            _log(trials)
            if trials.chosen is not None:
                entries.append(trials.chosen)
            if on_trials is not None:
                on_trials(trials)
        entries = tuner.confirm(entries)
    finally:
        tuner.close()
    return TuningTable(properties.name, properties.driver or "", entries)


def _log(trials: Trials) -> None:
    problem, chosen = trials.problem, trials.chosen
    TUNING.info(
        "%s for n=%d, m=%d, k=%d, %s: %d right, %d refused or wrong, %d fatal; %s",
        trials.kernel,
        problem.n,
        problem.m,
        problem.k,
        problem.element,
        trials.right,
        trials.refused_or_wrong,
        len(trials.fatal),
        "none chosen" if chosen is None else f"{chosen.microseconds} us with {dict(chosen.configuration)}",
    )


def _jobs(
    problems: Iterable[GemmSparse24Descriptor], kernels: Sequence[str] | None, device: DeviceProperties
) -> list[tuple[GemmSparse24Descriptor, GemmEntry]]:
    """Problems of one weight next to each other, so that it is made and packed once."""
    for name in kernels or ():
        kernel_entry = find(name)
        if kernel_entry is None or not kernel_entry.kernel.tunable:
            raise InvalidProblemError(f"kernels: expected names of kernels that can be tuned, got {name!r}")
    problems = tuple(dict.fromkeys(problems))
    for problem in problems:
        if problem.batches is not None:
            raise InvalidProblemError(
                f"problems: expected batches None, as they take the product's configuration, got {problem!r}"
            )
    jobs = [
        (problem, kernel_entry)
        for problem in problems
        for kernel_entry in tunable(problem, device)
        if kernels is None or kernel_entry.name in kernels
    ]
    return sorted(jobs, key=lambda job: (job[0].element.value, job[0].m * job[0].k, job[0].m))


class _Tuner:
    """Searches through workers, one at a time, replacing those that die."""

    def __init__(self, device: DeviceProperties) -> None:
        self._device = device
        self._worker: Worker | None = None
        self._fatal: dict[tuple[str, str, str], list[Configuration]] = {}
        self._digests: dict[tuple[str, GemmSparse24Descriptor], int] = {}

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def search(self, problem: GemmSparse24Descriptor, kernel_entry: GemmEntry) -> Trials:
        fatal = self._fatal.setdefault((kernel_entry.name, problem.element, problem.out_element), [])
        known: list[dict[str, Any]] = [{"configuration": dict(one), "us": None} for one in fatal]
        answer = None
        while answer is None:
            answer = self._ask(
                {"do": "search", "kernel": kernel_entry.name, "problem": _json(problem), "known": known},
                known,
            )
            if answer is None:
                fatal.append(known[-1]["configuration"])
        times = [(configuration, us) for configuration, us in answer["times"]]
        right = sum(item["us"] is not None for item in known)
        trials = Trials(problem, kernel_entry.name, right, len(known) - right - len(fatal), list(fatal))
        configuration, best, default = choose(times)
        if configuration is not None:
            promises = self._self_test(problem, kernel_entry, configuration)
            trials.chosen = TunedKernel(
                kernel=kernel_entry.name,
                version=kernel_entry.kernel.tuning_version(self._device),
                problem=problem,
                configuration=configuration,
                promises=promises,
                microseconds=round(best, 3),
                default_microseconds=round(default, 3),
            )
        return trials

    def _self_test(
        self, problem: GemmSparse24Descriptor, kernel_entry: GemmEntry, configuration: Configuration
    ) -> tuple[Confirmable, ...]:
        found = self._ask(_self_test(problem, kernel_entry.name, configuration, repeat=True), [])
        if found is None or not found["sound"]:
            return ()
        self._digests[kernel_entry.name, problem] = found["digest"]
        return ("deterministic",)

    def confirm(self, entries: list[TunedKernel]) -> list[TunedKernel]:
        """Add bit_stable_on_same_hardware where another process gives the same bits."""
        self.close()
        confirmed = []
        for entry in entries:
            if entry.promises:
                request = _self_test(entry.problem, entry.kernel, dict(entry.configuration), repeat=False)
                found = self._ask(request, [])
                if found is not None and found["digest"] == self._digests[entry.kernel, entry.problem]:
                    promises = (*entry.promises, "bit_stable_on_same_hardware")
                    entry = entry.model_copy(update={"promises": promises})
                else:
                    entry = entry.model_copy(update={"promises": ()})
            confirmed.append(entry)
        return confirmed

    def _ask(self, request: dict[str, Any], known: list[dict[str, Any]]) -> dict[str, Any] | None:
        """The answer; ``known`` grows by what was tried. None: its last item ended the worker."""
        if self._worker is None:
            self._worker = Worker(self._device.ordinal)
        self._worker.send(request)
        trying: dict[str, Any] | None = None
        while True:
            message = self._worker.receive(_SILENCE_S if trying and not trying.get("first") else _START_S)
            if message is None:
                self.close()
                if trying is None or trying["configuration"] is None:
                    raise DriverError("tuning worker", 1, "it died, and no single configuration is to blame")
                TUNING.warning(
                    "a worker ended with configuration %s, which is left out", trying["configuration"]
                )
                known.append({"configuration": trying["configuration"], "us": None})
                return None
            if message["event"] == "trying":
                trying = {**message, "first": trying is None}
            elif message["event"] == "tried":
                known.append({"configuration": message["configuration"], "us": message["us"]})
            elif message["event"] == "failed":
                raise DriverError("tuning worker", 1, message["error"])
            else:
                return message


def choose(times: list[tuple[Configuration, float]]) -> tuple[Configuration | None, float, float]:
    """(configuration, its time, the default's) of the winner; the default unless beaten by MIN_GAIN.

    The result is (None, 0, 0) if no configuration was right. If only the default was wrong, the winner's own
    time stands in for it.
    """
    if not times:
        return None, 0.0, 0.0
    fastest, best = min(times, key=lambda item: item[1])
    default = next((us for configuration, us in times if not configuration), None)
    if default is None:
        return fastest, best, best
    if default / best > MIN_GAIN:
        return fastest, best, default
    return {}, default, default


def _json(problem: GemmSparse24Descriptor) -> dict[str, Any]:
    return problem.model_dump(mode="json")


def _self_test(
    problem: GemmSparse24Descriptor, kernel: str, configuration: Configuration, *, repeat: bool
) -> dict[str, Any]:
    return {
        "do": "self_test",
        "kernel": kernel,
        "problem": _json(problem),
        "configuration": configuration,
        "repeat": repeat,
    }


class Worker:
    """A process of worker.py. ``receive`` gives None when it is dead, or silent for too long."""

    def __init__(self, ordinal: int, command: Sequence[str] | None = None) -> None:
        code = f"from {__package__}.worker import main; main({ordinal})"
        self._process = subprocess.Popen(
            command or python_command(code),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # dead already: receive says so
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def receive(self, silence_s: float) -> dict[str, Any] | None:
        try:
            line = self._lines.get(timeout=silence_s)
        except queue.Empty:
            self._process.kill()
            return None
        if not line:
            return None
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
