"""Experts whose 2:4 weights are stored in 4 or 8 bits: products, gradients, swapped models, saved folders."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import nn  # noqa: E402

from sparse24_plans import InvalidProblemError, UnsupportedError, compress_checkpoint  # noqa: E402
from sparse24_plans.torch import (  # noqa: E402
    Sparse24Experts,
    Sparse24Recipe,
    Sparse24WeightOnlyLinear,
    from_pretrained,
    load_sparse24,
    loading,
    to_sparse24,
)
from sparse24_plans.torch.experts import STACKS  # noqa: E402
from sparse24_plans.weights.packed_layouts import Quantization  # noqa: E402

from .cases import DEVICES  # noqa: E402
from .expert_cases import DenseExperts, case, pickled, pruned, randn, routed, same_experts  # noqa: E402

grouped_mm = torch.ops.sparse24.grouped_mm
STRICT = {"prefer_kernel": "host_strict"}
"""The kernel whose bits are the same whenever its operands are."""
STORED = pytest.mark.parametrize("stored", ["s4", "s8", "fp8_e4m3"])


def as_16_bits(dense: DenseExperts, sparse: Sparse24Experts) -> Sparse24Experts:
    """The experts with weights of 16 bits that are what the stored values stand for."""
    wishes = {"preference": sparse.down_proj.preference}
    return Sparse24Experts.from_experts(pruned(dense, sparse), method="compress", **wishes)


@STORED
@pytest.mark.parametrize(
    ("group", "dtype"),
    [*((group, torch.bfloat16) for group in (0, 32, 64, 128)), (32, torch.float16)],
    ids=str,
)
def test_results_are_those_of_the_weights_that_are_stood_for(stored, group, dtype):
    dense, sparse, x = case("cpu", dtype, stored=stored, group=group, preference=STRICT)
    routing = routed(len(x), 6, 2, "cpu")
    assert torch.equal(sparse(x, *routing), as_16_bits(dense, sparse)(x, *routing))
    for name in STACKS:
        plan = getattr(sparse, name).plan(5)
        desc = plan.descriptor
        assert (plan.kernel, desc.groups) == ("host_strict", 6)
        assert (desc.weight_element, desc.weight_group) == (stored, group)


@STORED
def test_gpus_of_compute_capability_90_have_a_kernel(stored):
    """The GPUs are assumed ones, because selection needs none."""
    experts = Sparse24Experts(6, 128, 64, stored=stored)
    for name in STACKS:
        assert getattr(experts, name).plan_on("h200", 37).kernel == "wgmma_sp_grouped"
        with pytest.raises(UnsupportedError, match=f"multiplies no weight of {stored}"):
            getattr(experts, name).plan_on("a100")


@STORED
@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_a_gpu_multiplies_the_stored_values(stored, device):
    dense, sparse, x = case(device, stored=stored, group=32)
    index, weights = routed(len(x), 6, 2, device)
    got = sparse(x, index, weights)
    wanted = pruned(dense, sparse)(x, index, weights)
    assert sparse.down_proj.plan().kernel == "wgmma_sp_grouped"
    assert (got.double() - wanted).norm() / wanted.norm() < 4 * torch.finfo(x.dtype).eps


@STORED
@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(), nn.GELU("tanh")])
def test_gradients_are_those_of_the_dequantized_weights(stored, activation):
    dense = DenseExperts(6, 128, 64, torch.bfloat16, "cpu")
    dense.act_fn = activation
    sparse = Sparse24Experts.from_experts(dense, stored=stored, group=32, preference=STRICT)
    index, weights = routed(20, 6, 2, "cpu")
    grads = []
    for module in (sparse, as_16_bits(dense, sparse)):
        x, factors = randn(20, 128).bfloat16().requires_grad_(), weights.clone().requires_grad_()
        module(x, index, factors).float().square().sum().backward()
        grads.append((x.grad, factors.grad))
    for got, wanted in zip(*grads, strict=True):
        assert got.any()
        assert torch.equal(got, wanted)


def test_four_bits_take_the_bytes_that_they_say():
    _, sparse, _ = case("cpu", stored="s4", group=32)
    kept = 6 * 128 * 128 // 2
    assert sparse.gate_up_proj.weight_bytes == kept // 2 + kept // 2 + 2 * 6 * 128 * 4


@STORED
@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "state_dict", "meta", "to"])
def test_a_copy_has_the_bits(stored, copied):
    _, sparse, _ = case("cpu", stored=stored, group=32)
    if copied == "deepcopy":
        other = copy.deepcopy(sparse)
    elif copied == "pickle":
        other = pickled(sparse)
    elif copied == "to":
        other = copy.deepcopy(sparse).float()
    else:
        device = "meta" if copied == "meta" else "cpu"
        other = Sparse24Experts(6, 128, 64, stored=stored, group=32, device=device)
        other.load_state_dict(sparse.state_dict(), assign=copied == "meta")
    assert "gate_up_proj.weight.scales24" in other.state_dict()
    assert same_experts(other, sparse)


def test_stored_experts_compile_whole():
    _, sparse, x = case("cpu", stored="s4", group=64)
    routing = routed(len(x), 6, 2, "cpu")
    torch._dynamo.reset()
    compiled = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x, *routing), sparse(x, *routing))


def test_new_stored_experts_are_zero():
    x = randn(5, 128).bfloat16()
    assert not Sparse24Experts(6, 128, 64, stored="s4")(x, *routed(5, 6, 2, "cpu")).any()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: case("cpu", torch.float32, stored="s4"), UnsupportedError, "dtype: expected one of"),
        (lambda: Sparse24Experts(2, 64, 64, stored="f16"), InvalidProblemError, "stored: expected one of"),
        (lambda: Sparse24Experts(2, 64, 64, stored="s4", group=48), InvalidProblemError, "group: expected"),
    ],
)
def test_arguments_that_no_stored_experts_have_are_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


# The op -------------------------------------------------------------------------------------------


def operands(device: str, stored: str = "s4") -> tuple:
    linear = nn.Linear(64, 512, False).to(device, torch.bfloat16)
    layer = Sparse24WeightOnlyLinear.from_linear(linear, stored=stored, group=32)
    values, meta = layer.canonical()
    offsets = torch.tensor([0, 5, 5, 19, 20], dtype=torch.int32, device=device)
    x = torch.randn(20, 64, device=device, dtype=torch.bfloat16)
    return x, values.detach(), meta, offsets, layer.scales


@STORED
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["none", "swiglu"])
def test_each_group_is_multiplied_by_its_rows_of_stored_weight(stored, device, activation):
    x, values, meta, offsets, scales = operands(device, stored)
    y = grouped_mm(x, values, meta, offsets, activation=activation, scales=scales, group=32)
    for group, (begin, end) in enumerate([(0, 5), (5, 5), (5, 19), (19, 20)]):
        own = slice(128 * group, 128 * (group + 1))
        parts = values[own], meta[own], scales[own]
        wanted = torch.ops.sparse24.weight_only_linear(x[begin:end], *parts, None, 32, activation)
        assert torch.allclose(y[begin:end].float(), wanted.float(), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(20, 64)}, r"x: expected torch\.float16 or torch\.bfloat16, got torch\.float32"),
        ({"scales": torch.ones(512, 2, dtype=torch.float16)}, r"scales: expected torch\.bfloat16 or"),
        ({"scales": torch.ones(512, 3, dtype=torch.bfloat16)}, r"scales: expected shape \[512, 2\]"),
        ({"weight": torch.zeros(512, 16)}, "weight: expected values of"),
        ({"group": 48}, "weight_group: expected"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, words):
    x, weight, meta, offsets, scales = operands("cpu")
    given = {"x": x, "weight": weight, "meta": meta, "offsets": offsets, "scales": scales, "group": 32}
    with pytest.raises(InvalidProblemError, match=words):
        grouped_mm(**given | change)


def test_fake_results_have_the_shape_and_dtype():
    from torch._subclasses.fake_tensor import FakeTensorMode

    plain = operands("cpu")
    with FakeTensorMode() as mode:
        x, values, meta, offsets, scales = (mode.from_tensor(one) for one in plain)
        y = grouped_mm(x, values, meta, offsets, activation="swiglu", scales=scales, group=32)
    assert (tuple(y.shape), y.dtype) == ((20, 64), torch.bfloat16)


# Models -------------------------------------------------------------------------------------------

RECIPE = Sparse24Recipe(stored="s4", group=32)
MODELS = pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE", "DeepSeek-V3"])


def experts_of(model: nn.Module) -> list[Sparse24Experts]:
    return [one for one in model.modules() if isinstance(one, Sparse24Experts)]


def form_of(experts: Sparse24Experts) -> set:
    return {getattr(getattr(experts, name), "quantization", None) for name in STACKS}


@pytest.fixture
def architectures():
    pytest.importorskip("transformers", minversion="5.8")
    from . import architectures

    return architectures


@pytest.fixture
def folder(architectures, tmp_path) -> Path:
    """A Mixtral, published with the matrices of each expert, whose values are stored in 4 bits."""
    architectures.dense_model(architectures.CASES["Mixtral"]).save_pretrained(tmp_path / "dense")
    compress_checkpoint(tmp_path / "dense", tmp_path / "s4", weights="s4", group=32, device="host")
    return tmp_path / "s4"


@MODELS
def test_a_recipe_stores_the_values_of_a_models_experts(architectures, name):
    case = architectures.CASES[name]
    model = architectures.dense_model(case)
    report = to_sparse24(model, recipe=RECIPE)
    found = experts_of(model)
    assert found
    assert all(form_of(one) == {Quantization("s4", 32, "bf16")} for one in found)
    entries = [one for one in report.layers if one.name.endswith(".experts.gate_up_proj")]
    assert len(entries) == len(found)
    # Each 32 columns take 8 bytes of values, 8 of metadata, a scale of 2, in place of 64.
    assert all(one.sparse_bytes == one.dense_bytes * 18 // 64 for one in entries)
    assert all(0.5 < one.kept_energy < 1 for one in entries)
    plain = architectures.dense_model(case)
    to_sparse24(plain)
    for one, other in zip(found, experts_of(plain), strict=True):
        for name, weight in one.dense_weights().items():
            wanted = other.dense_weights()[name].float()
            assert 0 < (weight.float() - wanted).norm() < 0.2 * wanted.norm()
    assert architectures.result(model, case).isfinite().all()


def test_float32_experts_stay_dense_with_the_reason(architectures):
    model = architectures.dense_model(architectures.CASES["Mixtral"]._replace(dtype=torch.float32))
    report = to_sparse24(model, recipe=RECIPE)
    assert not experts_of(model)
    reason = report.skipped["model.layers.0.mlp.experts.down_proj"]
    assert "values in s4 need a weight of float16 or bfloat16" in reason


@pytest.mark.parametrize("how", ["dequantize", "16-bit experts", "without a kernel"])
def test_stored_experts_become_16_bits_with_a_warning(folder, architectures, monkeypatch, caplog, how):
    model, options = architectures.dense_model(architectures.CASES["Mixtral"]), {}
    stored = from_pretrained(folder)
    if how == "dequantize":
        options = {"dequantize": True}
    elif how == "16-bit experts":
        to_sparse24(model, include=["*experts"])
    else:  # the kernel is asked for as it is for a GPU
        monkeypatch.setattr(loading, "no_kernel", lambda *_, stored=None, **__: stored and "no kernel")
    load_sparse24(model, folder, **options)
    assert "loaded as 2:4 weights of 16 bits: model.layers" in caplog.text
    assert "experts.*.w2.weight (8)" in caplog.text
    for one, other in zip(experts_of(model), experts_of(stored), strict=True):
        assert form_of(one) == {None} != form_of(other)
        assert all(
            torch.equal(weight, other.dense_weights()[name]) for name, weight in one.dense_weights().items()
        )


def test_state_dict_in_file_is_loaded_into_stored_experts(architectures, tmp_path):
    case = architectures.CASES["Mixtral"]
    model, other = (architectures.dense_model(case) for _ in range(2))
    for one in (model, other):
        to_sparse24(one, recipe=RECIPE)
    save_file(model.state_dict(), tmp_path / "state.safetensors")
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.zero_()
    load_sparse24(other, tmp_path / "state.safetensors")
    assert torch.equal(architectures.result(other, case), architectures.result(model, case))


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Sparse24Recipe(stored="s8", group=32), "experts: expected s8 with bf16 scales of groups of 32"),
        (Sparse24Recipe(stored="s4", group=64), "experts: expected s4 with bf16 scales of groups of 64"),
    ],
)
def test_other_quantization_than_the_experts_is_refused_before_anything_changes(
    folder, architectures, recipe, words
):
    model = architectures.dense_model(architectures.CASES["Mixtral"])
    to_sparse24(model, include=["*experts"], recipe=recipe)
    before = copy.deepcopy(experts_of(model)[0].state_dict())
    with pytest.raises(InvalidProblemError, match=words):
        load_sparse24(model, folder)
    for key, tensor in experts_of(model)[0].state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), before[key].view(torch.uint8))


def test_experts_that_differ_in_form_become_16_bits(folder, architectures, caplog):
    """transformers' loader, whose converter takes stacks of one form, refuses them by name."""
    compress_checkpoint(folder.parent / "dense", folder.parent / "s8", weights="s8", group=32, device="host")
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    both = [one / "model.safetensors" for one in (folder, folder.parent / "s8")]
    with safe_open(both[0], "pt") as one, safe_open(both[1], "pt") as other:
        notes = {**one.metadata(), f"sparse24.{name}": other.metadata()[f"sparse24.{name}"]}
    tensors, others = (load_file(one) for one in both)
    tensors |= {key: one for key, one in others.items() if key.startswith(name)}
    save_file(tensors, both[0], notes)
    model = from_pretrained(folder)
    assert [form_of(one) for one in experts_of(model)] == [{Quantization("s4", 32, "bf16")}, {None}]
    assert "loaded as 2:4 weights of 16 bits: model.layers.*.block_sparse_moe.experts" in caplog.text
    assert "w2.weight (4)" in caplog.text
    with pytest.raises(UnsupportedError, match=r"layers\.1\..*experts.*expected a linear layer for a weight"):
        architectures.CASES["Mixtral"].auto.from_pretrained(folder, dtype="auto")
