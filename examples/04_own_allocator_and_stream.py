"""Run a plan in memory of the caller's own allocator, on the caller's own stream.

This example needs a CUDA device. One cudaMalloc serves the weight, the operands and the workspace; the
package sees addresses only. CuPy launches the kernels, and its memory pool stays empty.
"""

import numpy as np

from sparse24_plans import (
    BackendUnavailableError,
    Device,
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    PlanPreference,
    Sparse24Weight,
    TensorView,
    Workspace,
)

n, m, k = 48, 1024, 512
desc = GemmSparse24Descriptor(n=n, m=m, k=k, element="f16", out_element="f32")
# This backend is forced because it needs a workspace, and reads the canonical weight where it lies.
preference = PlanPreference(prefer_backend="inflate_cublas")
try:
    plan = GemmSparse24Plan.select(desc, device=0, preference=preference)

    import cupy
except BackendUnavailableError as error:
    print(f"This example needs a CUDA device; nothing was run: {error}")
    raise SystemExit(0) from None
print(plan.explain())

runtime = cupy.cuda.runtime
DEVICE = Device("cuda", plan.device.ordinal)
TO_DEVICE, TO_HOST = runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost


class Arena:
    """A bump allocator over one cudaMalloc: stands for the memory manager of a serving runtime."""

    def __init__(self, nbytes: int) -> None:
        self.base, self.nbytes, self._used = runtime.malloc(nbytes), nbytes, 0

    def take(self, nbytes: int, alignment: int = 256) -> int:
        start = -(-self._used // alignment) * alignment
        if start + nbytes > self.nbytes:
            raise MemoryError(f"the arena holds {self.nbytes} bytes")
        self._used = start + nbytes
        return self.base + start

    def tensor(self, shape: tuple[int, ...], element: ElementKind) -> TensorView:
        address = self.take(int(np.prod(shape)) * element.itemsize)
        return TensorView(address, shape, element, DEVICE, owner=self)

    def upload(self, array: np.ndarray, element: ElementKind) -> TensorView:
        view = self.tensor(array.shape, element)
        runtime.memcpy(view.address, array.ctypes.data, array.nbytes, TO_DEVICE)
        return view


rng = np.random.default_rng(0)
arena = Arena(64 << 20)
stream = runtime.streamCreateWithFlags(runtime.streamNonBlocking)  # a bare cudaStream_t

# The weight is compressed on the host, then uploaded into the arena. The host made the metadata, so the
# check on the device is skipped.
on_host = Sparse24Weight.prune_compress(rng.standard_normal((m, k), np.float32).astype(np.float16))
weight = Sparse24Weight(
    arena.upload(on_host.values, ElementKind.F16),
    arena.upload(on_host.metadata, ElementKind.U16),
    validate=False,
)
x_host = rng.standard_normal((n, k), np.float32).astype(np.float16)
x, y = arena.upload(x_host, ElementKind.F16), arena.tensor((n, m), ElementKind.F32)

size = plan.workspace_size()
workspace = Workspace(arena.take(size, plan.workspace_alignment), size, DEVICE, owner=arena)
args = GemmSparse24Args(plan.pack(weight), x, y)

plan.run(args, workspace=workspace, stream=stream)  # checks, then enqueues
bound = plan.bind(args, workspace=workspace)  # checks once
for _ in range(10):
    bound.launch(stream=stream)

y_host = np.empty((n, m), np.float32)
runtime.memcpyAsync(y_host.ctypes.data, y.address, y_host.nbytes, TO_HOST, stream)
runtime.streamSynchronize(stream)

w64, x64 = on_host.decompress().astype(np.float64), x_host.astype(np.float64)
exact = x64 @ w64.T
allowed = plan.guarantee.tolerance(k, exact, np.abs(x64) @ np.abs(w64).T, desc.out_element)
ratio = (np.abs(y_host - exact) / allowed).max()
print(f"\nworst error: {ratio:.1%} of what the guarantee allows")
print(f"bytes in CuPy's memory pool: {cupy.get_default_memory_pool().total_bytes()}")
assert ratio <= 1

del bound  # it holds a CUDA graph, because the kernel is several launches
runtime.streamDestroy(stream)
runtime.free(arena.base)
