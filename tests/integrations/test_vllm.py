"""The plugin in vLLM's own layers and loaders, on CPU tensors: what it loads, computes, refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from .vllm_sources import stub_what_is_compiled  # noqa: E402

stub_what_is_compiled()
pytest.importorskip("vllm")

import vllm.envs as envs  # noqa: E402
import vllm.model_executor.parameter as vllm_parameter  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402
from vllm.model_executor.layers import linear as vllm_linear  # noqa: E402
from vllm.model_executor.layers.quantization import (  # noqa: E402
    _CUSTOMIZED_METHOD_TO_QUANT_CONFIG,
    QUANTIZATION_METHODS,
)
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper  # noqa: E402

from sparse24_plans import (  # noqa: E402
    FormatError,
    PlanPreference,
    Sparse24QuantizedWeight,
    Sparse24Weight,
    UnsupportedError,
    compress_checkpoint,
    convert_checkpoint,
    to_foreign,
)
from sparse24_plans.torch import (  # noqa: E402
    Sparse24Linear,
    Sparse24QuantizedLinear,
    Sparse24Recipe,
    Sparse24WeightOnlyLinear,
    save_sparse24,
    to_sparse24,
)

next(iter(entry_points(group="vllm.general_plugins", name="sparse24"))).load()()
from sparse24_plans.integrations.vllm import Sparse24VllmConfig  # noqa: E402

HIDDEN, HEADS, KV_HEADS, HEAD, INNER = 64, 4, 2, 32, 384
BF16, F8 = torch.bfloat16, torch.float8_e4m3fn
SIZES = {
    "qkv_proj": {"q_proj": HEADS * HEAD, "k_proj": KV_HEADS * HEAD, "v_proj": KV_HEADS * HEAD},
    "gate_up_proj": {"gate_proj": INNER, "up_proj": INNER},
}
FORMATS = ("sparse24", "compressed_tensors", "zeros")
"""Our form, theirs, and theirs with the zeros of the matrices stored."""
STACKED = {
    f".{part}.": (f".{merged}.", part[0] if merged == "qkv_proj" else at)
    for merged, parts in SIZES.items()
    for at, part in enumerate(parts)
}
GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
    "input_activations": {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    },
}


def tensors_of_a_model(dtype=BF16) -> dict[str, torch.Tensor]:
    """A dense model by the names of a checkpoint: merged layers apart."""
    shapes = {part: (rows, HIDDEN) for parts in SIZES.values() for part, rows in parts.items()}
    shapes |= {"o_proj": (HIDDEN, HEADS * HEAD), "down_proj": (HIDDEN, INNER)}
    found = {f"block.{name}.weight": torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    return found | {
        f"block.{name}.bias": torch.randn(shape[0], dtype=dtype) for name, shape in shapes.items()
    }


def saved(
    folder: Path, tensors: dict[str, torch.Tensor], form: str, element: str | None = None, **by
) -> Path:
    """A compressed checkpoint of the tensors in a form, by the package's own command."""
    dense, ours, theirs = (folder / name for name in ("dense", "sparse24", "theirs"))
    dense.mkdir()
    save_file(tensors, dense / "model.safetensors")
    (dense / "config.json").write_text("{}")
    compress_checkpoint(dense, ours, element=element, **by)
    if form == "sparse24":
        return ours
    if form == "zeros":
        return with_zeros(ours, theirs)
    convert_checkpoint(ours, theirs, from_format="sparse24", to_format=form)
    return theirs


def with_zeros(ours: Path, folder: Path) -> Path:
    """Our checkpoint as compressed-tensors writes it with stored zeros: dense, or ``float-quantized``."""
    from safetensors.torch import load_file

    tensors = load_file(ours / "model.safetensors")
    for name in [name.removesuffix(".values24") for name in tensors if name.endswith(".values24")]:
        parts = tensors.pop(f"{name}.values24"), tensors.pop(f"{name}.meta24").view(torch.int16)
        tensors[name] = torch.ops.sparse24.decompress(*parts)
    sparsity = {"format": "dense", "sparsity_structure": "2:4", "targets": ["Linear"], "ignore": ["lm_head"]}
    section = {"quant_method": "compressed-tensors", "sparsity_config": sparsity}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": section}))
    return folder


def change(folder: Path, name: str, new) -> None:
    """Replace a tensor of a checkpoint by what a function makes of it."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: new(tensors[name])}, folder / "model.safetensors")


def dense_of(folder: Path) -> dict[str, torch.Tensor]:
    """The matrices of a checkpoint as the package itself decompresses them, scaled, in float64."""
    from sparse24_plans.checkpoints.folder import ModelReader
    from sparse24_plans.torch.checkpoint_source import Source

    with ModelReader(folder) as reader:
        source = Source(reader, None)
        found = {name: source.tensor(name).double() for name in source.others}
        for name in source.weights:  # not by Source.tensor, which rounds what it has scaled
            dense = torch.ops.sparse24.decompress(*source.canonical(name)).double()
            found[name] = dense * found.get(f"{name}_scale", torch.ones(()))
    return found


@pytest.fixture
def at_rank(monkeypatch):
    """A function that makes vLLM take this process for a rank of so many."""

    def set_rank(rank: int, size: int) -> None:
        for module in (vllm_linear, vllm_parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)

    set_rank(0, 1)
    return set_rank


class Block(nn.Module):
    """The linear layers of a transformer's block, as vLLM's models make them."""

    def __init__(self, config, dtype=BF16) -> None:
        super().__init__()
        more = {"bias": True, "params_dtype": dtype, "quant_config": config, "return_bias": False}
        self.qkv_proj = vllm_linear.QKVParallelLinear(
            HIDDEN, HEAD, HEADS, KV_HEADS, prefix="block.qkv_proj", **more
        )
        self.gate_up_proj = vllm_linear.MergedColumnParallelLinear(
            HIDDEN, [INNER, INNER], prefix="block.gate_up_proj", **more
        )
        self.o_proj = vllm_linear.RowParallelLinear(HEADS * HEAD, HIDDEN, prefix="block.o_proj", **more)
        self.down_proj = vllm_linear.RowParallelLinear(INNER, HIDDEN, prefix="block.down_proj", **more)


class Model(nn.Module):
    def __init__(self, config, dtype=BF16) -> None:
        super().__init__()
        self.quant_config = config
        self.block = Block(config, dtype)


def config_for(folder: Path) -> Sparse24VllmConfig:
    """The configuration as vLLM makes it of a checkpoint's ``config.json``."""
    entry = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert entry["quant_method"] == "sparse24" or Sparse24VllmConfig.override_quantization_method(entry, None)
    config = Sparse24VllmConfig.from_config(entry)
    config.maybe_update_config(str(folder))
    config.packed_modules_mapping = {merged: list(parts) for merged, parts in SIZES.items()}
    return config


def load(folder: Path, dtype=BF16, process: bool = True) -> Model:
    """The model by vLLM's own loader, processed as vLLM does after loading."""
    from safetensors.torch import load_file

    model = Model(config_for(folder), dtype)
    mapper = WeightsMapper(orig_to_new_stacked=STACKED)
    weights = [one for file in sorted(folder.glob("*.safetensors")) for one in load_file(file).items()]
    loaded = AutoWeightsLoader(model).load_weights(iter(weights), mapper=mapper)
    assert loaded == set(dict(model.named_parameters()))
    for layer in model.block.children() if process else ():
        layer.quant_method.process_weights_after_loading(layer)
    return model


def own_part(dense, name: str, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rank's weight and bias of a layer, cut as tensor parallelism is defined."""
    if name in SIZES:
        parts = [
            torch.cat([dense[f"block.{part}.{kind}"].chunk(size)[rank] for part in SIZES[name]])
            for kind in ("weight", "bias")
        ]
        return parts[0], parts[1]
    return dense[f"block.{name}.weight"].chunk(size, 1)[rank], dense[f"block.{name}.bias"]


def test_the_entry_point_registers_the_method():
    assert "sparse24" in QUANTIZATION_METHODS
    assert _CUSTOMIZED_METHOD_TO_QUANT_CONFIG["sparse24"] is Sparse24VllmConfig


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("element", [None, "fp8_e4m3", "s8"])
def test_each_rank_computes_with_its_part_of_the_weight(tmp_path, at_rank, form, rank, size, element):
    folder = saved(tmp_path, tensors_of_a_model(), form, element)
    if form != "sparse24" and element:
        kind = {"type": "int" if element == "s8" else "float"}
        add_groups(folder, {part: GROUP[part] | kind for part in ("weights", "input_activations")})
    at_rank(rank, size)
    model, dense = load(folder), dense_of(tmp_path / "sparse24")
    for name, layer in model.block.named_children():
        assert type(layer.sparse24) is (Sparse24QuantizedLinear if element else Sparse24Linear)
        loaded = {"values24", "meta24", "compressed", "bitmask", "weight", "weight_scale"}
        assert not loaded & set(dict(layer.named_parameters(recurse=False)))
        weight, bias = own_part(dense, name, rank, size)
        torch.testing.assert_close(layer.sparse24.dense_weight().double(), weight, rtol=1e-6, atol=0)
        x = torch.randn(7, weight.shape[1], dtype=BF16)
        for given in (layer.bias, None):
            y = layer.quant_method.apply(layer, x, given)
            wanted = x.double() @ weight.T + (0 if given is None else bias)
            assert (y.dtype, y.shape) == (BF16, wanted.shape)
            off = (y.double() - wanted).norm() / wanted.norm()
            assert off < (0.05 if element else 0.004)


def ones_in(group: int):
    """Make a group of four columns of the first row have four non-zeros."""

    def changed(weight: torch.Tensor) -> torch.Tensor:
        weight[0, 4 * group : 4 * group + 4] = torch.ones(4).to(weight.dtype)
        return weight

    return changed


@pytest.mark.parametrize("element", [None, "fp8_e4m3", "s8"])
def test_matrix_with_zeros_that_is_not_2_4_stays_dense(tmp_path, at_rank, caplog, element):
    folder = saved(tmp_path, tensors_of_a_model(), "zeros", element)
    change(folder, "block.up_proj.weight", ones_in(3))
    change(folder, "block.o_proj.weight", ones_in(0))
    dense = dense_of(tmp_path / "sparse24")
    with caplog.at_level("INFO", "sparse24_plans.load"):
        model = load(folder)
    for name, line in (("up_proj", 3), ("o_proj", 0)):
        scale = dense.get(f"block.{name}.weight_scale", torch.ones(()))
        dense[f"block.{name}.weight"][0, 4 * line : 4 * line + 4] = 1.0 * scale.flatten()[0]
    levels = {one.levelname for one in caplog.records}
    assert levels == {"WARNING" if element else "INFO"}
    for row, name, group in ((INNER, "gate_up_proj", 3), (0, "o_proj", 0)):
        assert f"served dense: block.{name}: dense: expected at most 2" in caplog.text
        assert f"(row {row}, group {group})" in caplog.text
    kept = {name for name, layer in model.block.named_children() if layer.sparse24 is None}
    assert kept == {"gate_up_proj", "o_proj"}
    for name in kept:
        layer = model.block.get_submodule(name)
        weight, bias = own_part(dense, name, 0, 1)
        assert type(layer.weight) is nn.Parameter
        torch.testing.assert_close(layer.weight.double(), weight, rtol=2**-8, atol=0)
        x = torch.randn(5, weight.shape[1], dtype=BF16)
        for given in (layer.bias, None):
            wanted = x.double() @ weight.T + (0 if given is None else bias)
            y = layer.quant_method.apply(layer, x, given)
            assert (y.dtype, y.shape) == (BF16, wanted.shape)
            assert (y.double() - wanted).norm() < 0.006 * wanted.norm()


def test_a_matrix_with_zeros_that_no_kernel_serves_stays_dense(tmp_path, at_rank, monkeypatch, caplog):
    def refuse(self, *sizes):
        raise UnsupportedError("expected another GPU")

    folder = saved(tmp_path, tensors_of_a_model(), "zeros")
    monkeypatch.setattr(Sparse24Linear, "plan", refuse)
    with caplog.at_level("INFO", "sparse24_plans.load"):
        layer = load(folder).block.down_proj
    assert layer.sparse24 is None
    assert torch.equal(layer.weight.double(), dense_of(tmp_path / "sparse24")["block.down_proj.weight"])
    assert "served dense: block.down_proj: expected another GPU" in caplog.text


@pytest.mark.parametrize("minus", [False, True])
def test_zeros_with_a_sign_are_zeros(tmp_path, at_rank, minus):
    folder = saved(tmp_path, tensors_of_a_model(), "zeros", "fp8_e4m3")
    change(folder, "block.down_proj.weight", lambda one: (-one.float()).to(F8) if minus else one)
    assert type(load(folder).block.down_proj.sparse24) is Sparse24QuantizedLinear


def test_part_of_groups_is_no_reason_to_refuse_stored_zeros(tmp_path, at_rank):
    """Six columns a rank: what a rank has of a 2:4 matrix isn't 2:4, and stays dense."""
    config = config_for(saved(tmp_path, tensors_of_a_model(), "zeros"))
    at_rank(0, 64)
    layer = vllm_linear.RowParallelLinear(
        INNER, HIDDEN, quant_config=config, prefix="block.down_proj", params_dtype=BF16
    )
    layer.weight.data.fill_(1.0)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.sparse24 is None
    assert layer.weight.shape == (HIDDEN, 6)


STORED = pytest.mark.parametrize("stored", ["s4", "s8", "fp8_e4m3"])
PARTS = {"values24", "meta24", "scales24"}
"""Parameters of a layer while a weight with scales of groups is loaded."""


@STORED
@pytest.mark.parametrize("group", [0, 32, 64])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_each_rank_has_its_part_of_stored_values(tmp_path, at_rank, stored, group, rank, size):
    folder = saved(tmp_path, tensors_of_a_model(), "sparse24", weights=stored, group=group)
    at_rank(rank, size)
    model, dense = load(folder), dense_of(folder)
    for name, layer in model.block.named_children():
        assert type(layer.sparse24) is Sparse24WeightOnlyLinear
        assert layer.sparse24.weight_element == stored
        assert not PARTS & set(dict(layer.named_parameters(recurse=False)))
        weight, bias = own_part(dense, name, rank, size)
        assert torch.equal(layer.sparse24.dense_weight().double(), weight)
        groups = -(-weight.shape[1] // group) if group else 1
        assert layer.sparse24.quantization.scales_of_a_row(weight.shape[1]) == groups
        x = torch.randn(7, weight.shape[1], dtype=BF16)
        for given in (layer.bias, None):
            y = layer.quant_method.apply(layer, x, given)
            wanted = x.double() @ weight.T + (0 if given is None else bias)
            assert (y.dtype, y.shape) == (BF16, wanted.shape)
            assert (y.double() - wanted).norm() < 0.004 * wanted.norm()


@STORED
@pytest.mark.parametrize("group", [0, 128])
def test_stored_values_are_held_packed_where_kernels_read_them_so(
    tmp_path, at_rank, monkeypatch, stored, group
):
    """The layer holds a packed weight, as on a GPU. The CPU's kernels read the canonical weight, which the op
    makes from the packed one."""
    folder = saved(tmp_path, tensors_of_a_model(), "sparse24", weights=stored, group=group)
    plain = load(folder).block
    monkeypatch.setattr(Sparse24WeightOnlyLinear, "hold_packed", Sparse24WeightOnlyLinear._pack)
    for layer, other in zip(load(folder).block.children(), plain.children(), strict=True):
        held = layer.sparse24
        assert (held.values, held.metadata, held.scales) == (None, None, None)
        assert held.weight_bytes == held.packed.nbytes
        x = torch.randn(5, held.in_features, dtype=BF16)
        assert torch.equal(layer(x), other(x))


def test_group_scales_stay_exact_in_models_of_another_dtype(tmp_path, at_rank):
    from safetensors.torch import load_file

    folder = saved(tmp_path, tensors_of_a_model(), "sparse24", weights="s4", group=64)
    stored = load_file(folder / "model.safetensors")["block.down_proj.weight.scales24"]
    layer = load(folder, torch.float16).block.down_proj
    assert (stored.dtype, layer.sparse24.scales.dtype) == (BF16, torch.float32)
    assert torch.equal(layer.sparse24.scales, stored.float())
    assert layer(torch.randn(3, INNER, dtype=torch.float16)).dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_a_converted_marlin_24_checkpoint_is_served(tmp_path, at_rank, dtype):
    theirs, tensors = tmp_path / "theirs", tensors_of_a_model(torch.float16)
    theirs.mkdir()
    for name in [name for name in tensors if name.endswith(".weight")]:
        weight = Sparse24Weight.prune_compress(tensors.pop(name))
        group = 128 if weight.k == INNER else 0
        parts = to_foreign("marlin_24", Sparse24QuantizedWeight.quantize(weight, stored="s4", group=group))
        home = name.removesuffix("weight")
        tensors |= {f"{home}{part}": torch.from_numpy(array) for part, array in parts.items()}
    save_file(tensors, theirs / "model.safetensors")
    section = {"quant_method": "compressed-tensors", "format": "marlin-24"}
    config = {"torch_dtype": str(dtype).removeprefix("torch."), "quantization_config": section}
    (theirs / "config.json").write_text(json.dumps(config))
    ours = tmp_path / "ours"
    convert_checkpoint(theirs, ours, from_format="marlin_24", to_format="sparse24")
    dense = dense_of(ours)
    for name, layer in load(ours, dtype).block.named_children():
        weight, bias = own_part(dense, name, 0, 1)
        assert layer.sparse24.weight_element == "s4"
        assert torch.equal(layer.sparse24.dense_weight().double(), weight)
        x = torch.randn(3, weight.shape[1], dtype=dtype)
        wanted = x.double() @ weight.T + bias
        assert (layer(x).double() - wanted).norm() < 0.004 * wanted.norm()


def add_groups(folder: Path, group: dict, **more) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= {"config_groups": {"group_0": group}, **more}
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("static", [False, True])
def test_one_scale_for_each_merged_matrix(tmp_path, at_rank, static):
    """Scales of whole matrices stay those of their rows, and the inputs' scale is the largest."""
    from safetensors.torch import load_file

    folder = saved(tmp_path, tensors_of_a_model(), "sparse24", "fp8_e4m3")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    places = [name.removesuffix(".weight.values24") for name in tensors if name.endswith(".weight.values24")]
    for at, place in enumerate(places):
        tensors[f"{place}.weight_scale"] = torch.tensor([0.01 * (at + 1)])
        if static:
            tensors[f"{place}.input_scale"] = torch.tensor(0.02 * (at + 1))
    save_file(tensors, file, {"sparse24_format": "1"})
    model = load(folder)
    qkv = model.block.qkv_proj.sparse24
    wanted = [tensors[f"block.{part}.weight_scale"].expand(rows) for part, rows in SIZES["qkv_proj"].items()]
    assert torch.equal(qkv.weight_scale.flatten(), torch.cat(wanted))
    if static:
        largest = max(tensors[f"block.{part}.input_scale"] for part in SIZES["qkv_proj"])
        assert torch.equal(qkv.input_scale, largest[None])
    else:
        assert qkv.input_scale is None


@pytest.mark.parametrize("by", [{}, {"stored": "s8", "group": 32}], ids=["bf16", "s8"])
def test_a_saved_model_with_layers_left_dense(tmp_path, at_rank, by):
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.ModuleDict(
                {part: nn.Linear(HIDDEN, rows) for parts in SIZES.values() for part, rows in parts.items()}
                | {"o_proj": nn.Linear(HEADS * HEAD, HIDDEN), "down_proj": nn.Linear(INNER, HIDDEN)}
            )

    whole = Whole().to(BF16)
    to_sparse24(whole, exclude=["*.o_proj"], recipe=Sparse24Recipe(**by))
    save_sparse24(whole, tmp_path / "saved")
    model = load(tmp_path / "saved", process=False)
    assert type(model.block.o_proj.quant_method) is vllm_linear.UnquantizedLinearMethod
    assert torch.equal(model.block.o_proj.weight, whole.block["o_proj"].weight)
    layer = model.block.down_proj
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(3, INNER, dtype=BF16)
    assert torch.equal(layer(x), whole.block["down_proj"](x))


@pytest.mark.parametrize("by", [{}, {"element": "fp8_e4m3"}, {"weights": "s4"}], ids=["bf16", "fp8", "s4"])
def test_batch_invariance_is_required_of_the_kernels(tmp_path, at_rank, monkeypatch, by):
    folder = saved(tmp_path, tensors_of_a_model(), "sparse24", **by)
    assert not load(folder).block.qkv_proj.sparse24.preference.require.batch_invariant
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
    layer = load(folder).block.qkv_proj
    assert layer.sparse24.preference.require.batch_invariant
    assert layer.sparse24.plan(8).guarantee.batch_invariant
    x = torch.randn(33, HIDDEN, dtype=BF16)
    assert torch.equal(layer(x)[:1], layer(x[:1]))


@pytest.mark.parametrize("by", [{}, {"weights": "s4"}], ids=["bf16", "s4"])
def test_a_compiled_graph_holds_the_op(tmp_path, at_rank, by):
    layer = load(saved(tmp_path, tensors_of_a_model(), "sparse24", **by)).block.down_proj
    x = torch.randn(5, INNER, dtype=BF16)
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    assert torch.equal(compiled(x), layer(x))


def test_merged_matrices_of_different_forms_are_refused(tmp_path, at_rank):
    config = config_for(saved(tmp_path, tensors_of_a_model(), "sparse24"))
    del config.sparse["block.up_proj"]
    with pytest.raises(UnsupportedError, match=r"block\.gate_up_proj: expected one form"):
        Model(config)


def test_compressed_weights_outside_linear_layers_are_refused(tmp_path, at_rank):
    config = config_for(saved(tmp_path, tensors_of_a_model(), "sparse24"))
    assert config.get_quant_method(nn.Embedding(4, 4), "block.attn") is None
    with pytest.raises(UnsupportedError, match=r"block\.\w+_proj: expected a 2:4 weight of a linear layer"):
        config.get_quant_method(nn.Embedding(4, 4), "block")


def test_stored_16_bit_zeros_outside_linear_layers_stay_vllms(tmp_path, at_rank):
    for element in (None, "fp8_e4m3"):
        home = tmp_path / str(element)
        home.mkdir()
        config = config_for(saved(home, tensors_of_a_model(), "zeros", element))
        if element is None:
            assert config.get_quant_method(nn.Embedding(4, 4), "block") is None
            continue
        with pytest.raises(UnsupportedError, match=r"block\.\w+_proj: expected a 2:4 weight of a linear"):
            config.get_quant_method(nn.Embedding(4, 4), "block")


@pytest.mark.parametrize(
    "other", [torch.ones(4, dtype=BF16), torch.ones(4, 1, 8), torch.ones(4, 8, dtype=torch.int8)], ids=str
)
def test_tensors_of_no_linear_layer_are_not_checked_for_zeros(tmp_path, at_rank, other):
    folder = saved(tmp_path, tensors_of_a_model() | {"block.other.weight": other}, "zeros")
    config = config_for(folder)
    assert set(config.dense) - set(config.sparse) == {"block.other"}
    assert config.get_quant_method(nn.Embedding(4, 4), "block.other") is None


def test_columns_that_cannot_be_cut_are_refused(tmp_path, at_rank):
    config = config_for(saved(tmp_path, tensors_of_a_model(), "sparse24"))
    at_rank(0, 64)
    with pytest.raises(UnsupportedError, match="expected a multiple of 8 columns on each rank, got 6 of 384"):
        vllm_linear.RowParallelLinear(INNER, HIDDEN, quant_config=config, prefix="block.down_proj")


def test_columns_that_share_scales_cannot_be_cut(tmp_path, at_rank):
    config = config_for(saved(tmp_path, tensors_of_a_model(), "sparse24", weights="s4", group=128))
    at_rank(0, 2)
    with pytest.raises(UnsupportedError, match="a multiple of 128 columns on each rank, got 192 of 384"):
        vllm_linear.RowParallelLinear(INNER, HIDDEN, quant_config=config, prefix="block.down_proj")


def test_scales_of_no_known_groups_are_refused(tmp_path, at_rank):
    from safetensors.torch import load_file

    folder = saved(tmp_path, tensors_of_a_model(), "sparse24", weights="s4", group=32)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["block.down_proj.weight.scales24"] = torch.ones(HIDDEN, 5)
    save_file(tensors, file, {"sparse24_format": "1"})
    with pytest.raises(UnsupportedError, match=r"block\.down_proj: expected scales24 of groups of 32 or 64"):
        config_for(folder)


@pytest.mark.parametrize("by", [{}, {"weights": "s4"}], ids=["bf16", "s4"])
def test_a_layer_that_no_kernel_serves_is_refused_by_name(tmp_path, at_rank, by):
    config = config_for(saved(tmp_path, tensors_of_a_model(), "sparse24", **by))
    wish = PlanPreference(prefer_kernel="wgmma_sp")
    config.sparse = {name: replace(one, preference=wish) for name, one in config.sparse.items()}
    layer = vllm_linear.RowParallelLinear(
        INNER, HIDDEN, quant_config=config, prefix="block.down_proj", params_dtype=BF16
    )
    layer.meta24.data.fill_(0x0404)
    with pytest.raises(UnsupportedError, match=r"block\.down_proj: .*wgmma_sp"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("by", [{}, {"weights": "s4"}], ids=["bf16", "s4"])
def test_a_group_without_two_positions_is_refused(tmp_path, at_rank, by):
    model = load(saved(tmp_path, tensors_of_a_model(), "sparse24", **by), process=False)
    layer = model.block.down_proj
    layer.meta24.data.view(torch.int16)[3, 2] = 0
    with pytest.raises(FormatError, match=r"(?s)block\.down_proj: .*\(row 3, group 4\)"):
        layer.quant_method.process_weights_after_loading(layer)
