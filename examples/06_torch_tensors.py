"""Multiply PyTorch tensors without a copy, read through data_ptr() and through __dlpack__.

This example runs on CPU tensors, and on CUDA tensors where PyTorch and CuPy both see a GPU. Without PyTorch
it says so.
"""

from typing import Any

from sparse24_plans import (
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    Sparse24Weight,
    TensorView,
)

try:
    import torch
except ImportError:
    print("PyTorch is not installed; nothing was run.")
    raise SystemExit(0) from None


class OnlyDLPack:
    """A tensor that shows nothing but the DLPack protocol, as other frameworks' tensors do."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)


n, m, k = 16, 256, 128
desc = GemmSparse24Descriptor(n=n, m=m, k=k, element="bf16", epilogue="bias_relu")
# None means the current CUDA device, or the host if CuPy sees none.
plan = GemmSparse24Plan.select(desc, device=None if torch.cuda.is_available() else "host")
on_gpu = plan.device.kind == "cuda"
place = torch.device("cuda", plan.device.ordinal) if on_gpu else torch.device("cpu")
torch.manual_seed(0)
dense = torch.randn(m, k, dtype=torch.bfloat16, device=place)
x = torch.randn(n, k, dtype=torch.bfloat16, device=place)
bias = torch.randn(m, dtype=torch.bfloat16, device=place)

for name, tensor in (("data_ptr", x), ("__dlpack__", OnlyDLPack(x))):
    view = TensorView.of(tensor)
    print(f"{name}: {view}, zero-copy: {view.address == x.data_ptr()}")
    assert view.address == x.data_ptr()

if on_gpu:
    torch.cuda.synchronize()  # the weight is prepared on CuPy's current stream, not on PyTorch's
packed = plan.pack(Sparse24Weight.prune_compress(dense))
if on_gpu:
    torch.cuda.synchronize()
workspace = torch.empty(plan.workspace_size(), dtype=torch.uint8, device=place)
stream = torch.cuda.current_stream() if on_gpu else None

results = []
for operand in (x, OnlyDLPack(x)):
    y = torch.empty(n, m, dtype=torch.bfloat16, device=place)
    plan.run(GemmSparse24Args(packed, operand, y, bias), workspace=workspace, stream=stream)
    results.append(y)

# The reference is PyTorch's product with the pruned weight, in float64.
pruned = dense.reshape(m, k // 4, 4)
keep = torch.zeros_like(pruned, dtype=torch.bool).scatter_(2, pruned.abs().topk(2, dim=2).indices, True)
pruned = torch.where(keep, pruned, 0).reshape(m, k).double()
want = torch.relu(x.double() @ pruned.T + bias.double())
ties = (dense.abs().reshape(m, k // 4, 4).sort(dim=2).values.diff(dim=2)[:, :, 1] == 0).any(dim=1)
untied = ~ties  # topk and this package may break ties differently, so rows with ties are left out
for y in results:
    error = (y.double() - want)[:, untied].abs().max().item()
    print(f"{plan.explain().chosen} on {place}: largest error {error:.3g} over {int(untied.sum())} rows of W")
    assert torch.allclose(y.double()[:, untied], want[:, untied], rtol=2**-7, atol=1e-2)
