"""Compress a safetensors checkpoint to 2:4, verify it against the dense one, and multiply by a layer of it.

This example needs no GPU. Writes a small generated checkpoint to a temporary folder. The commands
`sparse24 compress CKPT -o OUT` and `sparse24 verify OUT --against CKPT` do the same from a shell.
"""

import json
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

from sparse24_plans import (
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    compress_checkpoint,
    iter_weights,
    load_weight,
    verify_checkpoint,
)


def write_checkpoint(path: Path) -> None:
    """Random weights as bfloat16; safetensors is the length of a JSON header, the header, the bytes."""
    rng = np.random.default_rng(0)
    shapes = {
        "embed_tokens.weight": (512, 128),
        "layers.0.up_proj.weight": (512, 128),
        "layers.0.down_proj.weight": (128, 512),
        "layers.0.norm.weight": (128,),
    }
    header, parts, end = {}, [], 0
    for name, shape in shapes.items():
        parts.append(rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16).tobytes())
        start, end = end, end + len(parts[-1])
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


with tempfile.TemporaryDirectory() as folder:
    dense, compressed = Path(folder, "dense.safetensors"), Path(folder, "compressed.safetensors")
    write_checkpoint(dense)

    for report in compress_checkpoint(dense, compressed):
        detail = report.reason or f"kept {report.kept_energy:.1%} of the energy"
        print(
            f"{report.action:10} {report.name}: {detail}, {report.bytes_before} -> {report.bytes_after} bytes"
        )
    print(f"file: {dense.stat().st_size} -> {compressed.stat().st_size} bytes\n")

    # Weights are compared bit for bit; products are held to the plan's own error bound.
    found = verify_checkpoint(compressed, dense, device="host")
    assert found.passed
    for layer in found.layers:
        print(f"{layer.name}: {layer.kernel}, worst error {layer.worst_ratio:.1%} of what is allowed")

    print()
    for name, weight in iter_weights(compressed):
        print(name, weight)

    weight = load_weight(compressed, "layers.0.up_proj.weight")
    desc = GemmSparse24Descriptor(n=4, m=weight.m, k=weight.k, element=weight.element)
    plan = GemmSparse24Plan.select(desc, device="host")
    x = np.ones((desc.n, desc.k), ml_dtypes.bfloat16)
    y = np.empty((desc.n, desc.m), ml_dtypes.bfloat16)
    plan.run(GemmSparse24Args(plan.pack(weight), x, y))
    print(f"first row of y: {y[0, :4].astype(np.float32)} ...")
