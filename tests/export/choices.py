"""Whether ``s24_find`` names the kernel that ``select`` names.

``python -m tests.export.choices`` asks for each of 1 to 8192 tokens of 40 weight shapes of published models,
on the stub of the driver and without compiling, which takes half an hour on one core.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from benchmarks.models import MODELS
from sparse24_plans import GemmSparse24Descriptor, GemmSparse24Plan
from sparse24_plans.device.devices import absent_gpu
from sparse24_plans.export import export_plans
from sparse24_plans.export import folder as export_folder
from tests.export.c_library import C, compiled

TYPES = (
    {"element": "bf16"},
    {"element": "f16", "epilogue": "bias_silu"},
    {"element": "bf16", "epilogue": "bias_swiglu"},
    {"element": "fp8_e4m3", "out_element": "bf16", "scale_x": "row", "scale_w": "row"},
    {"element": "s8", "out_element": "bf16", "scale_x": "row", "scale_w": "row"},
    {"element": "f32"},
    {"element": "bf16", "epilogue": "swiglu", "groups": 8},
)


def random_problem(seed: random.Random, most: int) -> GemmSparse24Descriptor:
    """A product with the weight of a published model, for as many tokens."""
    m, k = seed.choice([shape for layers in MODELS.values() for shape in layers.values()])
    return GemmSparse24Descriptor(n=most, m=m, k=k, **seed.choice(TYPES))


def cubin_text(source: str, arch: str, defines: dict[str, int]) -> bytes:
    """Stands for the compiled kernel, so that the stub can tell which one it launches."""
    return repr((source, arch, sorted(defines.items()))).encode() + b"\0"


@contextmanager
def named_cubins_everywhere() -> Iterator[None]:
    """In the block, exports write ``cubin_text`` for each kernel and compile none."""
    with mock.patch.object(export_folder, "cubin", cubin_text):
        yield


def differences(c: C, descriptor: GemmSparse24Descriptor, ns: Iterable[int], folder: Path) -> list[str]:
    """Export the product to the folder, and compare the choices for these numbers of tokens."""
    export_plans({"product": descriptor}, folder, device="h200")
    opened, device, found = c.open(folder), absent_gpu("h200"), []
    for n in ns:
        problem = descriptor.model_copy(update={"n": n})
        plan = GemmSparse24Plan.select(problem, preference={"exportable": True}, device=device)
        exported = c.find(opened, "product", n)
        name = c.library.s24_guarantee(ctypes.byref(exported)).kernel.decode()
        nbytes = c.library.s24_workspace(ctypes.byref(exported), None)
        if (name, nbytes) != (plan.kernel, plan.workspace_size()):
            found.append(f"{problem!r}: {plan.kernel}, {plan.workspace_size()} bytes, got {name}, {nbytes}")
    c.library.s24_close(opened)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.export.choices", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--shapes", type=int, default=40)
    parser.add_argument("--n", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    seed, failed = random.Random(options.seed), 0
    with named_cubins_everywhere(), tempfile.TemporaryDirectory() as folder:
        c = compiled(Path(folder))
        for at in range(options.shapes):
            problem = random_problem(seed, options.n)
            found = differences(c, problem, range(1, options.n + 1), Path(folder) / str(at))
            print(f"{problem!r}: {len(found)} of {options.n} differ", *found[:3], sep="\n  ", flush=True)
            failed += len(found)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
