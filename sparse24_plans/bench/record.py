"""Records: JSON of figures, of the machine, and of the very kernels that gave them.

A record names the kernel files that it measured, with all that they include, and a SHA-256 over their code
without comments and layout: it goes stale only when the code of its own kernels changes. A record is taken
in steps, which any number of runs share.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from .._version import __version__
from ..device.devices import cuda_properties
from ..device.files import read_whole, written_whole
from ..device.install import import_cupy
from ..device.jit.compiler import KERNEL_FOLDER, closure, load_nvrtc, nvrtc_build
from ..errors import FormatError, InvalidProblemError, shown
from ..plan.plan import Plan

SCHEMA = 1
Record = dict[str, Any]
_PREFIX = "kernels_cu/"
"""Prefix of the paths in a record, which are relative to the repository."""
_MAX_BYTES = 100_000_000
_MACHINE = ("schema", "gpu", "driver", "cuda", "versions", "seed")
_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
Lists = Mapping[str, tuple[str, ...]]
"""The lists of a record, each with the fields that name one of its rows."""
GRID: Lists = {
    "gemm": ("m", "k", "n", "element", "weight_element", "group", "backend"),
    "epilogues": ("m", "k", "n", "element", "epilogue"),
    "variants": ("variant", "m", "k", "n", "element"),
    "prepare": ("op", "m", "k", "element"),
    "prepare_peers": ("op", "m", "k", "element", "peer"),
}


# The kernels --------------------------------------------------------------------------------------


def kernel_files() -> list[str]:
    """Every kernel source of the package, by its path in the repository."""
    files = (path for path in KERNEL_FOLDER.rglob("*") if path.is_file())
    return sorted(_PREFIX + path.relative_to(KERNEL_FOLDER).as_posix() for path in files)


def files_of(sources: Iterable[str]) -> list[str]:
    """The paths of ``sources`` and of all that they include."""
    return sorted({_PREFIX + name for source in sources for name in closure(source)})


def sources_of(plan: Plan) -> tuple[str, ...]:
    """The source files that the plan's kernel is compiled from."""
    chosen = plan.explain().chosen
    return next(entry.kernel.sources for entry in plan.table if entry.name == chosen)


def code_of(text: str) -> str:
    """A kernel's text with every comment and every run of blanks outside of a string made one space."""
    bare = _STRING_OR_COMMENT.sub(lambda found: found[0] if found[0].startswith('"') else " ", text)
    return " ".join(bare.split())


def kernels_sha256(files: Iterable[str]) -> str:
    """SHA-256 over the files: path, NUL, code without comments and layout, NUL, in path order."""
    digest = hashlib.sha256()
    for name in sorted(files):
        text = (KERNEL_FOLDER / name.removeprefix(_PREFIX)).read_text(encoding="utf-8")
        digest.update(name.encode() + b"\0" + code_of(text).encode() + b"\0")
    return digest.hexdigest()


def stamp(files: Iterable[str]) -> Record:
    """The fields that tie a record to the kernels that it measured."""
    names = sorted(files)
    return {"kernel_files": names, "kernels_sha256": kernels_sha256(names)}


# The machine --------------------------------------------------------------------------------------


def machine() -> Record:
    """A record's fields about GPU 0 and the libraries. Raises BackendUnavailableError without a GPU."""
    about = cuda_properties(0)
    runtime = import_cupy().cuda.runtime.runtimeGetVersion()
    return {
        "gpu": about.name,
        "driver": about.driver,
        "cuda": f"{runtime // 1000}.{runtime % 1000 // 10}",
        "system": system(),
        "versions": {
            "sparse24_plans": __version__,
            "cublaslt": about.cublaslt,
            "cusparselt": about.cusparselt,
            "nvrtc": _nvrtc(),
            "cupy": import_cupy().__version__,
            "torch": _torch(),
        },
    }


def system() -> str:
    """Operating system, processor architecture, C library and Python: what an operator compares with."""
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        name = ""
    parts = (
        name or platform.system(),
        platform.machine(),
        " ".join(platform.libc_ver()).strip(),
        f"Python {platform.python_version()}",
    )
    return ", ".join(filter(None, parts))


def _nvrtc() -> str:
    full = re.search(r"\bV(\d[\d.]*)", nvrtc_build())
    return full[1] if full else ".".join(map(str, load_nvrtc().getVersion()))


def _torch() -> str | None:
    try:
        return str(import_module("torch").__version__)
    except ImportError:
        return None


# Records ------------------------------------------------------------------------------------------


def empty(about: Mapping[str, Any], lists: Lists = GRID) -> Record:
    """A record of the machine, without figures."""
    return {"schema": SCHEMA, **about, **stamp(()), **{name: [] for name in lists}, "host": {}}


def load(path: str | Path, lists: Lists = GRID) -> Record:
    """Read what :func:`save` wrote. Raises StorageError, or FormatError for anything else."""
    try:
        found = json.loads(read_whole(path, _MAX_BYTES))
        if found["schema"] != SCHEMA:
            raise ValueError(f"expected schema {SCHEMA}, got {shown(found['schema'])}")
        for name in lists:
            if not all(isinstance(row, dict) for row in found[name]):
                raise ValueError(f"{name}: expected a list of rows")
        found["kernels_sha256"], found["gpu"], dict(found["host"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"record {path}: {type(error).__name__}: {error}") from error
    return dict(found)


def save(record: Record, path: str | Path) -> None:
    """Write the whole file or none of it. Raises StorageError."""
    with written_whole(path) as file:
        file.write((json.dumps(record, indent=1) + "\n").encode())


def is_current(record: Record) -> bool:
    """Whether the kernels of the record are those of the package."""
    files = record.get("kernel_files", kernel_files())
    return set(files) <= set(kernel_files()) and kernels_sha256(files) == record["kernels_sha256"]


def to_extend(path: Path, lists: Lists = GRID) -> Record | None:
    """The record that a run adds to; None if there is no file yet.

    Raises StorageError, FormatError for anything but a record, InvalidProblemError for one of other kernels.
    """
    if not path.exists():
        return None
    found = load(path, lists)
    if not is_current(found):
        raise InvalidProblemError(f"{path}: expected a record of these kernels, got others; remove it first")
    return found


def merged(old: Record, new: Record, lists: Lists = GRID) -> Record:
    """Both records' rows; where both have one, the newer; the system is the newer's.

    Raises InvalidProblemError for two machines, or two seeds.
    """
    for name in _MACHINE:
        if old.get(name) != new.get(name):
            raise InvalidProblemError(
                f"record: expected one {name}, got {shown(old.get(name))} and {shown(new.get(name))}"
            )
    both = {**old, "host": {**old["host"], **new["host"]}}
    if "system" in new:
        both["system"] = new["system"]
    for name, keys in lists.items():
        rows = {tuple(row.get(key) for key in keys): row for row in (*old[name], *new[name])}
        both[name] = list(rows.values())
    return {**both, **stamp({*old["kernel_files"], *new["kernel_files"]})}


# Runs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One measurement of a record. A run can end after any step."""

    part: str
    """The list that the rows belong to, or ``host``."""
    fields: Mapping[str, Any]
    """Fields that only this step's rows have: such a row in a record shows that the step is done."""
    measure: Callable[[set[str]], Record]
    """Gives rows by list, or the host's figures; adds the kernel sources that it launched to the set."""

    def is_done(self, record: Record) -> bool:
        """Whether the record has what the step measures."""
        if self.part == "host":
            return bool(record["host"])
        wanted = self.fields.items()
        return any(all(row.get(name) == value for name, value in wanted) for row in record[self.part])

    def __str__(self) -> str:
        return f"{self.part} {', '.join(f'{name} {value}' for name, value in self.fields.items())}"


def take(
    steps: Sequence[Step],
    about: Mapping[str, Any],
    lists: Lists = GRID,
    *,
    path: Path | None = None,
    seconds: float | None = None,
    on_step: Callable[[Step], None] = lambda step: None,
) -> Record:
    """Measure the steps that the record in ``path`` lacks, and write the file after each of them.

    No step begins once ``seconds`` have passed. ``on_step`` hears of every step that is done, also of those
    that the file had. Raises what :func:`to_extend` and :func:`merged` raise, UnsupportedError for a wrong
    result.
    """
    begin, found = time.monotonic(), empty(about, lists)
    if path is not None and (before := to_extend(path, lists)) is not None:
        found = merged(before, found, lists)
    for step in steps:
        if not step.is_done(found):
            if seconds is not None and time.monotonic() - begin >= seconds:
                break
            sources: set[str] = set()
            new = {**empty(about, lists), **step.measure(sources)}
            found = merged(found, {**new, **stamp(files_of(sources))}, lists)
            if path is not None:
                save(found, path)
        on_step(step)
    return found
