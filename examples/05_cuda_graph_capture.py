"""Capture two layers into one CUDA graph and replay it with new activations.

This example needs a CUDA device. `select`, `pack` and `bind` come before the capture; `run` and `launch` may
be inside it.
"""

import numpy as np

from sparse24_plans import (
    BackendUnavailableError,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    Sparse24Weight,
)

n, hidden, inner = 32, 512, 1024
try:
    up = GemmSparse24Plan.select(
        GemmSparse24Descriptor(
            n=n, m=inner, k=hidden, element="f16", epilogue="bias_gelu", alpha=hidden**-0.5
        ),
        device=0,
    )
    down = GemmSparse24Plan.select(
        GemmSparse24Descriptor(n=n, m=hidden, k=inner, element="f16", alpha=inner**-0.5), device=0
    )

    import cupy
except BackendUnavailableError as error:
    print(f"This example needs a CUDA device; nothing was run: {error}")
    raise SystemExit(0) from None

rng = np.random.default_rng(0)


def random(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(np.float16)


x = cupy.asarray(random(n, hidden))
middle, y = cupy.empty((n, inner), cupy.float16), cupy.empty((n, hidden), cupy.float16)

# Layers that run one after the other on one stream may share a workspace.
workspace = cupy.empty(max(up.workspace_size(), down.workspace_size()), cupy.uint8)
up_args = GemmSparse24Args(
    up.pack(Sparse24Weight.prune_compress(cupy.asarray(random(inner, hidden)))),
    x,
    middle,
    cupy.asarray(random(inner)),
)
down_args = GemmSparse24Args(
    down.pack(Sparse24Weight.prune_compress(cupy.asarray(random(hidden, inner)))), middle, y
)
first_layer = up.bind(up_args, workspace=workspace)
cupy.cuda.Device().synchronize()  # everything above ran on CuPy's current stream

stream = cupy.cuda.Stream(non_blocking=True)
stream.begin_capture()
first_layer.launch(stream=stream)
down.run(down_args, workspace=workspace, stream=stream)
graph = stream.end_capture()

for step in range(3):
    x.set(random(n, hidden))  # new activations in the captured buffer
    y.fill(cupy.nan)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    replayed = cupy.asnumpy(y)

    up.run(up_args, workspace=workspace, stream=stream)
    down.run(down_args, workspace=workspace, stream=stream)
    stream.synchronize()
    same = replayed.tobytes() == cupy.asnumpy(y).tobytes()
    print(f"step {step}: replay equals two runs bit for bit: {same}; |y| up to {np.abs(replayed).max():.3f}")
    assert same
    assert np.isfinite(replayed).all()
