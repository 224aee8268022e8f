"""Host times of exported C code, and the size of a folder: ``python -m benchmarks.export_times OUT.json``.

A folder has the products of Llama-3.1-8B's weights, as ``export_plans`` writes them. ``export_times.c`` is
compiled and run on one for 1 to 1024 tokens: it needs a C compiler and a GPU. ``--size`` adds the size of one
for 1 to 8192 tokens to that record. It needs no GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from sparse24_plans import GemmSparse24Descriptor, GemmSparse24Plan, export_plans
from sparse24_plans.bench.record import SCHEMA, Record, files_of, machine, save, sources_of, stamp
from sparse24_plans.device.devices import cuda_properties

ROOT = Path(__file__).parent.parent
WEIGHTS = "Llama-3.1-8B"
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
TOKENS = (1, 16, 512)
MAX_TOKENS = 8192


def built(plans: Path, folder: Path, driver: str) -> Path:
    """The timing program, with the C code of an exported folder."""
    program, include = folder / "export_times", (f"-I{plans}", f"-I{ROOT / 'examples' / 'export'}")
    source = str(Path(__file__).with_suffix(".c"))
    warnings = "-std=c99", "-O2", "-Wall", "-Wextra", "-Werror"
    command = ["cc", *warnings, *include, source, driver, "-ldl", "-lpthread", "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def timed(program: Path, plans: Path, n: int) -> Record:
    """The times that the program prints for one number of tokens."""
    command = [str(program), str(plans), str(n)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return {"n": n, **json.loads(done.stdout)}


def loaded_driver() -> str:
    """The path of the machine's CUDA driver, which linkers needn't know."""
    ctypes.CDLL("libcuda.so.1")
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return next(path for path in sorted(paths) if "/libcuda.so" in path)


def exported(most: int, plans: Path, device: Any) -> Record:
    """Write a folder; return its row."""
    problems = [GemmSparse24Descriptor(n=most, m=m, k=k, element="bf16") for m, k in SHAPES]
    found = export_plans(problems, plans, device=device)
    sizes = {name: getattr(found, name) for name in ("plans", "cubins", "nbytes")}
    return {"weights": WEIGHTS, "tokens": most, **sizes, "open_ms": None}


def measured(most: int) -> Record:
    """A folder, and the times of its first product's calls."""
    with tempfile.TemporaryDirectory() as scratch:
        plans = Path(scratch) / "plans"
        folder = exported(most, plans, cuda_properties(0))
        program = built(plans, Path(scratch), loaded_driver())
        calls = [timed(program, plans, n) for n in TOKENS if n <= most]
    folder["open_ms"] = median(call.pop("open_ms") for call in calls)
    return {"folders": [folder], "calls": calls}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.export_times", description=__doc__.split("\n")[0]
    )
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--n", type=int, default=1024, help="the most tokens of the folder that is timed")
    parser.add_argument("--size", action="store_true", help="add the size of a folder for 8192 tokens")
    options = parser.parse_args(arguments)
    if options.size:
        record = json.loads(options.out.read_text())
        with tempfile.TemporaryDirectory() as scratch:
            record["folders"].append(exported(MAX_TOKENS, Path(scratch) / "plans", "h200"))
        save(record, options.out)
        return
    about: dict[str, Any] = {"schema": SCHEMA, **machine()}
    problem = GemmSparse24Descriptor(n=1, m=4096, k=4096, element="bf16")
    plan = GemmSparse24Plan.select(problem, preference={"exportable": True}, device=cuda_properties(0))
    save({**about, **stamp(files_of(sources_of(plan))), **measured(options.n)}, options.out)


if __name__ == "__main__":
    main()
