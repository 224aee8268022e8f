"""Export a product to C, with a weight and the results that the programs in `examples/export` compare with.

`python examples/13_export_to_c.py FOLDER` writes FOLDER, by default a temporary one, and says how to build
and run a program, which needs an H100 or H200. Exporting needs NVRTC, and no GPU.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from sparse24_plans import (
    BackendUnavailableError,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    PackSparse24Args,
    PackSparse24Descriptor,
    PackSparse24Plan,
    Sparse24Weight,
    export_plans,
    save_weights,
)

m, k, tokens = 256, 512, (1, 16, 300)
folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
product = GemmSparse24Descriptor(n=max(tokens), m=m, k=k, element="f16", alpha=k**-0.5)
packing = PackSparse24Descriptor(m=m, k=k, element="f16")
try:
    found = export_plans([product, packing], folder / "plans", device="h200")
except BackendUnavailableError as error:
    print(f"This example needs NVRTC; nothing was exported: {error}")
    raise SystemExit(0) from None
print(f"{found.plans} plans of {found.cubins} kernels, {found.nbytes / 1e6:.1f} MB, in {found.folder}")

# A checkpoint's weight, and the same weight as kernels read it.
rng = np.random.default_rng(0)
weight = Sparse24Weight.prune_compress(rng.standard_normal((m, k), np.float32).astype(np.float16))
save_weights(folder / "weight.safetensors", {"layer": weight})
plan = PackSparse24Plan.select(packing, device="host")
packed = np.empty((m // 64, k // 128, 9216), np.uint8)  # docs/formats.md
plan.run(PackSparse24Args(weight, packed))
packed.tofile(folder / "weight.packed")

# Kernels name their arithmetic, so the host computes the bits that the GPU must give.
for n in tokens:
    problem = product.model_copy(update={"n": n})
    exported = GemmSparse24Plan.select(problem, preference={"exportable": True}, device="h200")
    require = {"arithmetic": exported.guarantee.arithmetic}
    replica = GemmSparse24Plan.select(problem, preference={"require": require}, device="host")
    x = rng.standard_normal((n, k), np.float32).astype(np.float16)
    y = np.empty((n, m), np.float16)
    replica.run(GemmSparse24Args(weight, x, y))
    x.tofile(folder / f"x.{n}")
    y.tofile(folder / f"y.{n}")
    print(f"{n} tokens: {exported.kernel}, {require['arithmetic']}")

print(f"""To run it on an H200, in {Path(__file__).parent / "export"}:
  cc -std=c99 -I{folder}/plans run.c {folder}/plans/sparse24_export.c -l:libcuda.so.1 -ldl -lpthread -o run
  ./run {folder}""")
