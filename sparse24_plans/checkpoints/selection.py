"""Selects the matrices of a dense model to compress, by type, shape and patterns of their names."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from ..device.tensors import wrong
from ..errors import InvalidProblemError
from ..formats.compressed_tensors import CompressedTensors
from .folder import ELEMENTS, ModelReader
from .layers import LAYER_KEY_PREFIX, Layer, is_compressed
from .safetensors_file import TensorInfo, shown

CONV1D_MODELS = ("clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt")
"""The values of ``model_type`` in a ``config.json`` whose models in transformers have Conv1D layers."""
TRANSPOSED_STACKS = ("gpt_oss", "llama4", "llama4_text")
"""The values whose models stack experts as [experts, in, out]."""
CONV1D_LAYERS = ("c_attn", "c_fc", "c_proj", "q_attn")
"""The names of these layers."""
_WEIGHT = ".weight"
_ATTENTION = "weight of an nn.MultiheadAttention"
_KINDS = {
    "embedding table": (
        *("*embed*", "*wte.*", "*wpe.*", "shared.weight", "*.shared.weight", "*_emb.weight"),
        *("transformer.w.weight", "*_token.weight", "*_tokens.weight", "*codebook.weight", "*position_enc"),
    ),
    "table of queries": (
        *("*projector.query", "*latent_query", "*latents", "*latents_?d"),
        *("*query_feat.weight", "*queries_features.weight"),
    ),
    "table of biases": (
        *("*bias", "*bias_u", "*bias_v", "*attention_biases", "*relative_*bias*", "*.rel_pos*"),
        "*scale_shift_table",
    ),
    "table of norms": ("*norm.scale*", "*norm.shift*"),
    "table of rates": ("*.time_decay", "*.time_faaaa", "*.time_first"),
    "state matrix": ("*A_log", "*.D"),
    "projection of time steps": ("*.dt_proj.weight",),  # Mamba's blocks read it instead of calling it
    # RWKV divides these in place by powers of two before it infers.
    "rescaled projection": ("*blocks.*.attention.output.weight", "*blocks.*.feed_forward.value.weight"),
    "hyper-connection": ("*_hc.fn", "*hc_fn"),  # few rows that mix the streams of a residual
    # 2:4 along the columns of these would go along outputs.
    "transposed projection": ("*mm_input_projection_weight", "*prompts_visual_projection"),
    _ATTENTION: ("*in_proj_weight", "*.q_proj_weight", "*.k_proj_weight", "*.v_proj_weight"),
    "weight of a recurrent layer": ("*weight_ih_l*", "*weight_hh_l*", "*weight_hr_l*"),
    "router": ("*.gate.weight", "*.gate.wg.*", "*router*", "*shared_expert_gate.*"),
    "output head": (
        *("*lm_head*", "*classif*", "*score.weight", "*qa_outputs.*", "*predictions.decoder.*"),
        *("*vocab_projector.*", "proj_out.weight", "output.weight", "head.weight"),
    ),
    "adapter": ("*lora_*",),
}
DEFAULT_EXCLUDE = {pattern: kind for kind, patterns in _KINDS.items() for pattern in patterns}
"""Patterns of names of tensors that stay dense unless included: no layer of ours multiplies them, they are
small, or they cost much accuracy for few bytes.

The patterns serve checkpoints and models in memory. The values say what the tensors are.
"""


_VALUES, _BITMASK = (f".{part}" for part in CompressedTensors.parts[:2])


def patterns_of(argument: str, value: Collection[str]) -> tuple[str, ...]:
    """Shell patterns as a tuple. Raises InvalidProblemError for anything but a sequence of strings."""
    found: list[str] = []
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        len(value)  # an endless iterator has none
        for pattern in value:
            if not isinstance(pattern, str):
                raise TypeError
            found.append(pattern)
    except Exception:  # noqa: BLE001 - a broken object may raise anything
        raise wrong(argument, "a sequence of patterns", value) from None
    return tuple(found)


def check_callback(argument: str, value: Any) -> None:
    """Raise InvalidProblemError for anything but a callable or None."""
    if value is not None and not callable(value):
        raise wrong(argument, "a callable", value)


def reason_to_leave(names: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> str | None:
    """Why the patterns leave a matrix dense, or None. ``names`` are all names by which it is known."""
    if (pattern := _first_match(names, exclude)) is not None:
        return f"excluded by pattern {pattern!r}"
    if _first_match(names, include) is not None:
        return None
    if (pattern := _first_match(names, DEFAULT_EXCLUDE)) is not None:
        return f"{DEFAULT_EXCLUDE[pattern]}, excluded by default ({pattern!r})"
    return "not included" if include else None


def families_of(names: Iterable[str]) -> list[str]:
    """Names with a ``*`` for each number in them, and how often each occurs: ``layers.*.weight (32)``."""
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name)
    return [one[0] if len(one) == 1 else f"{family} ({len(one)})" for family, one in families.items()]


def dense_lines(left: Iterable[tuple[str, int, str | None]]) -> list[str]:
    """Lines that list matrices left dense by reason. Each has its name, bytes and reason."""
    groups: dict[str | None, list[tuple[str, int]]] = {}
    for name, nbytes, reason in left:
        groups.setdefault(reason, []).append((name, nbytes))
    return [
        f"left dense, {sum(nbytes for _, nbytes in group)} bytes, {reason}: "
        + ", ".join(families_of(name for name, _ in group))
        for reason, group in groups.items()
    ]


class Selection:
    """The include and exclude patterns for tensors of the safetensors types ``dtypes``.

    Raises InvalidProblemError if one pattern is given instead of a sequence.
    """

    def __init__(
        self, include: Sequence[str], exclude: Sequence[str], dtypes: Container[str] = ELEMENTS
    ) -> None:
        self._include, self._exclude = patterns_of("include", include), patterns_of("exclude", exclude)
        self._dtypes = dtypes

    def __bool__(self) -> bool:
        """Whether there is any pattern."""
        return bool(self._include or self._exclude)

    def split(self, model: ModelReader) -> tuple[list[Layer], dict[str, str]]:
        """The tensors to compress, and for each other tensor the reason to copy it.

        Raises InvalidProblemError for a compressed model, and for a pattern that matches nothing, because it
        is most likely mistyped.
        """
        keys = (key for shard in model.shards for key in shard.reader.metadata)
        if is_compressed(model) or any(key.startswith(LAYER_KEY_PREFIX) for key in keys):
            raise InvalidProblemError(f"expected a dense checkpoint, {model.path} is compressed already")
        prefixes = (name.removesuffix(_VALUES) for name in model.tensors if name.endswith(_VALUES))
        if any(prefix + _BITMASK in model.tensors for prefix in prefixes):
            raise InvalidProblemError(
                f"expected a dense checkpoint, got one of compressed-tensors, {model.path}; "
                f"run `sparse24 convert --from {CompressedTensors.name} --to sparse24`"
            )
        self._check(model.tensors)
        layers: list[Layer] = []
        reasons: dict[str, str] = {}
        orientation = Orientation(model)
        for info in model.tensors.values():
            stack = info.shape[0] if len(info.shape) == 3 and self.names(info.name) else 0
            transposed = False if stack else orientation.transposed(info.name)
            reason = self._reason_to_copy(info, transposed, bool(stack))
            if reason is None and not self.names(info.name):
                reason = _reason_beside(info.name, model.tensors)
            if stack and reason is None and orientation.has_transposed_stacks:
                reason = "a stack that is stored [experts, in, out], the transpose of what is compressed"
            if reason is None:
                *rows, k = reversed(info.shape) if transposed else info.shape
                layer = Layer(info.name, math.prod(rows), k, ELEMENTS[info.dtype], (info.name,), stack=stack)
                layers.append(replace(layer, transposed=bool(transposed)))
            else:
                reasons[info.name] = reason
        return layers, reasons

    def names(self, name: str) -> bool:
        """Whether an include pattern matches, and no exclude pattern."""
        return bool(self._include) and reason_to_leave((name,), self._include, self._exclude) is None

    def _check(self, names: Mapping[str, object]) -> None:
        for argument, patterns in (("include", self._include), ("exclude", self._exclude)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise InvalidProblemError(f"{argument}: pattern {pattern!r} matches no tensor")

    def _reason_to_copy(self, info: TensorInfo, transposed: bool | None, is_stack: bool) -> str | None:
        """The reason to copy the tensor, or None. Type and shape are checked before the patterns."""
        if info.dtype not in self._dtypes:
            return f"element {shown(info.dtype).lower()}"
        if len(info.shape) != 2 and not is_stack:
            stacked = " (stacked matrices, such as experts, or a convolution)" if len(info.shape) == 3 else ""
            return f"{len(info.shape)}-d{stacked}"
        if info.nbytes == 0:
            return "empty"
        if transposed is None:
            return "stored [in, out] or [out, in]: neither its bias nor a config.json tells"
        if (k := info.shape[0 if transposed else -1]) % 8:
            return f"K={k} is not a multiple of 8"
        return reason_to_leave((info.name,), self._include, self._exclude)


def _reason_beside(name: str, tensors: Container[str]) -> str | None:
    """Why the tensors beside a matrix leave it dense by default, or None.

    nn.MultiheadAttention reads its ``out_proj`` instead of calling it. Only its other weights tell it from
    other layers of this name.
    """
    home = name.removesuffix("out_proj.weight")
    if home != name:
        for beside in (home + "in_proj_weight", home + "q_proj_weight"):
            if beside in tensors:
                return f"{_ATTENTION}, excluded by default (beside {shown(beside)})"
    return None


def _first_match(names: Iterable[str], patterns: Iterable[str]) -> str | None:
    return next((one for one in patterns if any(fnmatchcase(name, one) for name in names)), None)


class Orientation:
    """Says for each matrix of a model whether it is stored [in, out], the transpose of what nn.Linear stores.

    transformers' Conv1D, of which GPT-2 is made, stores matrices so. 2:4 goes along the inputs, so their
    groups of four go down the columns.

    A matrix's own bias tells if the two sides differ, since it has one value for each output. For a square
    matrix the others of its name tell (every ``c_proj``), and then the model's ``config.json``. A matrix
    about which nothing is known is taken for nn.Linear's.
    """

    def __init__(self, model: ModelReader) -> None:
        types = _model_types(model.config() or {})
        self._of_conv1d = any(one in CONV1D_MODELS for one in types)
        self.has_transposed_stacks = any(one in TRANSPOSED_STACKS for one in types)
        """Whether stacked matrices are [experts, in, out]."""
        self._told: dict[str, bool] = {}
        self._family: defaultdict[str, set[bool]] = defaultdict(set)
        for name, info in model.tensors.items():
            if len(info.shape) != 2 or not name.endswith(_WEIGHT):
                continue
            bias = model.tensors.get(name.removesuffix(_WEIGHT) + ".bias")
            (rows, columns), outputs = info.shape, bias.shape if bias is not None else ()
            if rows != columns and outputs in ((rows,), (columns,)):
                self._told[name] = outputs == (columns,)
                self._family[_leaf(name)].add(self._told[name])

    def transposed(self, name: str) -> bool | None:
        """Whether the matrix is stored [in, out]; None if the others of its name contradict each other."""
        if name in self._told:
            return self._told[name]
        known = self._family.get(_leaf(name), set())
        if len(known) == 1:
            return next(iter(known))
        if self._of_conv1d and _leaf(name) in CONV1D_LAYERS:
            return True
        return None if known else False


def _leaf(name: str) -> str:
    """The last name of the module that has the weight."""
    return name.removesuffix(_WEIGHT).rpartition(".")[2]


def _model_types(config: dict[str, Any]) -> list[Any]:
    """The ``model_type`` of a model and of the models that it is composed of."""
    inner = [value.get("model_type") for value in config.values() if isinstance(value, dict)]
    return [config.get("model_type"), *inner]
