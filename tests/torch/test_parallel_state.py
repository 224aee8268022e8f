"""The parts of a model that ranks hold are those of the whole, however it is saved, loaded or shared out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module

from sparse24_plans.torch import ColwiseSparse24, RowwiseSparse24, Sparse24Linear

from .parallel_cases import INVARIANT, PLAN, K, M, layer, mesh_of, model, part, same, tokens
from .rank_processes import four_ranks

world = pytest.fixture(four_ranks, scope="module")


def parallel_model(ranks: int, seed: int = 1) -> nn.Module:
    return parallelize_module(model(seed), mesh_of(ranks), PLAN)


def equal_states(cut: nn.Module, whole: nn.Module) -> bool:
    """Compare whole tensors without gathering them: no backend of PyTorch exchanges uint16."""
    own, pairs = cut.state_dict(), []
    assert own.keys() == whole.state_dict().keys()
    for name, tensor in whole.state_dict().items():
        found = own[name]
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        pairs.append((found.to_local(), distribute_part(tensor, found)))
    return all(torch.equal(*pair) for pair in pairs)


def distribute_part(tensor: torch.Tensor, like: DTensor) -> torch.Tensor:
    (placement,) = like.placements
    return tensor if isinstance(placement, Replicate) else part(tensor, like.device_mesh, placement.dim)


def saved(ranks: int, path: str) -> None:
    cut = parallel_model(ranks)
    assert equal_states(cut, model())
    dcp.save(cut.state_dict(), checkpoint_id=path)


def loaded(ranks: int, path: str) -> None:
    """Into a model of other values, on a mesh of so many ranks."""
    cut = parallel_model(ranks, seed=7)
    assert not equal_states(cut, model())
    state = get_model_state_dict(cut)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(cut, state)
    assert equal_states(cut, model())
    mesh = mesh_of(ranks)
    x = tokens(5, K, dtype=torch.bfloat16)
    want = parallelize_module(model(), mesh, PLAN)(x)
    assert same(cut(x), want)


def test_what_ranks_save_other_numbers_of_ranks_load(world, tmp_path):
    """One process without a group loads it too."""
    world.run(saved, 2, str(tmp_path / "of two"))
    world.run(saved, 4, str(tmp_path / "of four"))
    alone = model().state_dict()
    dcp.save(alone, checkpoint_id=str(tmp_path / "of one"), no_dist=True)
    for name in ("of one", "of two", "of four"):
        world.run(loaded, 4, str(tmp_path / name))
        world.run(loaded, 2, str(tmp_path / name))
        whole = model(seed=7)
        state = whole.state_dict()
        dcp.load(state, checkpoint_id=str(tmp_path / name), no_dist=True)
        whole.load_state_dict(state)
        assert all(torch.equal(t, alone[key]) for key, t in whole.state_dict().items())


def whole_states() -> None:
    """A whole state is cut where it is loaded; one of other shapes is refused, and nothing changes."""
    cut = parallel_model(2, seed=7)
    cut.load_state_dict(model().state_dict())
    assert equal_states(cut, model())
    bad = model().state_dict()
    bad["1.weight.values24"] = bad["1.weight.values24"][:, : M // 4]
    with pytest.raises(RuntimeError, match=r"expected a DTensor, or the whole \[64, 96\], got \[64, 48\]"):
        cut.load_state_dict(bad)
    assert equal_states(cut, model())


def test_a_whole_state_is_cut_where_it_is_loaded(world):
    world.run(whole_states)


def states_of_another_cut() -> None:
    mesh = mesh_of(2)
    for one, other in ((ColwiseSparse24, RowwiseSparse24), (RowwiseSparse24, ColwiseSparse24)):
        given = parallelize_module(layer(), mesh, one())
        cut = parallelize_module(layer(seed=7), mesh, other())
        cut.load_state_dict(given.state_dict())
        assert equal_states(cut, layer())


def test_a_state_that_is_cut_the_other_way_is_exchanged(world):
    world.run(states_of_another_cut)


def built_without_memory(path: str) -> None:
    """On the meta device, cut there, then given memory and loaded: no rank ever holds the whole."""
    torch.manual_seed(0)
    linears = [
        Sparse24Linear(a, b, device="meta", dtype=torch.bfloat16, require=INVARIANT)
        for a, b in ((K, M), (M, 64))
    ]
    cut = parallelize_module(nn.Sequential(*linears), mesh_of(2), PLAN)
    assert cut[0].values.is_meta
    assert cut[0].values.shape == (M // 2, K // 2)
    cut.to_empty(device="cpu")
    assert not cut(tokens(3, K, dtype=torch.bfloat16)).any()
    state = cut.state_dict()
    dcp.load(state, checkpoint_id=path)
    cut.load_state_dict(state)
    assert equal_states(cut, model())


def test_a_model_is_cut_before_it_has_memory(world, tmp_path):
    dcp.save(model().state_dict(), checkpoint_id=str(tmp_path / "whole"), no_dist=True)
    world.run(built_without_memory, str(tmp_path / "whole"))


def whose_weights(source: int | None) -> tuple[int, list[float]]:
    """The rank in its mesh, and its part of the bias; each rank comes with another model."""
    mesh = mesh_of(2)
    cut = parallelize_module(
        model(seed=mesh.get_local_rank()), mesh, {"0": ColwiseSparse24()}, src_data_rank=source
    )
    return mesh.get_local_rank(), cut[0].bias.tolist()


@pytest.mark.parametrize("source", [0, 1, None])
def test_the_ranks_take_the_weights_of_one_of_them(world, source):
    """Or each its own, as of PyTorch's styles."""
    for rank, bias in world.run(whose_weights, source):
        torch.manual_seed(rank if source is None else source)
        whole = nn.Linear(K, M, dtype=torch.bfloat16).bias
        assert bias == whole.chunk(2)[rank].tolist()


def moved() -> None:
    cut = parallel_model(2).half()
    assert cut[1].values.dtype == torch.float16
    assert "in_features on 2 ranks" in repr(cut)
    assert cut(tokens(3, K, dtype=torch.float16)).dtype == torch.float16


def test_a_cut_layer_changes_its_dtype_as_a_whole_one(world):
    world.run(moved)
