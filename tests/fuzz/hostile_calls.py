"""The public calls, each with arguments that are right, which hostile ones then replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

import sparse24_plans
from sparse24_plans import (
    BlockSparseShape,
    Device,
    DeviceProperties,
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    GuaranteeRequirement,
    MaskSparse24Descriptor,
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
    compress_checkpoint,
    save_run,
    save_weights,
    to_foreign,
)
from sparse24_plans.formats.table import FORMATS
from sparse24_plans.vocab import Model

from ..checkpoints.models import dense_file
from ..plan.cases import PLANS, PROBLEMS, PlanCase, case_of
from ..support import Guarded
from .hostile_block_calls import LAYOUT
from .hostile_registry import CALLS, Call, Prepared, add_call

PROBLEM = {"n": 4, "m": 16, "k": 32, "element": "f32"}
DESC = GemmSparse24Descriptor(**PROBLEM)

# Models -------------------------------------------------------------------------------------------


def _model_calls(kind: type[Model], good: Mapping[str, Any]) -> None:
    name = kind.__name__
    made = kind(**good)
    add_call(name, kind, **good)
    add_call(f"{name}.model_construct", kind.model_construct, **good)
    add_call(f"{name}.model_validate", lambda obj: kind.model_validate(obj), obj=dict(good))
    add_call(f"{name}.model_validate_strings", lambda obj: kind.model_validate_strings(obj), obj={})
    add_call(
        f"{name}.model_validate_json",
        lambda text: kind.model_validate_json(text),
        text=made.model_dump_json(),
    )
    for method in ("model_copy", "copy"):
        for argument in good:
            add_call(f"{name}.{method}({argument})", _copier(made, method, argument), value=good[argument])
        add_call(f"{name}.{method}", getattr(made, method), update={})
    hash(made)


def _copier(made: Model, method: str, argument: str) -> Callable[..., Any]:
    return lambda value: getattr(made, method)(update={argument: value})


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
        "divergence": None,
    },
}
for _kind, _good in _MODELS.items():
    _model_calls(_kind, _good)
add_call("PlanPreference.of", PlanPreference.of, given={"tier": "host"})
add_call("PrecisionGuarantee.error_bound", _HOST.guarantee.error_bound, k=32)
add_call(
    "PrecisionGuarantee.magnitudes", _HOST.guarantee.magnitudes, values=np.ones(3), element=ElementKind.F32
)
add_call(
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
add_call(
    "PrecisionGuarantee.summed_tolerance",
    _HOST.guarantee.summed_tolerance,
    exact=np.ones((2, 3, 4)),
    tolerances=np.ones((2, 3, 4)),
    out=ElementKind.F32,
    weights=np.ones((2, 3, 1)),
)
add_call(
    "PrecisionGuarantee.softmax_tolerance",
    _HOST.guarantee.softmax_tolerance,
    k=32,
    scores=np.ones((3, 4)),
    sizes=np.ones((3, 4)),
    out=ElementKind.F32,
)
add_call(
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
    add_call(f"{name}.select", kind.select, **tuned)
    add_call(f"{name}.explain_choice", kind.explain_choice, **tuned)
    add_call("explain", sparse24_plans.explain, **tuned)
    add_call(f"{name}.compile", kind.compile, **tuned)
    add_call(f"{name}.args_type", kind.args_type, descriptor=desc)
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


add_call(
    "GemmSparse24Plan.for_tokens",
    GemmSparse24Plan.for_tokens,
    descriptor=DESC,
    most_n=16,
    preference=None,
    device="host",
    tuning=None,
)
add_call(
    "GemmSparse24TokenPlans.compile",
    GemmSparse24Plan.for_tokens(DESC, 16, device="host").compile,
    ns=[1, 16],
)
add_call("Caller.alignment", _STRICT.caller(_ran()).alignment, operand="x")
add_call(
    "GemmSparse24Plan.replay", _replay, args=None, weight=_ran().weight, x=_ran().x, y=_ran().y, **_SAMPLED
)


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
add_call(
    "Sparse24Weight",
    Sparse24Weight,
    values=WEIGHT.values,
    metadata=WEIGHT.metadata,
    element=None,
    validate=True,
)
add_call("Sparse24Weight.decompress", WEIGHT.decompress, stream=None)
QUANTIZED = Sparse24QuantizedWeight.quantize(BITS16, stored="s4", group=32)
add_call(
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
add_call(
    "Sparse24QuantizedWeight.quantize",
    Sparse24QuantizedWeight.quantize,
    weight=BITS16,
    stored="s4",
    group=32,
    scale_element=None,
    rule="largest",
    element=None,
)
add_call("Sparse24QuantizedWeight.dequantize", QUANTIZED.dequantize)
add_call("Sparse24QuantizedWeight.decompress", QUANTIZED.decompress)
add_call("Sparse24QuantizedWeight.to", QUANTIZED.to, device="host", stream=None)
add_call("gated_rows", sparse24_plans.gated_rows, m=32)
add_call("take_rows", sparse24_plans.take_rows, weight=WEIGHT, rows=np.arange(16), stream=None)
add_call("Sparse24Weight.validate", WEIGHT.validate, stream=None)
add_call("Sparse24Weight.to", WEIGHT.to, device="host", stream=None)
add_call("GemmSparse24Plan.pack", _HOST.pack, weight=WEIGHT, stream=None)
add_call(
    "PackedWeight",
    PackedWeight,
    **{one.name: getattr(PackedWeight.canonical(WEIGHT), one.name) for one in fields(PackedWeight)},
)
add_call("PackedWeight.canonical", PackedWeight.canonical, weight=WEIGHT)
add_call("concat_weights", sparse24_plans.concat_weights, weights=[WEIGHT, WEIGHT], axis=0, stream=None)
for _name, _weight in (("", WEIGHT), ("(quantized)", QUANTIZED)):
    _place = {"axis": 1, "copy": None, "stream": None}
    add_call(f"slice_weight{_name}", sparse24_plans.slice_weight, weight=_weight, start=0, stop=32, **_place)
    add_call(f"split_weight{_name}", sparse24_plans.split_weight, weight=_weight, sizes=1, **_place)
add_call(
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
add_call("TensorView.of", TensorView.of, obj=_SPACE, element=None)
_VIEW = TensorView.of(np.zeros((4, 8), np.float32))
for _method in ("array", "bits", "owned_copy", "__copy__", "__dlpack_device__"):
    add_call(f"TensorView.{_method}", getattr(_VIEW, _method))
add_call("TensorView.__array__", _VIEW.__array__)
add_call("TensorView.__dlpack__", _VIEW.__dlpack__, stream=None, max_version=(1, 0))
add_call("Workspace", Workspace, address=_SPACE.ctypes.data, nbytes=64, device=HOST)
add_call("Workspace.of", Workspace.of, obj=_SPACE, device=HOST)
_PARTS = to_foreign("baracuda", WEIGHT)
add_call("from_foreign", sparse24_plans.from_foreign, name="baracuda", parts=_PARTS, element=None, shape=None)
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
    add_call(f"from_foreign({_format})", _from, element=None, shape=_shape, tile_k=None, **_given)
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

    add_call(f"from_foreign({_format})", _read, **_QUANTIZED, **_given)
_ROWS = Sparse24QuantizedWeight.quantize(BITS16, stored="s4", group=0)
add_call("to_foreign(marlin_24)", sparse24_plans.to_foreign, name="marlin_24", weight=_ROWS)
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
add_call("to_foreign", sparse24_plans.to_foreign, name="tilelang", weight=BITS16, word_bytes=2)
add_call(
    "from_product",
    sparse24_plans.from_product,
    blob=np.zeros(16 * 24, np.float16),
    shape=(16, 32),
    multiply=lambda blob: np.tile(np.array([1, 2, 0, 0], np.float16), (16, 8)),
    element=None,
)


# Tables and files ---------------------------------------------------------------------------------

_TABLE = TuningTable("gpu", "1.0", ())
add_call("TuningTable", TuningTable, gpu="gpu", driver="1.0", entries=())
add_call("TuningTable.find", _TABLE.find, problem=DESC)
add_call("TuningTable.merged", _TABLE.merged, newer=_TABLE)
add_call("tune", sparse24_plans.tune, problems=[], kernels=None, device="host", on_trials=None)


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
add_call(
    "RecordedRun.replay",
    RecordedRun(DESC, "fma32_in_order", "host", "host_strict", "0.1.0", _ran()).replay,
    **_SAMPLED,
)
_on_files("load_run", sparse24_plans.load_run, lambda at: {"path": at / "run.safetensors"})
_on_files("TuningTable.load", TuningTable.load, lambda at: {"path": at / "table.json"})
_on_files("TuningTable.save", _TABLE.save, lambda at: {"path": at / "new.json"})
