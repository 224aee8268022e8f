"""Code that PyTorch compiles or exports holds the ops, and gives what they give, for any number of tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from .cases import DEVICE, S, randn, wanting, weight

needs_a_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="Inductor needs a C++ compiler for CPUs"
)


class Layer(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        values, meta, self.dense = weight(dtype=dtype)
        self.values = torch.nn.Parameter(values, requires_grad=False)
        self.register_buffer("metadata", meta)
        self.bias = torch.nn.Parameter(randn(96, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return S.linear(x * 2, self.values, self.metadata, self.bias, activation="relu") + 1


def test_one_graph_serves_every_number_of_tokens():
    """fullgraph, and one compilation for every n: the plan is selected inside of the op."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for n in (5, 2, 17, 64, 3):
        x = randn(n, 64)
        assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1


def test_compiled_gradients():
    torch._dynamo.reset()
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    grads = []
    for module in (layer, compiled):
        x = wanting(randn(5, 64))
        layer.bias.grad = None
        module(x).square().sum().backward()
        grads.append((x.grad, layer.bias.grad))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_compiled_mutation_of_out():
    torch._dynamo.reset()
    values, meta, _ = weight()

    def step(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        S.linear_out(x, values, meta, None, out)
        return out + 1

    x, out = randn(5, 64), torch.zeros(5, 96, device=DEVICE)
    result = torch.compile(step, fullgraph=True, backend="aot_eager")(x, out)
    assert torch.equal(out, S.linear(x, values, meta))
    assert torch.equal(result, out + 1)


@needs_a_compiler
def test_inductor_reduce_overhead():
    """The compiler that users get, and the mode that captures CUDA graphs where there is a GPU."""
    torch._dynamo.reset()
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(compiled(randn(5, 64)), layer(randn(5, 64)))


def test_export_keeps_the_op_and_the_symbolic_size(tmp_path: Path):
    layer = Layer()
    tokens = torch.export.Dim("tokens")
    program = torch.export.export(layer, (randn(4, 64),), dynamic_shapes=({0: tokens},))
    assert "sparse24.linear" in program.graph_module.code
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for n in (2, 9):
        assert torch.equal(loaded(randn(n, 64)), layer(randn(n, 64)))


@needs_a_compiler
def test_an_aot_inductor_package_runs_where_the_ops_are_registered(tmp_path: Path):
    """A package calls the op through PyTorch's dispatcher, so a process must import sparse24_plans.torch."""
    layer = Layer().requires_grad_(False)
    program = torch.export.export(layer, (randn(4, 64),), dynamic_shapes=({0: torch.export.Dim("tokens")},))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    loaded = torch._inductor.aoti_load_package(package)
    for n in (2, 9):
        torch.testing.assert_close(loaded(randn(n, 64)), layer(randn(n, 64)))
