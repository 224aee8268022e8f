"""Foreign formats against the code that writes them: PyTorch, compressed-tensors, cuSPARSELt.

If these are not installed, they are tested against the fixtures in ``interop/``, which the same writers
wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from sparse24_plans import ElementKind, Sparse24Weight
from sparse24_plans.formats.convert import from_foreign, to_foreign
from sparse24_plans.formats.product import from_product

from ..support import same_bits

FIXTURES = Path(__file__).parent / "interop"


def fixture(name: str) -> dict[str, dict[str, np.ndarray]]:
    """A fixture's cases: case -> part -> array."""
    cases: dict[str, dict[str, np.ndarray]] = {}
    with safetensors.safe_open(FIXTURES / f"{name}.safetensors", "numpy") as file:
        for key in file.keys():  # noqa: SIM118
            case, _, part = key.rpartition(".")
            cases.setdefault(case, {})[part] = file.get_tensor(key)
    return cases


def without_negative_zeros(dense: np.ndarray) -> np.ndarray:
    bits = dense.view(f"u{dense.dtype.itemsize}").copy()
    bits[np.asarray(dense == 0)] = 0
    return bits


def assert_same_matrix(weight: Sparse24Weight, dense: np.ndarray) -> None:
    """All bits but the signs of zeros, and a weight that is valid."""
    weight.validate()
    got, expected = without_negative_zeros(weight.decompress()), without_negative_zeros(dense)
    assert same_bits(got, expected)


# PyTorch's CUTLASS backend ------------------------------------------------------------------------

TORCH_CUTLASS = fixture("torch_cutlass")


@pytest.mark.parametrize("case", TORCH_CUTLASS)
def test_pytorch_wrote_what_we_read(case):
    parts = dict(TORCH_CUTLASS[case])
    dense = parts.pop("dense")
    weight = from_foreign("torch_cutlass", parts)
    assert_same_matrix(weight, dense)
    assert same_bits(from_foreign("torch_cutlass", to_foreign("torch_cutlass", weight)).values, weight.values)


def test_we_write_what_pytorch_wrote():
    """Every group of this fixture has two non-zeros, so there is one way to write it."""
    parts = dict(TORCH_CUTLASS["full"])
    written = to_foreign("torch_cutlass", Sparse24Weight.compress(parts.pop("dense")))
    assert written.keys() == parts.keys()
    for name, part in parts.items():
        assert same_bits(written[name], part)


def test_negative_zeros_that_pytorch_stored_are_kept():
    """A fixture keeps negative zeros. They are bits of the dense matrix like any others."""
    parts = dict(TORCH_CUTLASS["f16"])
    dense = parts.pop("dense")
    got = from_foreign("torch_cutlass", parts).decompress()
    negative = np.signbit(got) & (got == 0)
    assert negative.any()
    assert (np.signbit(dense) & (dense == 0))[negative].all()


# The tile packer and cuSPARSELt, written on a GPU -------------------------------------------------

TORCH_TILE = fixture("torch_tile")


def pruned_by(bitmask_parts: dict[str, np.ndarray], dense: np.ndarray) -> np.ndarray:
    """The cells of ``dense`` that the writer's own bitmask keeps. VENDOR.md has the order of its bits."""
    mask = bitmask_parts["bitmask"]
    kept = np.zeros(dense.shape, bool)
    for row, column in np.ndindex(dense.shape):
        word = mask[row // 8, column // 8].view("<u2")[2 * (row % 8 // 4) + column % 8 // 4]
        kept[row, column] = word >> (column % 4 + 4 * (row % 4)) & 1
    return np.where(kept, dense, np.zeros((), dense.dtype))


@pytest.mark.parametrize("case", TORCH_TILE)
def test_the_tile_packer_wrote_what_we_read(case):
    parts = dict(TORCH_TILE[case])
    dense = parts.pop("dense")
    pruned = pruned_by(parts, dense)
    assert_same_matrix(from_foreign("torch_tile", parts, shape=dense.shape), pruned)
    transposed = {"packed": parts["packed_t"], "meta": parts["meta_t"]}
    assert_same_matrix(from_foreign("torch_tile", transposed, shape=dense.shape[::-1]), pruned.T.copy())


def test_cusparselts_order_for_sm_80():
    """W and its transpose, which lie in memory differently, are one matrix, and that of the bitmask."""
    parts = fixture("cusparselt_sm80")["bf16"]
    m, k = 128, 128
    weight = from_foreign("cusparselt_sm80", {"packed": parts["packed"]}, shape=(m, k))
    transposed = from_foreign("cusparselt_sm80", {"packed": parts["packed_t"]}, shape=(k, m))
    dense = weight.decompress()
    assert_same_matrix(transposed, dense.T.copy())
    assert same_bits(pruned_by(parts, np.ones((m, k))), (dense != 0).astype(float))


CUSPARSELT_SM90 = fixture("cusparselt_sm90")


@pytest.mark.parametrize("case", CUSPARSELT_SM90)
def test_cusparselts_order_for_sm_90(case):
    """The fixture has the library's metadata for known positions. Our metadata is the same."""
    codes, meta = (CUSPARSELT_SM90[case][part] for part in ("codes", "meta"))
    element = ElementKind(case.rsplit("_", 2)[0])
    m, k = codes.shape[0], 4 * codes.shape[1]
    values = np.random.default_rng(0).integers(1, 100, m * k // 2).astype(element.bits_dtype)
    blob = np.concatenate([values, meta.view(element.bits_dtype)])
    weight = from_foreign("cusparselt_sm90", {"packed": blob}, element=element, shape=(m, k))
    assert weight.metadata.view(np.uint8).tolist() == codes.tolist()
    assert weight.values.view(element.bits_dtype).reshape(-1).tolist() == values.tolist()
    ours = to_foreign("cusparselt_sm90", weight)["packed"].view(element.bits_dtype)
    assert ours.shape == blob.shape
    if m % 64 == 0 and k % 64 == 0:  # no padding
        assert same_bits(ours, blob)


# Live ---------------------------------------------------------------------------------------------


@pytest.fixture
def writers() -> Any:
    pytest.importorskip("torch", reason="PyTorch is not installed: the fixtures stand for it")
    from .interop import writers

    return writers


def numpy_of(tensor: Any, element: str) -> np.ndarray:
    bits = tensor.contiguous().cpu().view(_integers()[tensor.itemsize]).numpy()
    return bits.view(ElementKind(element).dtype)


def torch_of(array: np.ndarray, dtype: Any) -> Any:
    import torch

    return torch.from_numpy(array.view(f"i{array.dtype.itemsize}").copy()).view(dtype)


def _integers() -> dict[int, Any]:
    import torch

    return {1: torch.int8, 2: torch.int16, 4: torch.int32}


SHAPES = {"f32": (96, 64, 2), "f16": (64, 160, 4), "bf16": (32, 96, 4), "s8": (48, 192, 4)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("element", SHAPES)
def test_pytorch_both_ways(writers, element, seed):
    m, k, group = SHAPES[element]
    dense = writers.with_specials(writers.sparse(m, k, element, group=group, seed=seed))
    parts = writers.torch_cutlass(dense)
    weight = from_foreign("torch_cutlass", parts)
    theirs = writers.torch_cutlass_to_dense(parts)
    assert same_bits(weight.decompress(), numpy_of(theirs, element))
    ours = to_foreign("torch_cutlass", weight)
    meta = torch_of(ours["meta"], parts["meta"].dtype)
    read = writers.torch_cutlass_to_dense({"packed": torch_of(ours["packed"], dense.dtype), "meta": meta})
    assert same_bits(numpy_of(read, element), weight.decompress())


@pytest.mark.parametrize("element", ["f32", "f16", "bf16", "s8", "fp8_e4m3"])
def test_compressed_tensors_both_ways(writers, element):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors 0.10.2 is not installed")
    dense = writers.with_specials(writers.sparse(24, 64, element, seed=1))
    state = writers.compressed_tensors_model({"a.weight": dense}, {"a"})
    parts = {name.removeprefix("a."): part for name, part in state.items()}
    weight = from_foreign("compressed_tensors", parts)
    assert_same_matrix(weight, numpy_of(dense, element))
    ours = to_foreign("compressed_tensors", weight)
    again = from_foreign("compressed_tensors", ours)
    assert same_bits(again.values, weight.values)
    full = writers.sparse(24, 64, element, seed=2, full=True)
    theirs = writers.compressed_tensors_model({"a.weight": full}, {"a"})
    ours = to_foreign("compressed_tensors", Sparse24Weight.compress(numpy_of(full, element)))
    for name, part in ours.items():
        assert part.tobytes() == theirs[f"a.{name}"].reshape(-1).view(_integers()[1]).numpy().tobytes()


# Live, on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "k"), [(64, 128), (32, 64), (40, 192), (256, 512)])
@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_the_tile_packer_both_ways(writers, element, m, k):
    dense = writers.transposable(m, k, element, seed=m)
    parts = writers.torch_tile(dense.cuda())
    mask = {"bitmask": parts["bitmask"].cpu().numpy()}
    pruned = pruned_by(mask, numpy_of(dense, element))
    weight = from_foreign("torch_tile", parts, shape=(m, k))
    assert weight.device.kind == "cuda"
    assert_same_matrix(weight.to("host"), pruned)
    transposed = {"packed": parts["packed_t"], "meta": parts["meta_t"]}
    assert_same_matrix(from_foreign("torch_tile", transposed, shape=(k, m)).to("host"), pruned.T.copy())
    ours = {name: part.get() for name, part in to_foreign("torch_tile", weight).items()}
    assert_same_matrix(from_foreign("torch_tile", ours, element=element, shape=(m, k)), pruned)


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_the_tile_packer_in_cusparselts_order(writers, element):
    dense = writers.transposable(256, 384, element)
    parts = writers.torch_tile(dense.cuda(), use_cutlass=False)
    pruned = pruned_by({"bitmask": parts["bitmask"].cpu().numpy()}, numpy_of(dense, element))
    weight = from_foreign("cusparselt_sm80", {"packed": parts["packed"]}, shape=(256, 384))
    assert_same_matrix(weight.to("host"), pruned)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "k"), [(128, 128), (64, 256), (192, 320)])
@pytest.mark.parametrize("element", ["f16", "bf16", "s8", "fp8_e4m3"])
def test_cusparselts_blob_through_a_product(writers, element, m, k):
    import torch

    if not torch.backends.cusparselt.is_available():
        pytest.skip("this PyTorch has no cuSPARSELt")
    dense = writers.with_specials(writers.sparse(m, k, element))
    blob = writers.cusparselt(dense.cuda())["packed"]
    identity = torch.eye(k, device="cuda").to(dense.dtype).t()
    weight = from_product(blob, (m, k), lambda probe: torch._cslt_sparse_mm(probe, identity))
    assert_same_matrix(weight.to("host"), numpy_of(dense, element))


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "k"), [(128, 128), (64, 256), (192, 320), (32, 64), (64, 96)])
@pytest.mark.parametrize("element", ["f16", "bf16", "s8"])
def test_cusparselt_reads_what_we_write_for_sm_90(writers, element, m, k):
    import torch

    if torch.cuda.get_device_capability() != (9, 0) or not torch.backends.cusparselt.is_available():
        pytest.skip("needs compute capability 9.0 and a PyTorch with cuSPARSELt")
    if element == "s8" and k % 64:
        pytest.skip("K of 8-bit elements is a multiple of 64")
    dense = writers.sparse(m, k, element)
    theirs = from_foreign("cusparselt_sm90", writers.cusparselt(dense.cuda()), shape=(m, k))
    assert_same_matrix(theirs.to("host"), numpy_of(dense, element))
    ours = to_foreign("cusparselt_sm90", Sparse24Weight.compress(numpy_of(dense, element)))
    blob = torch_of(ours["packed"], dense.dtype).reshape(m, -1).cuda()
    identity = torch.eye(k, device="cuda").to(dense.dtype).t()
    assert torch.equal(torch._cslt_sparse_mm(blob, identity).cpu(), dense)


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["f16", "bf16", "s8"])
def test_conversions_on_a_gpu_give_the_bytes_of_the_host(writers, element):
    m, k, _ = SHAPES[element]
    host = from_foreign("torch_cutlass", writers.torch_cutlass(writers.sparse(m, k, element)))
    for name in ("torch_cutlass", "cutlass_sm90", "tilelang", "compressed_tensors"):
        expected = to_foreign(name, host)
        parts = to_foreign(name, host.to(0))
        for part, array in parts.items():
            assert array.get().tobytes() == expected[part].tobytes()
        back = from_foreign(name, parts, element=element).to("host")
        assert same_bits(back.values, host.values)
        assert same_bits(back.metadata, host.metadata)
