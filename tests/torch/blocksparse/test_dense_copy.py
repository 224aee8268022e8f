"""The dense copy that a block-sparse layer keeps for inference: when it is made, used, renewed and freed."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sparse24_plans import BlockSparseMatmulDescriptor, InvalidProblemError, explain  # noqa: E402
from sparse24_plans.torch.blocksparse import Linear, dense_copy  # noqa: E402

from .cases import close, randn  # noqa: E402

BITMAP = [[1, 0, 1], [0, 1, 0]]
COPY_BYTES = 32 * 48 * 2


@pytest.fixture
def always_dense(monkeypatch):
    """Plans are as on a device where a dense copy is faster for more than two rows."""
    monkeypatch.setattr(dense_copy, "_prefers_dense", lambda shape, longest, n, *about: n > 2)


class Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def made_layer(**options) -> Linear:
    torch.manual_seed(0)
    return Linear(32, 48, 16, BITMAP, bias=True, activation="silu", dtype=torch.float16, **options).eval()


def exact(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.linear(x.double(), layer.dense_weight().double(), layer.bias.double())
    return torch.nn.functional.silu(y)


@pytest.mark.usefixtures("always_dense")
def test_inference_keeps_a_copy_and_says_so():
    layer, x = made_layer(), randn(5, 32, dtype=torch.float16)
    assert layer.dense_copy_bytes == 0
    with torch.no_grad():
        close(layer(x), exact(layer, x))
        assert layer.dense_copy_bytes == COPY_BYTES
        assert f"dense_copy_bytes={COPY_BYTES}" in repr(layer)
        close(layer(x[None]), exact(layer, x)[None])
    assert "weight" in layer.state_dict()
    assert len(layer.state_dict()) == len(made_layer().state_dict())
    layer.train()
    assert layer.dense_copy_bytes == 0
    assert "dense_copy_bytes" not in repr(layer)


@pytest.mark.usefixtures("always_dense")
def test_nothing_is_kept_where_it_is_no_use():
    x = randn(5, 32, dtype=torch.float16)
    layer = made_layer()
    layer(x)  # gradients may be asked for
    assert layer.dense_copy_bytes == 0
    with torch.no_grad():
        layer(x[:2])  # so few rows are faster by kept blocks
        assert layer.dense_copy_bytes == 0
        layer.train()(x)
        assert layer.dense_copy_bytes == 0
        for other in (made_layer(dense_copy=False), made_layer().float()):
            other(x.to(other.weight.dtype))
            assert other.dense_copy_bytes == 0


@pytest.mark.usefixtures("always_dense")
@pytest.mark.parametrize("change", ["weight", "fused optimizer", "loaded", "mask", "moved"])
def test_a_copy_follows_the_weight_and_the_mask(change):
    layer, x = made_layer(), randn(5, 32, dtype=torch.float16)
    with torch.no_grad():
        before = layer(x)
        if change == "weight":
            layer.weight.mul_(2)
        elif change == "fused optimizer":
            layer.weight.grad = torch.ones_like(layer.weight)
            torch.optim.SGD([layer.weight], lr=1.0, fused=True).step()
        elif change == "loaded":
            layer.load_state_dict(
                {key: one * 3 if "layout" not in key else one for key, one in layer.state_dict().items()}
            )
        elif change == "mask":
            layer.layout.update(np.array(BITMAP)[::-1, ::-1])
        else:
            layer.weight.data = layer.weight.data + 1
        after = layer(x)
        assert not torch.equal(before, after)
        close(after, exact(layer, x))
    assert layer.dense_copy_bytes == COPY_BYTES


@pytest.mark.usefixtures("always_dense")
def test_a_copy_is_not_of_a_freed_weight_at_the_same_address():
    """A parametrized weight is a new tensor in each call."""
    layer, x = made_layer(), randn(5, 32, dtype=torch.float16)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    with torch.no_grad():
        for _ in range(100):
            layer.parametrizations.weight.original.neg_()
            close(layer(x), exact(layer, x))


@pytest.mark.usefixtures("always_dense")
def test_copies_and_pickles_of_a_layer_make_their_own():
    layer, x = made_layer(), randn(5, 32, dtype=torch.float16)
    with torch.no_grad():
        want = layer(x)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert other.dense_copy_bytes == 0
            assert torch.equal(other(x), want)
            assert other.dense_copy_bytes == COPY_BYTES
        assert layer.half().dense_copy_bytes == 0


def test_the_plan_for_a_packed_weight_decides():
    layer = Linear(4096, 4096, 16, np.random.default_rng(0).random((256, 256)) < 0.5, dtype=torch.bfloat16)
    for n in (1, 64, 1000, 8192):
        desc = BlockSparseMatmulDescriptor(
            op="dds", layout=layer.layout.layout, n=n, element="bf16", packed=True
        )
        about = layer.layout.sizes, desc.longest_panel, n, desc.element, desc.epilogue
        assert dense_copy._prefers_dense(*about, "h200") == (
            explain(desc, device="h200").chosen == "packed_dense"
        )
        assert not dense_copy._prefers_dense(*about, "host")
    assert dense_copy._prefers_dense(layer.layout.sizes, 0, 256, desc.element, desc.epilogue, "h200")


def test_flags_are_flags():
    for name in ("dense_copy", "weight_stays"):
        with pytest.raises(InvalidProblemError, match=f"{name}: expected True or False"):
            Linear(32, 48, 16, BITMAP, **{name: 1})


# On a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_copy_is_captured_only_if_weight_stays():
    torch.manual_seed(0)
    mask = torch.rand(256, 256) < 0.6
    layer = Linear(4096, 4096, 16, mask, bias=True, device="cuda", dtype=torch.bfloat16).eval()
    x = torch.randn(256, 4096, device="cuda").bfloat16()
    with torch.inference_mode():
        want = layer(x)
        assert layer.dense_copy_bytes == 32 << 20
        close(want.double(), x.double() @ layer.dense_weight().double().t() + layer.bias.double(), x.dtype)
    for stays in (False, True):
        layer.weight_stays = stays
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            layer(x)
            with torch.cuda.graph(graph):
                y = layer(x)
            graph.replay()
            close(y.double(), want.double(), x.dtype)
            layer.weight.neg_()
            graph.replay()
            close(y.double(), (want if stays else layer(x)).double(), x.dtype)
            layer.weight.neg_()
