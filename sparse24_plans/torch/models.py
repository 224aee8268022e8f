"""Saves swapped models; loads 2:4 checkpoints, ours and compressed-tensors'.

Only :func:`from_pretrained` needs transformers. It builds the model that a folder's ``config.json`` names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints.checkpoint_format import CONFIG_KEY, Sparse24Checkpoint, without_sparsity
from ..checkpoints.folder import CONFIG_NAME, INDEX_SUFFIX, ModelReader, write_index, write_json
from ..checkpoints.safetensors_file import SafetensorsWriter, TensorInfo
from ..device.files import StrPath, new_folder, path_of
from ..device.tensors import wrong
from ..errors import BackendUnavailableError, InvalidProblemError, Sparse24Error, UnsupportedError, shown
from ..vocab import checked_flag
from .checkpoint_names import is_transformers_model
from .checkpoint_source import DTYPES_BY_NAME, Source
from .elements import device_of, host_bytes
from .linear import DTYPES, PreferenceLike, RequirementLike, Sparse24Linear
from .loading import Load
from .saved_form import form_of, modules_of, saved_state

_STEM = "model"
_MAX_SHARD_BYTES = 50 * 10**9
_INTEGRATION = "sparse24_plans.integrations.transformers"
_GENERATION = "generation_config.json"
_NAMES = {dtype: name for name, dtype in DTYPES_BY_NAME.items()}


@dataclass(frozen=True)
class LoadReport:
    """The result of ``load_sparse24``, in names of the model's modules and tensors.

    ``sparse`` lists the layers that are Sparse24Linear now, and the two weights of each Sparse24Experts.
    ``dense`` lists the tensors that were loaded dense, compressed ones of other modules among them.
    ``unexpected`` lists tensors of the checkpoint that the model doesn't have. ``dequantized`` lists those of
    ``dense`` that have 8 bits in the checkpoint: they are multiplied by their scales, and their layers'
    inputs aren't quantized.
    """

    sparse: tuple[str, ...]
    dense: tuple[str, ...]
    unexpected: tuple[str, ...]
    dequantized: tuple[str, ...] = ()


def load_sparse24(
    model: nn.Module,
    path: StrPath,
    *,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    trainable: bool = False,
    require: RequirementLike = None,
    preference: PreferenceLike = None,
    dequantize: bool | None = None,
) -> LoadReport:
    """Load a compressed checkpoint into ``model``, in place; its compressed layers and experts are swapped.

    Parameters
    ----------
    model : torch.nn.Module
        A model with the checkpoint's configuration. Parameters on the meta device are replaced. Others keep
        their dtype and device, and the checkpoint's tensors are converted. Layers may be Sparse24Linear
        already, also sharded over devices: each rank keeps its part of what it reads.
    path : str or path
        A safetensors file, or a folder with one or with shards and their index.
    format : str, optional
        ``sparse24`` (our own) or a foreign format. The default is our own if the file's metadata says so,
        else compressed-tensors'.
    dtype : torch.dtype, optional
        The dtype of floating point parameters that replace those on the meta device; by default the
        checkpoint's.
    trainable, require, preference
        Arguments of Sparse24Linear. Without the last two, layers have what they were saved with. Experts stay
        dense if layers are trainable, or if no kernel serves them on their GPU.
    dequantize : bool, optional
        Whether weights with scales of groups become 2:4 weights of 16 bits, or keep their stored values in
        Sparse24WeightOnlyLinear and Sparse24Experts. By default, weights become 2:4 weights of 16 bits if no
        kernel serves them on their GPU. So do those of trainable layers, and of experts whose matrices are
        stored in different ways. A warning in the log names them.

    Raises InvalidProblemError if the checkpoint has no compressed weight or lacks tensors of the model;
    UnsupportedError for quantization that no layer computes; FormatError, naming file and tensor;
    StorageError. Names, shapes and elements are compared before anything is changed.
    """
    if not isinstance(model, nn.Module):
        raise InvalidProblemError(f"model: expected a module, got a {type(model).__name__}")
    options = {"trainable": trainable, "dequantize": dequantize, **_wishes(require, preference)}
    return _load(model, path, format, dtype, options)


def _wishes(require: RequirementLike, preference: PreferenceLike) -> dict[str, Any]:
    """Options of layers. An option that isn't given has the value that the layer was saved with."""
    given = require is not None or preference is not None
    return {"require": require, "preference": preference} if given else {}


def _load(
    model: nn.Module, path: StrPath, format: str | None, dtype: torch.dtype | None, options: dict[str, Any]
) -> LoadReport:
    """Load a checkpoint into a model. ``options`` may have the ``device`` on which the model will run."""
    if dtype is not None and dtype not in DTYPES:
        raise wrong("dtype", f"one of {', '.join(map(str, DTYPES))} or None", dtype)
    checked_flag("trainable", options.get("trainable", False))
    if options["dequantize"] is not None:
        checked_flag("dequantize", options["dequantize"])
    with ModelReader(path_of("path", path)) as reader:
        load = Load(model, Source(reader, format), dtype, options)
        load.check()
        load.swap()
        load.fill()
        load.fuse()
    tie = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()
    return LoadReport(
        tuple(name for name, _ in modules_of(model, Sparse24Linear)),
        tuple(load.dense),
        tuple(load.unexpected),
        tuple(load.dequantized),
    )


def save_sparse24(model: nn.Module, destination: StrPath, *, max_shard_bytes: int = _MAX_SHARD_BYTES) -> None:
    """Save a model with 2:4 layers in a new folder, with all that loading needs to build it again.

    A transformers model is saved by its own ``save_pretrained``, so the folder is also what
    :func:`from_pretrained` and transformers' ``AutoModel.from_pretrained`` load. Other modules get
    ``model.safetensors``, or shards with their index, and a ``config.json`` with our entry alone. Blocks of
    :func:`fuse_gated` are saved as the layers that they replaced, and fused again at loading. Settings for
    training alone (``trainable``) aren't saved. A failed run leaves nothing behind.

    Parameters
    ----------
    model : torch.nn.Module
        A model with at least one Sparse24Linear, on any device.
    destination : str or path
        A new or empty folder.
    max_shard_bytes : int
        The size above which a checkpoint is split; a larger tensor gets a file of its own.

    Raises InvalidProblemError for a model without 2:4 layers or a folder that is neither new nor empty;
    UnsupportedError for tensors cut over ranks, and types that safetensors lacks;
    BackendUnavailableError for a model of transformers before 5.8; StorageError.
    """
    if not isinstance(model, nn.Module) or next(modules_of(model, Sparse24Linear), None) is None:
        raise InvalidProblemError(
            f"model: expected a module with 2:4 layers, which to_sparse24 makes, got a {type(model).__name__}"
        )
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise InvalidProblemError(f"max_shard_bytes: expected an integer from 1, got {max_shard_bytes!r}")
    whole: Any = model
    with new_folder(path_of("destination", destination)) as folder:
        if not is_transformers_model(model):
            _write(model, folder, max_shard_bytes)
        elif _INTEGRATION in sys.modules:
            whole.save_pretrained(folder, max_shard_size=max_shard_bytes)
        else:
            raise BackendUnavailableError(
                "saving its models needs transformers 5.8: pip install -U transformers"
            )


def _write(model: nn.Module, folder: Path, max_shard_bytes: int) -> None:
    """Write the checkpoint and the configuration of a model that isn't transformers'."""
    tensors, layers = saved_state(model)
    format, metadata = Sparse24Checkpoint(), {"format": "pt"}
    format.stamp(metadata)
    for layer in layers:
        format.note(metadata, layer)
    shards: list[list[TensorInfo]] = [[]]
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise UnsupportedError(f"{name}: expected one of {', '.join(DTYPES_BY_NAME)}, got {tensor.dtype}")
        info = TensorInfo(name, _NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
        if shards[-1] and sum(one.nbytes for one in shards[-1]) + info.nbytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(info)
    stems = [_STEM]
    if len(shards) > 1:
        stems = [f"{_STEM}-{number:05}-of-{len(shards):05}" for number in range(1, len(shards) + 1)]
    files = {f"{stem}.safetensors": infos for stem, infos in zip(stems, shards, strict=True)}
    for file, infos in files.items():
        with SafetensorsWriter(folder / file, infos, metadata) as writer:
            for info in infos:
                writer.write(info.name, host_bytes(tensors[info.name]))
    if len(files) > 1:
        write_index(folder / f"{_STEM}{INDEX_SUFFIX}", files)
    write_json(folder / CONFIG_NAME, {CONFIG_KEY: form_of(model).dumped()})


# transformers -------------------------------------------------------------------------------------


def from_pretrained(
    path: StrPath,
    *,
    model_class: Any = None,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
    require: RequirementLike = None,
    preference: PreferenceLike = None,
    dequantize: bool | None = None,
) -> Any:
    """Load the transformers model of a folder with a compressed checkpoint, in evaluation mode.

    No loader of transformers is used, so any version that knows the model serves. The model is built without
    memory for its parameters, so weights are never dense.

    Parameters
    ----------
    path : str or path
        A folder with ``config.json`` and a checkpoint that :func:`load_sparse24` takes.
    model_class : class, optional
        The model's class, or one of transformers' auto classes. The default is the architecture that the
        configuration names.
    dtype : torch.dtype, optional
        The dtype of the parameters; by default the checkpoint's.
    device
        The model's device; the CPU by default.
    format, require, preference, dequantize
        Arguments of :func:`load_sparse24`.

    Raises BackendUnavailableError without transformers; InvalidProblemError for a configuration that names
    no class; the errors of :func:`load_sparse24`.
    """
    try:
        import transformers
    except ImportError as error:
        raise BackendUnavailableError("transformers is not installed: pip install transformers") from error
    path = path_of("path", path)
    place = None if device is None else device_of(device)
    with ModelReader(path) as reader:
        stored = reader.config()
    if stored is None:
        raise InvalidProblemError(f"path: expected a folder with a config.json, got {path}")
    with _errors_of_transformers(CONFIG_NAME), _parameters_on_meta():
        stored = json.loads(json.dumps(without_sparsity(stored)), object_hook=_float_of)
        model = _built(transformers, stored, model_class)
    options: dict[str, Any] = {"dequantize": dequantize, **_wishes(require, preference)}
    if place is not None:
        options["device"] = place
    _load(model, path, format, dtype, options)
    if model.can_generate() and (Path(path) / _GENERATION).exists():
        with _errors_of_transformers(_GENERATION):
            model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    return model.to(device).eval() if device is not None else model.eval()


def _float_of(found: dict[str, Any]) -> Any:
    """The number that transformers 5 writes as ``{"__float__": "Infinity"}``, because JSON has none."""
    text = found.get("__float__")
    is_number = len(found) == 1 and text in ("Infinity", "-Infinity", "NaN")
    return float(str(text)) if is_number else found


def _built(transformers: Any, stored: dict[str, Any], model_class: Any) -> Any:
    """The model of a ``config.json``. Raises InvalidProblemError unless it names a class."""
    kind = stored.pop("model_type", None)
    if not isinstance(kind, str):
        raise InvalidProblemError(f"path: expected a config.json with a model_type, got {shown(kind)}")
    config = transformers.AutoConfig.for_model(kind, **stored)
    if model_class is None:
        name = next(iter(stored.get("architectures") or [""]))
        model_class = getattr(transformers, name, None)
        if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
            raise InvalidProblemError(f"model_class: expected one; the configuration names {shown(name)}")
    is_auto = not isinstance(model_class, type) or not issubclass(model_class, nn.Module)
    return model_class.from_config(config) if is_auto else model_class(config)


@contextmanager
def _errors_of_transformers(file: str) -> Iterator[None]:
    """Turn whatever transformers raises for a file's contents into an InvalidProblemError."""
    try:
        yield
    except Sparse24Error:
        raise
    except Exception as error:
        raise InvalidProblemError(
            f"path: expected a {file} that transformers takes, got {type(error).__name__}: {error!s:.500}"
        ) from error


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built in this context have parameters without memory and ordinary buffers."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = without_memory  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
