"""vLLM serves 2:4 checkpoints: ours, and compressed-tensors', in ``sparse-24-bitmask`` or with their zeros.

Importing this registers the quantization method ``sparse24``. vLLM's own parameters and loaders cut and merge
the parts of a weight; each layer is packed once its parts are loaded. Tested against vLLM 0.33.0.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import vllm.envs as envs
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)
from vllm.transformers_utils.config import get_safetensors_params_metadata

from .._vendor import compressed_tensors
from ..checkpoints.layers import META_SUFFIX, SCALES_SUFFIX, SPARSE24, VALUES_SUFFIX
from ..checkpoints.quantization import UNSERVED_KEYS, check_groups
from ..device.log import LOAD
from ..errors import FormatError, InvalidProblemError, UnsupportedError
from ..plan.preference import PlanPreference
from ..torch.checkpoint_source import DTYPES_BY_NAME
from ..torch.elements import META_DTYPES, STORED_OF
from ..torch.foreign import from_bitmask
from ..torch.layer_state import META_KEY, VALUES_KEY
from ..torch.linear import DTYPES, Sparse24Linear
from ..torch.quantized_linear import INPUT_SCALE, LARGEST, WEIGHT_SCALE, Sparse24QuantizedLinear
from ..torch.saved_form import SavedForm, SavedLayer
from ..torch.weight_only_linear import SCALES_KEY, Sparse24WeightOnlyLinear
from ..vocab import ElementKind
from ..weights.quantized_weight import GROUPS

_WEIGHT = ".weight"
_VALUES, _META, _SCALES = "values24", "meta24", "scales24"
_BITMASK_VALUES, _BITMASK = "compressed", "bitmask"
_KINDS = {
    _WEIGHT + VALUES_SUFFIX: (_VALUES, _META, META_DTYPES[1]),
    f".{_BITMASK_VALUES}": (_BITMASK_VALUES, _BITMASK, torch.uint8),
}
"""The end of a stored weight's name -> the names of its parts in a vLLM layer, and the second one's dtype."""
_DENSE = "weight"
"""The name of a matrix with its zeros in a vLLM layer."""
_PARTS = (_VALUES, _META, _SCALES, _BITMASK_VALUES, _BITMASK, _DENSE, WEIGHT_SCALE, INPUT_SCALE)
_ZEROS_FORMAT = "dense"
"""compressed-tensors' name for 2:4 matrices with stored zeros, which may be quantized."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in the configurations of models."""


@dataclass(frozen=True)
class Stored:
    """The form in which a checkpoint holds a 2:4 weight. Weights that vLLM merges have the same."""

    parts: tuple[str, str, torch.dtype] | None
    """Names of the compressed weight's parts, and the second one's dtype; None for a matrix with zeros."""
    dtype: torch.dtype
    scale_dims: tuple[int, ...] | None = None
    """The dimensions of the scales after the first, if each row has a scale; None if one serves all rows."""
    static_input: bool = False
    group: int | None = None
    """Columns that share one of the ``scales24``, 0 if those of a row do; None for a weight without them."""
    scale_dtype: torch.dtype | None = None
    """The dtype of the ``scales24``."""
    preference: PlanPreference = field(default_factory=PlanPreference)

    @property
    def is_plain(self) -> bool:
        """Whether the stored matrix is what vLLM's own dense layers take."""
        return self.parts is None and self.dtype in DTYPES

    @property
    def quantizes_inputs(self) -> bool:
        """Whether inputs have 8 bits, too."""
        return self.dtype in LARGEST and self.group is None

    @property
    def columns_of_a_value(self) -> int:
        """Columns of W for each element of the values."""
        return 4 if self.group is not None and STORED_OF[self.dtype] is ElementKind.S4 else 2


def _stored(name: str, suffix: str, tensors: Mapping[str, Any], preference: PlanPreference) -> Stored:
    """The form of a weight, named without ``.weight``. Raises UnsupportedError for what no layer takes."""
    dtype = DTYPES_BY_NAME.get(tensors[name + suffix]["dtype"])
    if (scales := tensors.get(name + _WEIGHT + SCALES_SUFFIX)) is not None:
        return _stored_with_groups(name, dtype, tensors[name + suffix]["shape"], scales, preference)
    if dtype is None or dtype not in (*DTYPES, *LARGEST):
        raise UnsupportedError(
            f"{name}: expected a 2:4 weight of 32, 16 or 8 bits, got {tensors[name + suffix]['dtype']}"
        )
    if dtype not in LARGEST:
        return Stored(_KINDS.get(suffix), dtype, preference=preference)
    scale = tensors.get(f"{name}.{WEIGHT_SCALE}")
    if scale is None:
        raise UnsupportedError(f"{name}: expected {WEIGHT_SCALE} beside a weight of {dtype}, got none")
    rows, sizes = tensors[name + suffix]["shape"][0], tuple(scale["shape"])
    is_whole = sizes in ((), (1,))
    if not is_whole and sizes not in ((rows,), (rows, 1)):
        raise UnsupportedError(f"{name}.{WEIGHT_SCALE}: expected 1 or {rows} scales, got {list(sizes)}")
    static = f"{name}.{INPUT_SCALE}" in tensors
    dims = None if is_whole else sizes[1:]
    return Stored(_KINDS.get(suffix), dtype, dims, static, preference=preference)


def _stored_with_groups(
    name: str, dtype: Any, shape: Any, scales: Mapping[str, Any], preference: PlanPreference
) -> Stored:
    """The form of a weight whose inputs stay as they are. Its shapes tell the columns that share a scale."""
    scale_dtype = DTYPES_BY_NAME.get(scales["dtype"])
    if dtype not in STORED_OF or scale_dtype not in DTYPES:
        raise UnsupportedError(
            f"{name}: expected values of 4 or 8 bits and scales24 of 32 or 16, got {dtype} and {scale_dtype}"
        )
    parts = _KINDS[_WEIGHT + VALUES_SUFFIX]
    whole = Stored(parts, dtype, group=0, scale_dtype=scale_dtype, preference=preference)
    k, count = shape[1] * whole.columns_of_a_value, scales["shape"][1]
    for group in GROUPS:
        if count == (-(-k // group) if group else 1):
            return replace(whole, group=group)
    known = " or ".join(map(str, GROUPS[1:]))
    raise UnsupportedError(
        f"{name}: expected scales24 of groups of {known} columns, got {count} of {k} columns"
    )


def _may_be_sparse(name: str, tensors: Mapping[str, Any]) -> bool:
    """Whether a stored matrix, named without ``.weight``, is of a form that 2:4 ones with zeros have."""
    stored = tensors[name + _WEIGHT]
    dtype = DTYPES_BY_NAME.get(stored["dtype"])
    is_served = dtype in DTYPES or (dtype in LARGEST and f"{name}.{WEIGHT_SCALE}" in tensors)
    return is_served and len(stored["shape"]) == 2


def _check_quantization(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for what compressed-tensors' configuration asks for and no layer does."""
    for key in UNSERVED_KEYS:
        if config.get(key):
            raise UnsupportedError(f"{key}: expected none in a 2:4 checkpoint, got {config[key]!r:.80}")
    found = _sparsity_format(config)
    if found not in (compressed_tensors.FORMAT, _ZEROS_FORMAT):
        raise UnsupportedError(
            f"sparsity_config.format: expected {compressed_tensors.FORMAT} or {_ZEROS_FORMAT}, got {found!r}"
        )
    check_groups(config)


def _sparsity_format(config: Mapping[str, Any]) -> Any:
    return (config.get("sparsity_config") or {}).get("format")


def _check_experts(config: Mapping[str, Any], hf_config: Any) -> None:
    """Raise UnsupportedError for experts, which aren't linear layers, unless vLLM serves them as they are."""
    of_text = getattr(hf_config, "text_config", hf_config)
    count = next((found for name in _EXPERTS if (found := getattr(of_text, name, None))), 0)
    if count and (_sparsity_format(config) != _ZEROS_FORMAT or config.get("config_groups")):
        raise UnsupportedError(f"experts: expected dense ones of 16 bits in a 2:4 checkpoint, got {count}")


@register_quantization_config(SPARSE24)
class Sparse24VllmConfig(QuantizationConfig):  # type: ignore[misc]
    """Which layers of a model have compressed weights, and their form, as the checkpoint's headers say."""

    def __init__(self, form: SavedForm, *, stores_zeros: bool = False) -> None:
        super().__init__()
        self._form, self._stores_zeros = form, stores_zeros
        self.sparse: dict[str, Stored] = {}
        """The form of each compressed weight, and of each matrix that may be 2:4 with stored zeros, by its
        name in vLLM without ``.weight``."""
        self.dense: dict[str, str] = {}
        """The safetensors type of each dense weight, by its name without ``.weight``."""

    def get_name(self) -> str:
        return SPARSE24

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claim compressed-tensors' 2:4 checkpoints that can be served, unless another method is asked for.

        A warning in the log says why a 2:4 checkpoint can't be.
        """
        sparsity = hf_quant_cfg.get("sparsity_config") or {}
        is_theirs = hf_quant_cfg.get("quant_method") == compressed_tensors.METHOD
        is_sparse = sparsity.get("sparsity_structure") == "2:4" and sparsity.get("targets")
        if not (is_theirs and is_sparse and user_quant in (None, SPARSE24)):
            return None
        try:
            _check_quantization(hf_quant_cfg)
            _check_experts(hf_quant_cfg, hf_config)
        except UnsupportedError as error:
            LOAD.warning("a 2:4 checkpoint is left to vLLM: %s", error)
            return None
        return SPARSE24

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Sparse24VllmConfig:
        """Take an entry of either format. Raises UnsupportedError for what can't be served."""
        if config.get("quant_method") == compressed_tensors.METHOD:
            _check_quantization(config)
            return cls(SavedForm(), stores_zeros=_sparsity_format(config) == _ZEROS_FORMAT)
        form = SavedForm.model_validate(config)
        for name, layer in form.layers.items():
            if layer.activation != "none" or layer.out_dtype is not None:
                raise UnsupportedError(
                    f"{name}: expected a layer without activation and out_dtype, got {layer}"
                )
        for name, block in form.gated_blocks.items():
            if block.preference != PlanPreference():
                raise UnsupportedError(
                    f"{name}: expected a gated block without preferences, got {block.preference}"
                )
        return cls(form)

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Read the names and types of the checkpoint's tensors. Raises as ``_stored``."""
        tensors = get_safetensors_params_metadata(model_name, revision=revision)
        for name, tensor in tensors.items():
            for suffix in _KINDS:
                if name.endswith(suffix):
                    place = name.removesuffix(suffix)
                    saved = self._form.layers.get(place, SavedLayer())
                    self.sparse[place] = _stored(place, suffix, tensors, saved.preference)
            if name.endswith(_WEIGHT):
                place = name.removesuffix(_WEIGHT)
                self.dense[place] = tensor["dtype"]
                if self._stores_zeros and _may_be_sparse(place, tensors):
                    self.sparse[place] = _stored(place, _WEIGHT, tensors, PlanPreference())
        if not self.sparse:
            raise InvalidProblemError(f"model: expected a checkpoint with 2:4 weights, got {model_name}")
        if lost := [name for name in self._form.layers if name not in self.sparse]:
            raise UnsupportedError(f"{lost[0]}: expected the checkpoint's name of a saved layer")

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        def mapped(found: dict[str, Any]) -> dict[str, Any]:
            names = {name: hf_to_vllm_mapper.map_name(name + _WEIGHT) for name in found}
            return {new.removesuffix(_WEIGHT): found[name] for name, new in names.items() if new is not None}

        self.sparse, self.dense = mapped(self.sparse), mapped(self.dense)

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        """A parameter's name has no dots, so ``weight.values24`` becomes ``values24``."""
        ours = {VALUES_SUFFIX: _VALUES, META_SUFFIX: _META, SCALES_SUFFIX: _SCALES}
        parts = {_WEIGHT + suffix: f".{part}" for suffix, part in ours.items()}
        return WeightsMapper(orig_to_new_suffix={**parts, ".shape": None})

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """The method of a layer. Raises UnsupportedError for a compressed weight that can't be served."""
        if not isinstance(layer, LinearBase):
            inside = [
                name
                for name, stored in self.sparse.items()
                if f"{name}.".startswith(f"{prefix}.") and not stored.is_plain
            ]
            if inside:
                raise UnsupportedError(
                    f"{inside[0]}: expected a 2:4 weight of a linear layer, got a {type(layer).__name__}'s"
                )
            return None
        home, dot, own = prefix.rpartition(".")
        names = [home + dot + part for part in self.packed_modules_mapping.get(own, ())]
        if prefix in self.sparse or prefix in self.dense or not names:
            names = [prefix]
        forms = {name: self.sparse.get(name) for name in names}
        if len(set(forms.values())) > 1:
            shown = ", ".join(f"{name}: {'dense' if form is None else form}" for name, form in forms.items())
            raise UnsupportedError(
                f"{prefix}: expected one form for the weights that vLLM merges, got {shown}"
            )
        stored = forms[names[0]]
        if stored is not None:
            return Sparse24VllmMethod(prefix, stored)
        for name in names:
            if (kind := self.dense.get(name, "BF16")) not in ("F32", "F16", "BF16"):
                raise UnsupportedError(f"{name}: expected a dense weight of 32 or 16 bits, got {kind}")
        return UnquantizedLinearMethod()


@register_weight_loader_v2_supported_method
class Sparse24VllmMethod(LinearMethodBase):  # type: ignore[misc]
    """The weight of a layer: its parts while vLLM loads them, then a Sparse24Linear that has it packed.

    A matrix with stored zeros stays dense if it isn't 2:4, or if no kernel serves it.
    """

    def __init__(self, prefix: str, stored: Stored) -> None:
        self._prefix, self._stored = prefix, stored
        self._dense = UnquantizedLinearMethod() if stored.parts is None else None

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the parts as vLLM's parameters. Raises UnsupportedError for columns that can't be cut."""
        stored, loader = self._stored, extra_weight_attrs["weight_loader"]
        m, k, count = sum(output_partition_sizes), input_size_per_partition, len(output_partition_sizes)
        step = max(8, stored.group or 0)
        if stored.parts is not None and k != input_size and k % step:
            raise UnsupportedError(
                f"{self._prefix}: expected a multiple of {step} columns on each rank, got {k} of {input_size}"
            )

        def add(name: str, kind: Any, *shape: int, dtype: torch.dtype = torch.float32, **dims: Any) -> None:
            parameter = kind(data=torch.empty(shape, dtype=dtype), weight_loader=loader, **dims)
            layer.register_parameter(name, parameter)

        wide = k + -k % 8
        rows: dict[str, Any] = {"output_dim": 0}
        whole = {**rows, "input_dim": 1}
        dtype = params_dtype if stored.dtype in DTYPES else stored.dtype
        if stored.parts is None:
            add(_DENSE, ModelWeightParameter, m, k, dtype=dtype, **whole)
        else:
            values, meta, meta_dtype = stored.parts
            add(values, ModelWeightParameter, m, wide // stored.columns_of_a_value, dtype=dtype, **whole)
            add(meta, ModelWeightParameter, m, wide // 8, dtype=meta_dtype, **whole)
        # Scales in another 16-bit dtype than the model's become float32, which is exact.
        scale_dtype = params_dtype if stored.scale_dtype == params_dtype else torch.float32
        if stored.group:
            add(_SCALES, GroupQuantScaleParameter, m, -(-wide // stored.group), dtype=scale_dtype, **whole)
        elif stored.group == 0:
            add(_SCALES, ChannelQuantScaleParameter, m, 1, dtype=scale_dtype, **rows)
        elif stored.scale_dims is not None:
            add(WEIGHT_SCALE, ChannelQuantScaleParameter, m, *stored.scale_dims, **rows)
        elif stored.quantizes_inputs:
            add(WEIGHT_SCALE, PerTensorScaleParameter, count)
        if stored.static_input:
            add(INPUT_SCALE, PerTensorScaleParameter, count)
        layer.sparse24_sizes = (m, k, tuple(output_partition_sizes), params_dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the parts by the packed weight. Raises FormatError for bad metadata.

        Raises UnsupportedError if no kernel serves, or none that is batch-invariant where vLLM asks for it.
        A matrix with stored zeros is kept instead, and the log says why.
        """
        parts = _taken(layer)
        try:
            layer.sparse24 = self._packed(layer, parts)
        except (FormatError, UnsupportedError) as error:
            if self._dense is None:
                raise
            # A matrix of 16 bits is served as it is stored; one of 8 bits takes twice as much memory.
            level = logging.WARNING if self._stored.quantizes_inputs else logging.INFO
            LOAD.log(level, "served dense: %s", error)
            self._keep_dense(layer, parts, self._dense)

    def _packed(self, layer: Any, parts: dict[str, Tensor]) -> Sparse24Linear:
        """The layer's weight, loaded and packed."""
        sparse, state = self._loaded(layer, parts)
        try:
            sparse.load_state_dict(state, assign=True)
        except RuntimeError as error:
            raise FormatError(f"{self._prefix}: {error}") from error
        try:
            sparse.plan()
        except UnsupportedError as error:
            raise UnsupportedError(f"{self._prefix}: {error}") from error
        if isinstance(sparse, Sparse24WeightOnlyLinear):
            sparse.hold_packed()
        sparse.eval()
        return sparse

    def _loaded(self, layer: Any, parts: dict[str, Tensor]) -> tuple[Sparse24Linear, dict[str, Tensor]]:
        """A layer without data, and its state."""
        stored = self._stored
        m, k, _, dtype = layer.sparse24_sizes
        values, meta = self._canonical(parts)
        wishes = stored.preference
        if envs.VLLM_BATCH_INVARIANT:
            require = wishes.require.model_copy(update={"batch_invariant": True})
            wishes = wishes.model_copy(update={"require": require})
        about: dict[str, Any] = {"bias": False, "preference": wishes, "device": "meta"}
        if stored.group is not None:
            scales = parts[_SCALES]
            about |= {"stored": STORED_OF[values.dtype], "group": stored.group, "scale_dtype": scales.dtype}
            weight_only = Sparse24WeightOnlyLinear(k, m, dtype=dtype, **about)
            return weight_only, {VALUES_KEY: values, META_KEY: meta, SCALES_KEY: scales}
        if not stored.quantizes_inputs:
            sparse = Sparse24Linear(k, m, dtype=values.dtype, **about)
            return sparse, {VALUES_KEY: values, META_KEY: meta}
        quantized = Sparse24QuantizedLinear(
            k, m, dtype=values.dtype, static_input=stored.static_input, **about
        )
        values, meta = quantized.padded(values, meta)
        state = {VALUES_KEY: values, META_KEY: meta, WEIGHT_SCALE: self._scale_of_rows(layer, parts)}
        if stored.static_input:
            state[INPUT_SCALE] = parts[INPUT_SCALE].max()
        return quantized, state

    def _canonical(self, parts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The weight's values and metadata. Raises FormatError for a matrix that isn't 2:4."""
        if self._stored.parts is None:
            dense = parts[_DENSE]
            padding = -dense.shape[1] % 8 * dense.element_size()
            wide = nn.functional.pad(dense.view(torch.uint8), (0, padding)).view(dense.dtype)
            try:
                found: tuple[Tensor, Tensor] = torch.ops.sparse24.compress(wide)
            except FormatError as error:
                raise FormatError(f"{self._prefix}: {error}") from error
            return found
        values, meta = (parts[name] for name in self._stored.parts[:2])
        return from_bitmask(values, meta) if self._stored.parts[0] == _BITMASK_VALUES else (values, meta)

    def _scale_of_rows(self, layer: Any, parts: dict[str, Tensor]) -> Tensor:
        """A scale for each row. The rows of one merged matrix may share a scale."""
        scale, widths = parts[WEIGHT_SCALE], layer.sparse24_sizes[2]
        if self._stored.scale_dims is not None:
            return scale
        return scale.repeat_interleave(torch.tensor(widths, device=scale.device))

    def _keep_dense(self, layer: Any, parts: dict[str, Tensor], method: UnquantizedLinearMethod) -> None:
        """Let vLLM's own method have the matrix, scaled."""
        weight = parts[_DENSE]
        if self._stored.quantizes_inputs:
            weight = weight.float() * self._scale_of_rows(layer, parts).view(-1, 1)
        own = nn.Parameter(weight.to(layer.sparse24_sizes[3]), requires_grad=False)
        layer.register_parameter(_DENSE, own)
        layer.sparse24 = None
        method.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        sparse = layer.sparse24
        y: Tensor = self._dense.apply(layer, x, bias) if sparse is None else sparse.product(x, bias)  # type: ignore[union-attr]
        return y


def _taken(layer: nn.Module) -> dict[str, Tensor]:
    """The data of the loaded parts, which the layer doesn't hold any longer."""
    names = [name for name, _ in layer.named_parameters(recurse=False) if name in _PARTS]
    found = {name: getattr(layer, name).data.as_subclass(Tensor) for name in names}
    for name in names:
        delattr(layer, name)
    return found
