"""Build a small runtime on the ops: static buffers, linear_out, and one CUDA graph for a decode step.

On a GPU the step is captured and replayed with new inputs; on a CPU it runs eagerly. Without PyTorch
it says so.
"""

try:
    import torch
except ImportError:
    print("PyTorch is not installed; nothing was run.")
    raise SystemExit(0) from None

import sparse24_plans.torch  # noqa: F401 - registers the ops

sparse24 = torch.ops.sparse24
on_gpu = torch.cuda.is_available()
device = torch.device("cuda" if on_gpu else "cpu")
torch.manual_seed(0)
tokens, hidden, wide = 4, 256, 512


class SparseWeight:
    """A 2:4 weight as the kernels of this device read it."""

    def __init__(self, dense: torch.Tensor) -> None:
        values, meta = sparse24.prune_compress(dense)
        self.dense, self.m = sparse24.decompress(values, meta), dense.shape[0]
        # One packed weight serves every number of tokens. On the CPU, plans take the canonical form.
        self.tensors = (sparse24.pack(values, meta), None) if on_gpu else (values, meta)

    def into(self, out: torch.Tensor, x: torch.Tensor, activation: str = "none") -> None:
        sparse24.linear_out(x, *self.tensors, None, out, self.m, activation)


def matrix(m: int, k: int) -> torch.Tensor:
    return (torch.randn(m, k) / k**0.5).to(torch.bfloat16).to(device)


up, down = SparseWeight(matrix(wide, hidden)), SparseWeight(matrix(hidden, wide))
x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=device)
middle = torch.empty(tokens, wide, dtype=torch.bfloat16, device=device)
y = torch.empty_like(x)


def step() -> None:
    up.into(middle, x, "silu")
    down.into(y, middle)


step()  # selects and compiles; a capture must find everything ready
replay = step
if on_gpu:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay = graph.replay

for seed in range(3):
    x.copy_(torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)))
    replay()
    hidden_state = torch.nn.functional.silu(x.double() @ up.dense.double().t())
    wanted = hidden_state @ down.dense.double().t()
    error = (y.double() - wanted).abs().max().item()
    print(f"step {seed} on {device}: largest error {error:.3g}")
    assert error < 0.05
