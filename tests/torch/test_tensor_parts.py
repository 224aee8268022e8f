"""The parts of a ``Sparse24Tensor``: checked when it is made, saved, loaded, hashed for compiled code."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparse24_plans import FormatError, InvalidProblemError, UnsupportedError
from sparse24_plans.torch import Sparse24Tensor
from sparse24_plans.torch.tensor import PARTS, load_tensor

from .cases import DEVICE, FLOATS, integers, pruned, randn

M, K = 16, 24
TYPES = [*FLOATS, torch.int8, torch.float8_e4m3fn]


def sparse(dtype: torch.dtype = torch.float32) -> Sparse24Tensor:
    return Sparse24Tensor.from_dense(pruned(integers(M, K)).to(dtype))


def tiles() -> Sparse24Tensor:
    return Sparse24Tensor.prune_dense_static_sort(randn(M, K))


def parts_of(tensor: Sparse24Tensor) -> dict[str, Any]:
    return {name: getattr(tensor, name) for name in PARTS}


# Making one -----------------------------------------------------------------------------------------

WRONG: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    r"shape: expected the two sizes \[M, K\], got 'mk'": lambda p: {"shape": "mk"},
    r"shape: expected the two sizes \[M, K\], got \(16, 24, 1\)": lambda p: {"shape": (M, K, 1)},
    r"shape: expected the two sizes \[M, K\], got \(-16, 24\)": lambda p: {"shape": (-M, K)},
    r"shape: expected the two sizes \[M, K\], got \(16.0, 24\)": lambda p: {"shape": (16.0, K)},
    r"packed: expected parts of a matrix \[8, 24\], got those of \[16, 24\]": lambda p: {"shape": (8, K)},
    "packed: expected a tensor or None": lambda p: {"packed": [1.0]},
    "packed: expected a dtype of 2:4 matrices, got torch.float64": lambda p: {"packed": p["packed"].double()},
    "packed: expected packed or packed_t": lambda p: dict.fromkeys(PARTS),
    "meta: expected None without packed": lambda p: {"packed": None},
    r"meta: expected int16 or uint16 \[16, 3\]": lambda p: {"meta": p["meta"][:8]},
    "meta: expected int16 or uint16": lambda p: {"meta": p["meta"].float()},
    "meta_t: expected a tensor, got None": lambda p: {"meta_t": None},
    r"packed_t: expected parts of a matrix \[24, 16\], got those of \[16, 24\]": lambda p: {
        "packed_t": p["packed"],
        "meta_t": p["meta"],
    },
    "packed_t: expected torch.float32 on": lambda p: {"packed_t": p["packed_t"].half()},
    "packed_t: expected torch.float32 on .* got torch.float32 on meta": lambda p: {
        name: p[name].to("meta") for name in ("packed_t", "meta_t")
    },
    r"bitmask: expected uint8 \[2, 3, 8\] or larger, got torch.uint8 \[3, 2, 8\]": lambda p: {
        "compressed_swizzled_bitmask": p["compressed_swizzled_bitmask"].transpose(0, 1)
    },
    r"bitmask: expected uint8 \[2, 3, 8\] or larger, got torch.int8": lambda p: {
        "compressed_swizzled_bitmask": p["compressed_swizzled_bitmask"].char()
    },
    "bitmask: expected uint8 .* got 'mask'": lambda p: {"compressed_swizzled_bitmask": "mask"},
    "bitmask: expected a tensor on": lambda p: {
        "compressed_swizzled_bitmask": p["compressed_swizzled_bitmask"].to("meta")
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_parts_that_do_not_fit_are_refused(message):
    parts = parts_of(tiles())
    given = {"shape": (M, K), **parts, **WRONG[message](parts)}
    with pytest.raises(InvalidProblemError, match=message):
        Sparse24Tensor(**given)


def test_parts_that_fit_are_taken_as_they_are():
    parts = parts_of(tiles())
    for names in (PARTS, PARTS[:2], PARTS[2:4]):
        some = {name: parts[name] if name in names else None for name in PARTS}
        tensor = Sparse24Tensor((M, K), **some)
        assert all(getattr(tensor, name) is some[name] for name in PARTS)
        assert torch.equal(tensor.to_dense(), tiles().to_dense())


# Saved and loaded -----------------------------------------------------------------------------------


def saved(thing: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


def assert_same_parts(one: Sparse24Tensor, other: Sparse24Tensor) -> None:
    assert type(one) is type(other) is Sparse24Tensor
    assert (one.shape, one.dtype, one.requires_grad) == (other.shape, other.dtype, other.requires_grad)
    assert (one.alg_id_cusparselt, one.fuse_transpose_cusparselt) == (
        other.alg_id_cusparselt,
        other.fuse_transpose_cusparselt,
    )
    for name in PARTS:
        found, wanted = getattr(one, name), getattr(other, name)
        assert (found is None) == (wanted is None)
        if found is not None:
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_weights_only_loading_gives_the_tensor_back(dtype):
    assert_same_parts(saved(sparse(dtype)), sparse(dtype))
    assert_same_parts(saved({"a": [sparse(dtype).t()]})["a"][0], sparse(dtype).t())


def test_all_parts_options_and_attributes_are_kept():
    tensor = Sparse24Tensor((M, K), *parts_of(tiles()).values(), True, 7, True)
    tensor.label = "up"
    found = saved(tensor)
    assert_same_parts(found, tensor)
    assert found.label == "up"
    parameter = saved(nn.Parameter(tiles(), requires_grad=False))
    assert isinstance(parameter, nn.Parameter)
    assert_same_parts(pickle.loads(pickle.dumps(tensor)), tensor)
    assert_same_parts(copy.deepcopy(tensor), tensor)


def test_a_models_state_is_loaded_into_another_model():
    first, second = (nn.Linear(K, M, device=DEVICE) for _ in range(2))
    for layer in (first, second):
        layer.weight = nn.Parameter(Sparse24Tensor.from_dense(pruned(layer.weight.data)), requires_grad=False)
    second.load_state_dict(saved(first.state_dict()), assign=True)
    assert torch.equal(second(randn(3, K)), first(randn(3, K)))


def test_a_file_is_loaded_onto_another_device():
    found = saved(tiles(), map_location="meta")
    assert (found.device.type, found.packed.device.type) == ("meta", "meta")
    assert_same_parts(saved(tiles(), map_location=DEVICE), tiles())


def broken(**change: Any) -> Any:
    """Return something that is pickled as a tensor with other arguments."""

    class Broken:
        def __reduce__(self):
            names = ("shape", *PARTS, "fused", "algorithm", "requires_grad", "attributes")
            arguments = dict(zip(names, tiles().__reduce_ex__(2)[1], strict=True))
            return load_tensor, tuple({**arguments, **change}.values())

    return Broken()


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"shape": (8, K)}, InvalidProblemError, "packed: expected parts of a matrix"),
        ({"packed": None, "packed_t": None}, InvalidProblemError, "meta: expected None"),
        ({"meta": torch.full((M, K // 8), 5, dtype=torch.int16)}, FormatError, "row 0"),
        ({"meta_t": torch.zeros((K, M // 8), dtype=torch.int16)}, FormatError, "row 0"),
        ({"attributes": [("packed", None)]}, InvalidProblemError, "attributes: expected a dict"),
    ],
    ids=str,
)
def test_a_hostile_file_is_refused(change, kind, message):
    with pytest.raises(kind, match=message):
        saved(broken(**{n: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for n, v in change.items()}))


# Memory ---------------------------------------------------------------------------------------------


def test_setting_data_is_refused_instead_of_changing_nothing():
    tensor, wanted = tiles(), tiles().to_dense()
    assert_same_parts(tensor.data, tensor)
    assert not tensor.requires_grad_().data.requires_grad
    for other in (sparse(), wanted):
        with pytest.raises(UnsupportedError, match="data: a Sparse24Tensor keeps its parts"):
            tensor.data = other
    assert torch.equal(tensor.to_dense(), wanted)


def test_a_model_whose_tensors_become_dense_says_what_to_do():
    layer = nn.Linear(K, M, device=DEVICE)
    layer.weight = nn.Parameter(tiles(), requires_grad=False)
    with pytest.raises(UnsupportedError, match="set_overwrite_module_params_on_conversion"):
        layer.to("cpu", torch.float16)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        layer.to("cpu", torch.float16)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert torch.equal(layer.weight, tiles().to_dense().half().cpu())


@pytest.mark.skipif(DEVICE != "cpu", reason="memory of a GPU is shared already")
def test_a_model_shares_its_parts_with_processes():
    layer = nn.Linear(K, M)
    layer.weight = nn.Parameter(tiles(), requires_grad=False)
    before = layer(randn(3, K))
    assert not layer.weight.is_shared()
    assert layer.share_memory() is layer
    assert layer.weight.is_shared()
    assert all(part.is_shared() for part in parts_of(layer.weight).values())
    assert torch.equal(layer(randn(3, K)), before)


def test_dlpack_gives_no_null_address():
    tensor = sparse()
    with pytest.raises(UnsupportedError, match="to_dense"):
        np.from_dlpack(tensor)
    with pytest.raises(UnsupportedError, match="to_dense"):
        tensor.__dlpack__()


# Compiled code --------------------------------------------------------------------------------------


def test_compiling_warns_of_no_missing_hash():
    torch._dynamo.reset()
    layer = nn.Linear(K, M, device=DEVICE)
    layer.weight = nn.Parameter(sparse(), requires_grad=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.compile(layer, backend="inductor", fullgraph=True)(randn(3, K))
    assert not [one for one in said if "_stable_hash" in str(one.message)]


HASHED = """
from tests.torch.test_tensor_parts import tiles
print(tiles()._stable_hash_for_caching())
"""


def test_the_hash_follows_all_that_compiled_code_depends_on(monkeypatch):
    """The hash depends on no value, no address, and not on Python's own seed of hashes."""
    known = tiles()._stable_hash_for_caching()
    again = subprocess.run([sys.executable, "-c", HASHED], capture_output=True, text=True, check=True)
    assert again.stdout.strip() == known
    assert Sparse24Tensor.prune_dense_static_sort(2 * randn(M, K))._stable_hash_for_caching() == known
    others = {
        "another shape": lambda: Sparse24Tensor.prune_dense_static_sort(randn(M, 2 * K)),
        "another dtype": lambda: tiles().half(),
        "fewer parts": sparse,
        "a transpose": lambda: tiles().t(),
        "a gradient": lambda: tiles().requires_grad_(),
    }
    found = {make()._stable_hash_for_caching() for make in others.values()}
    assert len(found - {known}) == len(others)
    monkeypatch.setattr(Sparse24Tensor, "SPARSE_DISPATCH", Sparse24Tensor.SPARSE_DISPATCH)
    Sparse24Tensor._load_dispatch_table({torch.ops.aten.neg: lambda func, types, args, kwargs: args[0]})
    assert tiles()._stable_hash_for_caching() not in {known, *found}
