"""The public calls, each with arguments that are right: what hostile ones then take the place of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import sparse24_plans
from sparse24_plans import (
    BlockSparseAttentionDescriptor,
    BlockSparseConv2dDescriptor,
    BlockSparseLayout,
    BlockSparseMatmulDescriptor,
    BlockSparseShape,
    BlockSparseSoftmaxDescriptor,
    BlockSparseTables,
    Device,
    DeviceProperties,
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    GuaranteeRequirement,
    MaskSparse24Descriptor,
    PackedBlocks,
    PackedWeight,
    PlanPreference,
    RecordedRun,
    Replay,
    ReplayDifference,
    Sparse24QuantizedWeight,
    Sparse24Weight,
    TensorView,
    TuningTable,
    Workspace,
    compress_blocks,
    compress_checkpoint,
    decompress_blocks,
    prune_blocks,
    save_run,
    save_weights,
    to_foreign,
)
from sparse24_plans.formats.table import FORMATS
from sparse24_plans.vocab import Model

from ..checkpoints.models import dense_file
from ..plan.cases import PLANS, PROBLEMS, PlanCase, case_of, select
from ..support import Guarded

PATH_ARGUMENTS = {"path", "source", "destination", "compressed", "dense_path"}


@dataclass
class Prepared:
    """A call that works with its ``arguments``; ``check`` looks at what it may have written."""

    call: Callable[..., Any]
    arguments: dict[str, Any]
    check: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Call:
    """How to prepare a call in a folder, and the names of its arguments."""

    prepare: Callable[[Path], Prepared]
    arguments: tuple[str, ...] = field(default=())


PROBLEM = {"n": 4, "m": 16, "k": 32, "element": "f32"}
DESC = GemmSparse24Descriptor(**PROBLEM)
CALLS: dict[str, Call] = {}


def _call(name: str, function: Callable[..., Any], /, **arguments: Any) -> None:
    """A call whose arguments any number of calls may share."""
    CALLS[name] = Call(lambda folder: Prepared(function, dict(arguments)), tuple(arguments))


# Models -------------------------------------------------------------------------------------------


def _model_calls(kind: type[Model], good: Mapping[str, Any]) -> None:
    name = kind.__name__
    made = kind(**good)
    _call(name, kind, **good)
    _call(f"{name}.model_construct", kind.model_construct, **good)
    _call(f"{name}.model_validate", lambda obj: kind.model_validate(obj), obj=dict(good))
    _call(f"{name}.model_validate_strings", lambda obj: kind.model_validate_strings(obj), obj={})
    _call(
        f"{name}.model_validate_json",
        lambda text: kind.model_validate_json(text),
        text=made.model_dump_json(),
    )
    for method in ("model_copy", "copy"):
        for argument in good:
            _call(f"{name}.{method}({argument})", _copier(made, method, argument), value=good[argument])
        _call(f"{name}.{method}", getattr(made, method), update={})
    hash(made)


def _copier(made: Model, method: str, argument: str) -> Callable[..., Any]:
    return lambda value: getattr(made, method)(update={argument: value})


LAYOUT = BlockSparseLayout([[[1, 0], [1, 1]]], 16)
_HOST = GemmSparse24Plan.select(DESC, device="host")
_MODELS: dict[type[Model], dict[str, Any]] = {
    **{type(desc): desc.model_dump() for desc in PROBLEMS},
    GemmSparse24Descriptor: DESC.model_dump(),
    PlanPreference: PlanPreference().model_dump(),
    GuaranteeRequirement: GuaranteeRequirement().model_dump(),
    DeviceProperties: DeviceProperties(kind="host").model_dump(),
    BlockSparseShape: LAYOUT.shape.model_dump(),
    type(_HOST.guarantee): _HOST.guarantee.model_dump(),
    type(_HOST.sku): _HOST.sku.model_dump(),
    type(_HOST.explain()): _HOST.explain().model_dump(),
    Replay: {"arithmetic": "exact_sum", "results": 4, "compared": 4, "differing": 0, "first": None},
    ReplayDifference: {
        **dict.fromkeys(("token", "output", "recorded_bits", "recomputed_bits"), 1),
        **dict.fromkeys(("recorded", "recomputed"), 1.0),
        "parting": None,
    },
}
for _kind, _good in _MODELS.items():
    _model_calls(_kind, _good)
_call("PlanPreference.of", PlanPreference.of, given={"tier": "host"})
_call("PrecisionGuarantee.error_bound", _HOST.guarantee.error_bound, k=32)
_call("PrecisionGuarantee.magnitudes", _HOST.guarantee.magnitudes, values=np.ones(3), element=ElementKind.F32)
_call(
    "PrecisionGuarantee.tolerance",
    _HOST.guarantee.tolerance,
    k=32,
    exact=np.ones(3),
    abs_sum=np.ones(3),
    out=ElementKind.F32,
    alpha=1.0,
    epilogue="relu",
    beta=0.5,
    c=np.ones(3),
    relu_threshold=0.5,
    relu_upper_bound=6.0,
)
_call(
    "PrecisionGuarantee.softmax_tolerance",
    _HOST.guarantee.softmax_tolerance,
    k=32,
    scores=np.ones((3, 4)),
    sizes=np.ones((3, 4)),
    out=ElementKind.F32,
)
_call(
    "PrecisionGuarantee.attention_tolerance",
    _HOST.guarantee.attention_tolerance,
    k=32,
    scores=np.ones((3, 4)),
    sizes=np.ones((3, 4)),
    values=np.ones((4, 8)),
    element=ElementKind.F32,
    head_size=8,
)


# Plans --------------------------------------------------------------------------------------------

_SPACE = np.zeros(64, np.uint8)


def _plan_calls(kind: type[Any], desc: Any) -> None:
    name = kind.__name__
    chosen = {"descriptor": desc, "preference": None, "device": "host"}
    tuned = {**chosen, "tuning": None} if kind is GemmSparse24Plan else chosen
    _call(f"{name}.select", kind.select, **tuned)
    _call(f"{name}.explain_choice", kind.explain_choice, **tuned)
    _call("explain", sparse24_plans.explain, **tuned)
    _call(f"{name}.compile", kind.compile, **tuned)
    _call(f"{name}.args_type", kind.args_type, descriptor=desc)
    for method in ("run", "bind", "can_implement", "caller", "check", "weight", "weights"):
        if hasattr(kind, method):
            _run_call(f"{name}.{method}({desc.op_name})", desc, method)


def _run_call(name: str, desc: Any, method: str) -> None:
    extra = {"run": {"workspace": None, "stream": None}, "bind": {"workspace": None}}.get(method, {})
    if method == "check":
        extra = {"stream": None}
    operands = [one.name for one in fields(_args_type(desc)) if one.init]

    def prepare(folder: Path) -> Prepared:
        case = case_of(desc, "host")
        given = {operand: getattr(case.args, operand) for operand in operands}
        if method in ("check", "weight", "weights"):
            case.run()

        def call(args: Any = None, **given: Any) -> Any:
            more = {name: given.pop(name) for name in extra}
            whole = replace(case.args, **given) if args is None else args
            found = getattr(case.plan, method)(whole, **more)
            if method == "bind":
                found.launch()
            return found

        return Prepared(call, {"args": None, **given, **extra}, lambda: _guards(case))

    CALLS[name] = Call(prepare, ("args", *operands, *extra))


_STRICT = GemmSparse24Plan.select(
    DESC, preference={"require": {"arithmetic": "fma32_in_order"}}, device="host"
)


def _ran() -> GemmSparse24Args:
    weight = Sparse24Weight.compress(np.zeros((16, 32), np.float32))
    args = GemmSparse24Args(weight, np.ones((4, 32), np.float32), np.empty((4, 16), np.float32))
    _STRICT.run(args)
    return args


_SAMPLED: dict[str, Any] = {"samples": 5, "seed": 0, "on_block": None}


def _replay(args: Any = None, **given: Any) -> Any:
    more = {name: given.pop(name) for name in _SAMPLED}
    return _STRICT.replay(replace(_ran(), **given) if args is None else args, **more)


def _args_type(desc: Any) -> Any:
    return PLANS[type(desc)].args_type(desc)


def _guards(case: PlanCase) -> None:
    for memory in case.guarded.values():
        memory.numpy()


for _desc in PROBLEMS:
    _plan_calls(PLANS[type(_desc)], _desc)


_call(
    "GemmSparse24Plan.for_tokens",
    GemmSparse24Plan.for_tokens,
    descriptor=DESC,
    most_n=16,
    preference=None,
    device="host",
    tuning=None,
)
_call(
    "GemmSparse24TokenPlans.compile",
    GemmSparse24Plan.for_tokens(DESC, 16, device="host").compile,
    ns=[1, 16],
)
_call("Caller.alignment", _STRICT.caller(_ran()).alignment, operand="x")
_call("GemmSparse24Plan.replay", _replay, args=None, weight=_ran().weight, x=_ran().x, y=_ran().y, **_SAMPLED)


# Weights and views --------------------------------------------------------------------------------


def _guarded_dense() -> tuple[TensorView, Guarded]:
    memory = Guarded((16 * 32,), ElementKind.F32, "host").fill(np.zeros(16 * 32, np.float32))
    view = memory.view
    return TensorView(view.address, (16, 32), view.element, view.device, owner=memory), memory


def _on_dense(name: str, function: Callable[..., Any], /, **more: Any) -> None:
    def prepare(folder: Path) -> Prepared:
        dense, memory = _guarded_dense()
        return Prepared(function, {"dense": dense, **more}, memory.numpy)

    CALLS[name] = Call(prepare, ("dense", *more))


WEIGHT = Sparse24Weight.compress(np.zeros((16, 32), np.float32))
BITS16 = Sparse24Weight.compress(np.zeros((128, 128), np.float16))
HOST = Device("host", 0)
_RANKED = {"scores": None, "element": None, "stream": None}
_on_dense("prune", sparse24_plans.prune, **_RANKED)
_on_dense("Sparse24Weight.prune_compress", Sparse24Weight.prune_compress, **_RANKED)
_on_dense("Sparse24Weight.compress", Sparse24Weight.compress, element=None, stream=None)
_call(
    "Sparse24Weight",
    Sparse24Weight,
    values=WEIGHT.values,
    metadata=WEIGHT.metadata,
    element=None,
    validate=True,
)
_call("Sparse24Weight.decompress", WEIGHT.decompress, stream=None)
QUANTIZED = Sparse24QuantizedWeight.quantize(BITS16, stored="s4", group=32)
_call(
    "Sparse24QuantizedWeight",
    Sparse24QuantizedWeight,
    values=QUANTIZED.values,
    metadata=QUANTIZED.metadata,
    scales=QUANTIZED.scales,
    element="f16",
    stored="s4",
    group=32,
    scale_element=None,
    validate=True,
)
_call(
    "Sparse24QuantizedWeight.quantize",
    Sparse24QuantizedWeight.quantize,
    weight=BITS16,
    stored="s4",
    group=32,
    scale_element=None,
    rule="largest",
    element=None,
)
_call("Sparse24QuantizedWeight.dequantize", QUANTIZED.dequantize)
_call("Sparse24QuantizedWeight.decompress", QUANTIZED.decompress)
_call("Sparse24QuantizedWeight.to", QUANTIZED.to, device="host", stream=None)
_call("gated_rows", sparse24_plans.gated_rows, m=32)
_call("take_rows", sparse24_plans.take_rows, weight=WEIGHT, rows=np.arange(16), stream=None)
_call("Sparse24Weight.validate", WEIGHT.validate, stream=None)
_call("Sparse24Weight.to", WEIGHT.to, device="host", stream=None)
_call("GemmSparse24Plan.pack", _HOST.pack, weight=WEIGHT, stream=None)
_call(
    "PackedWeight",
    PackedWeight,
    **{one.name: getattr(PackedWeight.canonical(WEIGHT), one.name) for one in fields(PackedWeight)},
)
_call("PackedWeight.canonical", PackedWeight.canonical, weight=WEIGHT)
_call("concat_weights", sparse24_plans.concat_weights, weights=[WEIGHT, WEIGHT], axis=0, stream=None)
for _name, _weight in (("", WEIGHT), ("(quantized)", QUANTIZED)):
    _place = {"axis": 1, "copy": None, "stream": None}
    _call(f"slice_weight{_name}", sparse24_plans.slice_weight, weight=_weight, start=0, stop=32, **_place)
    _call(f"split_weight{_name}", sparse24_plans.split_weight, weight=_weight, sizes=1, **_place)
_call(
    "TensorView",
    TensorView,
    address=_SPACE.ctypes.data,
    shape=(4, 4),
    element="f32",
    device=HOST,
    strides=(4, 1),
    readonly=False,
    owner=_SPACE,
)
_call("TensorView.of", TensorView.of, obj=_SPACE, element=None)
_VIEW = TensorView.of(np.zeros((4, 8), np.float32))
for _method in ("array", "bits", "owned_copy", "__copy__", "__dlpack_device__"):
    _call(f"TensorView.{_method}", getattr(_VIEW, _method))
_call("TensorView.__array__", _VIEW.__array__)
_call("TensorView.__dlpack__", _VIEW.__dlpack__, stream=None, max_version=(1, 0))
_call("Workspace", Workspace, address=_SPACE.ctypes.data, nbytes=64, device=HOST)
_call("Workspace.of", Workspace.of, obj=_SPACE, device=HOST)
_PARTS = to_foreign("baracuda", WEIGHT)
_call("from_foreign", sparse24_plans.from_foreign, name="baracuda", parts=_PARTS, element=None, shape=None)
for _format in (
    "torch_cutlass",
    "cutlass_sm90",
    "tilelang",
    "torch_tile",
    "cusparselt_sm80",
    "compressed_tensors",
):
    _given = to_foreign(_format, BITS16)

    def _from(element: Any, shape: Any, tile_k: Any, _name: str = _format, **parts: Any) -> Any:
        return sparse24_plans.from_foreign(_name, parts, element=element, shape=shape, tile_k=tile_k)

    _shape = (
        None if _format in ("torch_cutlass", "cutlass_sm90", "tilelang", "compressed_tensors") else (128, 128)
    )
    _given.pop("shape", None)
    _call(f"from_foreign({_format})", _from, element=None, shape=_shape, tile_k=None, **_given)
_TENSORS: dict[str, dict[str, Any]] = {
    "marlin_24": to_foreign("marlin_24", Sparse24QuantizedWeight.quantize(BITS16, stored="s4", group=128)),
    "pack_quantized": {
        "weight_packed": np.full((16, 8), -0x77777778, np.int32),
        "weight_scale": np.ones((16, 2), np.float16),
        "weight_shape": (16, 64),
        "weight_zero_point": np.zeros((16, 2), np.int8),
        "weight_g_idx": np.arange(64, dtype=np.int32) // 32,
    },
    "gptq": {
        "qweight": np.full((8, 16), -0x77777778, np.int32),
        "scales": np.ones((2, 16), np.float16),
        "qzeros": np.full((2, 2), 0x77777777, np.int32),
        "g_idx": np.arange(64, dtype=np.int32) // 32,
    },
    "awq": {
        "qweight": np.full((64, 2), -0x77777778, np.int32),
        "scales": np.ones((2, 16), np.float16),
        "qzeros": np.full((2, 2), -0x77777778, np.int32),
    },
}
_QUANTIZED = dict.fromkeys(("element", "bits", "group", "version"))
for _format, _given in _TENSORS.items():

    def _read(element: Any, bits: Any, group: Any, version: Any, _name: str = _format, **parts: Any) -> Any:
        more = {"bits": bits, "group": group, "version": version}
        return sparse24_plans.from_foreign(_name, parts, element=element, **more)

    _call(f"from_foreign({_format})", _read, **_QUANTIZED, **_given)
_ROWS = Sparse24QuantizedWeight.quantize(BITS16, stored="s4", group=0)
_call("to_foreign(marlin_24)", sparse24_plans.to_foreign, name="marlin_24", weight=_ROWS)
_OWN_FORMATS = set(FORMATS)


def _forget_formats() -> None:
    for name in set(FORMATS) - _OWN_FORMATS:
        del FORMATS[name]


def _register(folder: Path) -> Prepared:
    _forget_formats()
    given = {"permutation": [1, 0], "encode": None, "decode": None, "tile": (2, 1), "word_bits": 16}
    more = {"name": "mine", "elements": ("f16",), "origin": "here", "replace": False}
    return Prepared(sparse24_plans.register_format, {**given, **more}, _forget_formats)


CALLS["register_format"] = Call(_register, tuple(_register(Path()).arguments))
_call("to_foreign", sparse24_plans.to_foreign, name="tilelang", weight=BITS16, word_bytes=2)
_call(
    "from_product",
    sparse24_plans.from_product,
    blob=np.zeros(16 * 24, np.float16),
    shape=(16, 32),
    multiply=lambda blob: np.tile(np.array([1, 2, 0, 0], np.float16), (16, 8)),
    element=None,
)


# Layouts of blocks --------------------------------------------------------------------------------

_BLOCKS = np.zeros((1, 3, 16, 16), np.float32)
_CROW, _COL = LAYOUT.to_bsr()
_call("BlockSparseLayout", BlockSparseLayout, bitmap=LAYOUT.bitmap, block=16)
_call("BlockSparseLayout.transposed", LAYOUT.transposed)
_call(
    "BlockSparseLayout.from_bsr",
    BlockSparseLayout.from_bsr,
    crow_indices=_CROW,
    col_indices=_COL,
    cols=32,
    block=16,
)
_call("BlockSparseLayout.to_bsr", LAYOUT.to_bsr)
_call(
    "BlockSparseLayout.from_torch_bsr",
    BlockSparseLayout.from_torch_bsr,
    tensor=SimpleNamespace(
        layout="torch.sparse_bsr",
        shape=(32, 32),
        values=lambda: _BLOCKS[0],
        crow_indices=lambda: _CROW[0],
        col_indices=lambda: _COL,
    ),
)
_call(
    "BlockSparseLayout.from_coo",
    BlockSparseLayout.from_coo,
    indices=LAYOUT.to_coo(),
    shape=(1, 32, 32),
    block=16,
)
_call("BlockSparseLayout.to_coo", LAYOUT.to_coo)
_call("BlockSparseLayout.from_dense", BlockSparseLayout.from_dense, dense=_BLOCKS[0, 0], block=16)
_call("BlockSparseLayout.values_of", LAYOUT.values_of, dense=LAYOUT.to_dense(_BLOCKS))
_call("BlockSparseLayout.to_dense", LAYOUT.to_dense, values=_BLOCKS)
_call("BlockSparseLayout.to_json", LAYOUT.to_json)
_call("BlockSparseLayout.from_json", BlockSparseLayout.from_json, text=LAYOUT.to_json())
_LARGE = BlockSparseLayout([[0, 1], [1, 1]], 64)
_CELLS = np.zeros((1, 3, 64, 64), np.float16)
_KEPT = compress_blocks(_LARGE, _CELLS, along="rows")
_call("compress_blocks", compress_blocks, layout=_LARGE, values=_CELLS, along="rows")
_call(
    "decompress_blocks", decompress_blocks, layout=_LARGE, along="columns", values=_KEPT[0], metadata=_KEPT[1]
)
_call(
    "prune_blocks",
    prune_blocks,
    matrix=_LARGE.to_dense(_CELLS)[0],
    block=64,
    density=0.5,
    along="rows",
    scores=_LARGE.to_dense(_CELLS)[0],
)
_call("BlockSparseTables", BlockSparseTables, layout=LAYOUT)
_MATMUL = BlockSparseMatmulDescriptor(op="dsd", layout=LAYOUT, n=4, element="f32")
_call("BlockSparseMatmulPlan.pack", select(_MATMUL, "host").pack, layout=LAYOUT)
_PACKING = select(_MATMUL.model_copy(update={"packed": True}), "host")
_VALUES = np.zeros((1, LAYOUT.shape.blocks, LAYOUT.shape.block, LAYOUT.shape.block), np.float32)
_call("BlockSparseMatmulPlan.pack, packed", _PACKING.pack, layout=LAYOUT, values=_VALUES, stream=None)
_PACKED = _PACKING.pack(LAYOUT, _VALUES)
_call("PackedBlocks", PackedBlocks, **{one.name: getattr(_PACKED, one.name) for one in fields(PackedBlocks)})
_BITMAP = LAYOUT.bitmap.view(np.uint8)
for _desc in (
    _MATMUL,
    BlockSparseSoftmaxDescriptor(layout=LAYOUT, element="f32"),
    BlockSparseAttentionDescriptor(layout=LAYOUT, element="f32", head_size=4),
    BlockSparseConv2dDescriptor(layout=LAYOUT, element="f32", height=2, width=2, kernel=1),
):
    _plan = select(_desc, "host")
    _call(
        f"{type(_plan).__name__}.update",
        _plan.update,
        tables=BlockSparseTables(LAYOUT),
        bitmap=_BITMAP,
        stream=None,
    )
_SOFTMAX = BlockSparseSoftmaxDescriptor(layout=LAYOUT, element="f32")
_call("BlockSparseSoftmaxPlan.pack", select(_SOFTMAX, "host").pack, layout=LAYOUT)
_ATTENTION = BlockSparseAttentionDescriptor(layout=LAYOUT, element="f32", head_size=4)
_call("BlockSparseAttentionPlan.pack", select(_ATTENTION, "host").pack, layout=LAYOUT)
_CONVOLUTION = BlockSparseConv2dDescriptor(layout=LAYOUT, element="f32", height=2, width=2, kernel=1)
_call("BlockSparseConv2dPlan.pack", select(_CONVOLUTION, "host").pack, layout=LAYOUT)
_call("BlockSparseTables.update", BlockSparseTables(LAYOUT).update, layout=LAYOUT)


# Tables and files ---------------------------------------------------------------------------------

_TABLE = TuningTable("gpu", "1.0", ())
_call("TuningTable", TuningTable, gpu="gpu", driver="1.0", entries=())
_call("TuningTable.find", _TABLE.find, problem=DESC)
_call("TuningTable.merged", _TABLE.merged, newer=_TABLE)
_call("tune", sparse24_plans.tune, problems=[], kernels=None, device="host", on_trials=None)


def _on_files(name: str, function: Callable[..., Any], arguments: Callable[[Path], dict[str, Any]]) -> None:
    names = tuple(arguments(Path("/nowhere")))

    def prepare(folder: Path) -> Prepared:
        dense_file(folder / "dense.safetensors", {"layer.weight": np.ones((16, 32), np.float32)})
        compress_checkpoint(folder / "dense.safetensors", folder / "sparse.safetensors", device="host")
        save_run(folder / "run.safetensors", _STRICT, _ran())
        save_weights(folder / "weights.safetensors", {"layer": WEIGHT})
        _TABLE.save(folder / "table.json")
        return Prepared(function, arguments(folder))

    CALLS[name] = Call(prepare, names)


_FILTERS: dict[str, Any] = {"include": (), "exclude": (), "overwrite": True, "on_tensor": None}
_on_files(
    "load_weight",
    sparse24_plans.load_weight,
    lambda at: {"path": at / "weights.safetensors", "name": "layer"},
)
_on_files("iter_weights", sparse24_plans.iter_weights, lambda at: {"path": at / "weights.safetensors"})
_on_files("save_weights", save_weights, lambda at: {"path": at / "new", "weights": {"layer": WEIGHT}})
_on_files(
    "compress_checkpoint",
    compress_checkpoint,
    lambda at: {"source": at / "dense.safetensors", "destination": at / "new", "device": "host", **_FILTERS},
)
_on_files(
    "convert_checkpoint",
    sparse24_plans.convert_checkpoint,
    lambda at: {
        "source": at / "sparse.safetensors",
        "destination": at / "new",
        "from_format": "sparse24",
        "to_format": "compressed_tensors",
        "tile_k": None,
        **_FILTERS,
    },
)


def _verify(compressed: Any, dense_path: Any, **more: Any) -> Any:
    return sparse24_plans.verify_checkpoint(compressed, dense_path, **more)


_on_files(
    "verify_checkpoint",
    _verify,
    lambda at: {
        "compressed": at / "sparse.safetensors",
        "dense_path": at / "dense.safetensors",
        "device": "host",
        "seed": 0,
        "preference": None,
        "on_layer": None,
    },
)
_on_files(
    "export_plans",
    sparse24_plans.export_plans,
    lambda at: {
        "descriptors": {"mask": MaskSparse24Descriptor(m=64, k=64, element="bf16")},
        "folder": at / "plans",
        "preference": None,
        "device": "h200",
        "on_steps": lambda steps: None,
    },
)
_on_files("save_run", save_run, lambda at: {"path": at / "new", "plan": _STRICT, "args": _ran()})
_call(
    "RecordedRun.replay",
    RecordedRun(DESC, "fma32_in_order", "host", "host_strict", "0.1.0", _ran()).replay,
    **_SAMPLED,
)
_on_files("load_run", sparse24_plans.load_run, lambda at: {"path": at / "run.safetensors"})
_on_files("TuningTable.load", TuningTable.load, lambda at: {"path": at / "table.json"})
_on_files("TuningTable.save", _TABLE.save, lambda at: {"path": at / "new.json"})
