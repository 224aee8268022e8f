"""Layers, models, tokens and meshes of the tests of several ranks, as each of the ranks makes them."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sparse24_plans.torch import ColwiseSparse24, RowwiseSparse24, Sparse24Linear

from .cases import same_bits

INVARIANT = {"batch_invariant": True}
K, M = 128, 192
PLAN = {"0": ColwiseSparse24(), "1": RowwiseSparse24(parts=4)}


@cache
def mesh_of(ranks: int) -> DeviceMesh:
    """The mesh that this rank is in: of all ranks, or of a row of them. A new one opens new connections."""
    if ranks == dist.get_world_size():
        return init_device_mesh("cpu", (ranks,))
    return init_device_mesh("cpu", (dist.get_world_size() // ranks, ranks), mesh_dim_names=("rows", "tp"))[
        "tp"
    ]


def layer(
    dtype: torch.dtype = torch.float32, bias: bool = True, m: int = M, k: int = K, seed: int = 1, **options
) -> Sparse24Linear:
    torch.manual_seed(seed)
    return Sparse24Linear.from_linear(nn.Linear(k, m, bias, dtype=dtype), **options)


def tokens(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 2) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def part(tensor: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    return tensor.chunk(mesh.size(), dim)[mesh.get_local_rank()]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    assert type(one) is torch.Tensor
    return same_bits(one, other)


def pack(one: Sparse24Linear) -> Sparse24Linear:
    """Pack the layer as a GPU holds a frozen 16-bit layer."""
    values, meta = one._held()
    one.packed = torch.ops.sparse24.pack(values.detach(), meta)
    one.values = one.metadata = None
    return one


def model(seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(seed)
    linears = nn.Linear(K, M, dtype=dtype), nn.Linear(M, 64, dtype=dtype)
    return nn.Sequential(*(Sparse24Linear.from_linear(linear, require=INVARIANT) for linear in linears))
