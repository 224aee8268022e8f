"""Nanoseconds that exported C code itself takes of ``s24_run``: ``python -m tests.export.own_times``.

The stub stands for the CUDA driver. Its launches, fills and tensor maps do nothing here, so the times are of
the code on this machine's CPU. ``known`` runs have operands that an earlier run had, and ``new`` runs have
operands at new addresses. ``other_n`` is of ``s24_find`` for another number of tokens and a known run. It
needs a C compiler.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from sparse24_plans import (
    BlockSparseAttentionDescriptor,
    BlockSparseMatmulDescriptor,
    BlockSparseShape,
    GemmSparse24Descriptor,
    PackSparse24Descriptor,
)
from sparse24_plans.export import export_plans
from sparse24_plans.export import folder as export_folder
from sparse24_plans.plan.descriptor import Descriptor
from tests.export.c_library import FLAGS, STUB, compiled_stub
from tests.export.choices import cubin_text

_SHAPE = BlockSparseShape(heads=4, rows=512, cols=512, block=64, blocks=99)
_MATRIX = {"m": 4096, "k": 4096}
PROBLEMS: dict[str, Descriptor] = {
    "one launch without maps": PackSparse24Descriptor(**_MATRIX, element="bf16"),
    "one launch with maps": GemmSparse24Descriptor(n=64, **_MATRIX, element="bf16", epilogue="bias_silu"),
    "a pass before": GemmSparse24Descriptor(n=64, **_MATRIX, element="f32"),
    "blocks": BlockSparseMatmulDescriptor(op="dsd", layout=_SHAPE, n=64, element="bf16"),
    "a fill and three launches": BlockSparseAttentionDescriptor(
        op="backward", layout=_SHAPE, element="bf16", head_size=64
    ),
}


def built(plans: Path, folder: Path) -> Path:
    """The timing program, with the C code of an exported folder and the stub."""
    program, driver = folder / "own_times", compiled_stub(folder)
    sources = str(STUB.with_name("own_times.c")), str(plans / "sparse24_export.c")
    command = ["cc", *FLAGS, "-O2", f"-I{plans}", *sources, str(driver)]
    subprocess.run([*command, "-ldl", "-lpthread", "-o", str(program)], check=True)
    return program


def own_times(program: Path, plans: Path, problem: str, n: int) -> dict[str, float | None]:
    """Nanoseconds of each kind of run. ``other_n`` is None for problems without many numbers of tokens."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(program.parent)}
    command = [str(program), str(plans), problem, str(n)]
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    found: dict[str, float | None] = json.loads(done.stdout)
    return found


def main() -> None:
    export_folder.cubin = cubin_text
    with tempfile.TemporaryDirectory() as scratch:
        plans = Path(scratch) / "plans"
        export_plans(PROBLEMS, plans, device="h200")
        program = built(plans, Path(scratch))
        for name, descriptor in PROBLEMS.items():
            print(f"{name}: {own_times(program, plans, name, getattr(descriptor, 'n', 0))}", flush=True)


if __name__ == "__main__":
    main()
