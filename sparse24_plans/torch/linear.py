"""``Sparse24Linear``: a linear layer whose weight is 2:4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..errors import InvalidProblemError, Sparse24Error, UnsupportedError, check_choice
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.plan import GemmSparse24Plan
from ..plan.guarantee import GuaranteeRequirement
from ..plan.preference import PlanPreference
from ..vocab import TileRule, checked_flag
from ..vocab.fields import checked_integer
from . import layer_state
from .activations import check_activation, check_rows, epilogue_of, is_gated, row_order
from .elements import device_of, element_of, plan_device
from .gemm_dispatch import linear
from .layer_state import VALUES_KEY, bytes_of, words_of
from .layer_weight import LayerWeight
from .library import only_dispatches
from .methods import METHODS, check_rule, check_scores
from .origin import noted_origin

_ops: Any = torch.ops.sparse24
_linear = _ops.linear.default
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_EMPTY_GROUP = 0x04
"""The metadata of a group without non-zeros, which names positions 0 and 1."""

PreferenceLike = PlanPreference | Mapping[str, Any] | None
RequirementLike = GuaranteeRequirement | Mapping[str, Any] | None


def check_bias(bias: torch.dtype, weight: torch.dtype) -> None:
    """Raise InvalidProblemError for a bias that no product of a weight of 16 or 32 bits adds."""
    if bias not in (weight, torch.float32):
        known = " or ".join(map(str, dict.fromkeys((weight, torch.float32))))
        raise InvalidProblemError(f"bias: expected {known}, got {bias}")


class Sparse24Linear(nn.Module):
    """``activation(x W^T + bias)`` with W [out_features, in_features] 2:4; x may have any leading dimensions.

    The layer holds the canonical weight: ``values`` [M, K/2] and ``metadata`` (uint8 [M, K/4], one byte for
    each group of four). On a CUDA device, a 16-bit weight that isn't ``trainable`` is held packed, from
    which the canonical weight can be restored bit for bit. The ``state_dict`` is always canonical, so it
    loads on any device. Its keys are those of our checkpoints: ``weight.values24``, ``weight.meta24``
    (uint16) and ``bias``. A new layer is zero.

    Parameters
    ----------
    in_features, out_features : int
        K and M. If K isn't a multiple of 8, W and x are padded with zeros to the next one, x at each call.
    bias : bool
        Whether there is a bias [out_features] of the weight's dtype.
    activation : str
        ``none``, ``relu``, ``relu2`` (its square), ``gelu`` (exact), ``gelu_tanh`` or ``silu``, in the
        product's epilogue. ``swiglu``, ``geglu`` and ``geglu_tanh`` make one feature of two: silu(gate) * up,
        gelu(gate) * up, gelu_tanh(gate) * up. The result is then half as
        wide as out_features, a multiple of 16, and W's rows have the order of ``gated_rows``.
    out_dtype : torch.dtype, optional
        The result's dtype: the weight's, or float32.
    trainable : bool
        Whether the kept values are a parameter with gradients. Pruned cells stay zero.
    require : GuaranteeRequirement or mapping, optional
        Guarantees that every kernel must give, such as ``{"batch_invariant": True}``.
    preference : PlanPreference or mapping, optional
        Other preferences for plans.
    device, dtype
        The arguments of torch.nn.Linear; float32, float16 or bfloat16.

    Raises InvalidProblemError naming the argument, UnsupportedError for other dtypes, also in ``to``.
    """

    values: nn.Parameter | None
    metadata: Tensor | None
    packed: Tensor | None
    bias: nn.Parameter | None
    _K_STEP = 8
    _DTYPES: tuple[torch.dtype, ...] = DTYPES
    _SCALES: Mapping[str, str] = {}
    """Names of the layer's scales by their keys in a state_dict."""
    transposed = False
    """Whether the layer stands for one that holds its weight as [in, out], transformers' Conv1D."""
    origin: Mapping[str, Any] = {}
    """How the weight was made, in a checkpoint's words. A saved model says it of the weight again."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str = "none",
        out_dtype: torch.dtype | None = None,
        trainable: bool = False,
        require: RequirementLike = None,
        preference: PreferenceLike = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dtype = self._checked_dtype(torch.get_default_dtype() if dtype is None else dtype)
        in_features = checked_integer("in_features", in_features)
        out_features = checked_integer("out_features", out_features)
        check_activation(activation)
        check_rows(activation, out_features)
        self._check_out_dtype(out_dtype, dtype)
        self.in_features, self.out_features = in_features, out_features
        self.activation, self.out_dtype = activation, out_dtype
        self.trainable = checked_flag("trainable", trainable)
        wishes = PlanPreference.of(preference)
        self.preference = wishes if require is None else wishes.model_copy(update={"require": require})
        self._padding = -in_features % self._K_STEP
        self.k = k = in_features + self._padding
        """Columns of W with its padding."""
        self._choose_options()
        device_of(device)
        self.values = nn.Parameter(
            torch.zeros(out_features, k // 2, device=device, dtype=dtype), requires_grad=trainable
        )
        self.register_buffer(
            "metadata", torch.full((out_features, k // 4), _EMPTY_GROUP, dtype=torch.uint8, device=device)
        )
        self.register_buffer("packed", None)
        own = None
        if bias:  # a weight of 8 bits has a float32 bias
            of_bias = dtype if dtype.itemsize > 1 else torch.float32
            zeros = torch.zeros(out_features, device=device, dtype=of_bias)
            own = nn.Parameter(zeros, requires_grad=trainable)
        self.register_parameter("bias", own)
        self._settle()

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        method: str = "prune",
        rule: TileRule | str = TileRule.OPTIMAL,
        scores: Tensor | None = None,
        **options: Any,
    ) -> Sparse24Linear:
        """A layer with the pruned weight and the bias of ``linear``, which stays as it is.

        Method ``prune`` keeps the two largest |values| of every four, or the two with the largest ``scores``
        [M, K]. ``compress`` takes a weight that is 2:4 already, or raises FormatError. ``tiles`` prunes 4x4
        tiles by ``rule``, so that the transpose is 2:4 too; M must be a multiple of 8. ``options`` go to the
        constructor. For a gated activation the first half of ``linear``'s rows is the gate, as in a model's
        ``gate_up_proj``; the layer reorders them.
        """
        if not isinstance(linear, nn.Linear):
            raise InvalidProblemError(f"linear: expected an nn.Linear, got a {type(linear).__name__}")
        weight = linear.weight.detach()
        cls._checked_dtype(weight.dtype)
        check_choice("method", method, METHODS)
        check_scores(method, scores)
        check_rule(method, rule)
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            device="meta",
            dtype=weight.dtype,
            **options,
        )
        if scores is not None and scores.shape != weight.shape:
            raise InvalidProblemError(f"scores: expected {list(weight.shape)}, got {list(scores.shape)}")
        order = row_order(layer.activation, linear.out_features, weight.device)
        dense = nn.functional.pad(weight[order], (0, layer._padding))
        ranks = None
        if scores is not None:
            ranks = nn.functional.pad(scores[order], (0, layer._padding), value=-torch.inf)
        with torch.no_grad():
            if method == "prune":
                values, meta = _ops.prune_compress(dense, ranks)
            elif method == "compress":
                values, meta = _ops.compress(dense)
            else:
                values, meta = _ops.tile_prune(dense, str(rule))[:2]
            bias = None if linear.bias is None else linear.bias.detach()[order].clone()
            layer._hold(values, meta, bias)
        layer._follow(linear)
        return layer

    def _follow(self, source: nn.Module) -> None:
        """Take over the mode of the layer that the weight is from, and how that weight was made."""
        self.train(source.training)
        self.origin = source.origin if isinstance(source, Sparse24Linear) else noted_origin(source)

    @classmethod
    def _checked_dtype(cls, dtype: torch.dtype) -> torch.dtype:
        if dtype not in cls._DTYPES:
            names = ", ".join(map(str, cls._DTYPES))
            raise UnsupportedError(f"dtype: expected one of {names} for a {cls.__name__}, got {dtype}")
        return dtype

    @staticmethod
    def _check_out_dtype(out_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
        known = dict.fromkeys((dtype, torch.float32)) if dtype.itemsize > 1 else DTYPES
        if out_dtype is not None and out_dtype not in known:
            served = " or ".join(map(str, known))
            raise InvalidProblemError(f"out_dtype: expected {served}, got {out_dtype}")

    def _choose_options(self) -> None:
        """Store the arguments of the op, and of its kernel, that follow the tensors.

        Every argument of an op costs host time, so defaults aren't passed.
        """
        wishes = self.preference.model_dump_json(exclude_defaults=True)
        options = self._shape[0], self.activation, self.out_dtype, "" if wishes == "{}" else wishes
        self._options: tuple[Any, ...] = options if options[1:] != ("none", None, "") else options[:1]
        self._direct_options: tuple[Any, ...] = (*options, None, 1.0, self.k)  # no residual

    def _hold(self, values: Tensor, meta: Tensor, bias: Tensor | None) -> None:
        """Make these tensors the layer's own."""
        self._unpack(*self._as_held(values, meta))
        if bias is not None:
            self.bias = self._in_place_of(self.bias, bias)
        self._settle()

    def _in_place_of(self, old: nn.Parameter | None, new: Tensor) -> nn.Parameter:
        """A parameter that holds ``new``. It is trained if ``old`` was, or without one if the layer is."""
        return nn.Parameter(new, requires_grad=self.trainable if old is None else old.requires_grad)

    def _copy(self, values: Tensor, meta: Tensor, bias: Tensor | None) -> None:
        """Copy these tensors' values, so that an optimizer's references stay valid."""
        assert self.values is not None
        assert self.metadata is not None
        values, meta = self._as_held(values, meta)
        with torch.no_grad():
            self.values.copy_(values)
            self.metadata.copy_(bytes_of(meta))
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias)

    def _as_held(self, values: Tensor, meta: Tensor) -> tuple[Tensor, Tensor]:
        """The canonical weight arranged as the layer holds it."""
        return values, meta

    # Forms ------------------------------------------------------------------------------------------

    @property
    def _weight(self) -> Tensor:
        weight = self.packed if self.values is None else self.values
        assert weight is not None
        return weight

    @property
    def weight(self) -> LayerWeight:
        """The weight's shape, dtype and device, and the two tensors that a state_dict has for it."""
        return LayerWeight(self)

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of W."""
        return self._weight.dtype

    @property
    def _shape(self) -> tuple[int, int]:
        """Rows and columns of the weight that the layer holds."""
        return self.out_features, self.k

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight in the form that the layer holds."""
        return sum(t.nbytes for t in (self.values, self.metadata, self.packed) if t is not None)

    def canonical(self) -> tuple[Tensor, Tensor]:
        """Values [M, K/2] and metadata int16 [M, K/8], in the layer's own memory if it holds them."""
        return self._held()

    def _held(self) -> tuple[Tensor, Tensor]:
        """The canonical form of the weight that the layer holds."""
        if self.values is not None and self.metadata is not None:
            return self.values, words_of(self.metadata)
        with torch.no_grad():
            values, meta = _ops.unpack(self.packed, *self._shape)
        return values, meta

    def stored(self) -> tuple[Tensor, Tensor | None]:
        """The weight as ops take it: packed alone, or values and metadata."""
        if self.packed is not None:
            return self.packed, None
        return self._weight, words_of(self.metadata)

    @property
    def preference_json(self) -> str:
        """The layer's preference as ops take it."""
        found: str = self._direct_options[3]
        return found

    def dense_weight(self) -> Tensor:
        """The dense W [out_features, in_features], with its rows in the order that ``from_linear`` takes."""
        with torch.no_grad():
            values, meta = self.canonical()
            dense = self._scaled(
                _ops.decompress(self.kept_values(values.detach()), meta)[:, : self.in_features]
            )
            if not is_gated(self.activation):
                return dense
            return dense[row_order(self.activation, len(dense), dense.device).argsort()]

    def form(self) -> dict[str, Any]:
        """The arguments besides sizes and dtype that decide which tensors the layer holds."""
        return {}

    def kept_values(self, stored: Tensor, rows: slice = slice(None)) -> Tensor:
        """The kept values [M, K/2] of W, or of some ``rows``, from the values of the canonical form."""
        return stored

    def _scaled(self, dense: Tensor) -> Tensor:
        """The matrix that the stored numbers stand for."""
        return dense

    def _settle(self) -> None:
        """Change to the form that suits the device."""
        weight = self._weight
        packs = weight.is_cuda and weight.element_size() <= 2 and not self.trainable
        if packs == (self.packed is not None):
            return
        values, meta = self._held()
        if packs:
            with torch.no_grad():
                self.packed = _ops.pack(values.detach(), meta)
            self.values = self.metadata = None
        else:
            self._unpack(values, meta)

    def _unpack(self, values: Tensor, meta: Tensor) -> None:
        self.values = self._in_place_of(self.values, values)
        self.metadata, self.packed = bytes_of(meta), None

    def _clear(self) -> None:
        """Set weight and bias to zero, as in a new layer."""
        assert self.values is not None
        assert self.metadata is not None
        with torch.no_grad():
            self.values.zero_()
            self.metadata.fill_(_EMPTY_GROUP)
            if self.bias is not None:
                self.bias.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Sparse24Linear:
        weight = self._weight
        probe = fn(torch.empty(0, dtype=weight.dtype, device=weight.device))
        self._checked_dtype(probe.dtype)
        if self.packed is not None:
            self._unpack(*self._held())
        was_meta = weight.is_meta
        super()._apply(fn, recurse)
        if was_meta and not probe.is_meta:  # to_empty leaves memory uninitialised, without valid metadata
            self._clear()
        self._settle()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._settle()  # torch.load may have put it on another device

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse torch.jit.script, which calls this for each module of a model."""
        raise UnsupportedError(
            f"torch.jit.script: expected a model without a {type(self).__name__}, whose forward TorchScript "
            "can't compile; use torch.jit.trace or torch.export"
        )

    # State --------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        layer_state.save(self, destination, prefix, keep_vars)

    def _shown(self, key: str, tensor: Tensor) -> Tensor:
        """The layer's tensor as a state_dict holds it."""
        return tensor

    def _taken(self, key: str, given: Tensor, own: Tensor) -> Tensor:
        """The part of a state_dict's tensor that replaces ``own``."""
        return given

    def _scales(self) -> dict[str, Tensor]:
        """The layer's scales by the keys that a state_dict has for them."""
        held = {key: getattr(self, name) for key, name in self._SCALES.items()}
        return {key: scale for key, scale in held.items() if scale is not None}

    def _check_loaded(self, key: str, dtype: torch.dtype) -> None:
        """Raise UnsupportedError unless a state_dict's values or bias may have the dtype."""
        (self if key == VALUES_KEY else Sparse24Linear)._checked_dtype(dtype)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, as setting it does, too. Raises InvalidProblemError for a bias's dtype."""
        if name == "bias" and param is not None:
            self._check_bias(param.dtype, self._weight.dtype)
        super().register_parameter(name, param)

    def _check_bias(self, bias: torch.dtype, weight: torch.dtype) -> None:
        """Raise InvalidProblemError for a bias that no product of the layer's ``weight`` adds."""
        if weight.itemsize > 1:
            check_bias(bias, weight)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *about: Any) -> None:
        layer_state.load(self, state_dict, prefix, *about)

    # Use ----------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Map x [..., in_features] to [..., out_features], or half of it if the activation is gated.

        ``residual`` [..., out_features], in the result's dtype or float32, is added before the activation and
        before anything is rounded; a gated layer takes none. Raises InvalidProblemError for another width,
        and for an x that is no tensor.
        """
        if not isinstance(x, Tensor):
            raise InvalidProblemError(f"x: expected a tensor, got {type(x).__name__}")
        return self.product(x, self._parameter("bias"), residual)

    def _parameter(self, name: str) -> Any:
        """The parameter, found faster than by ``getattr``.

        DataParallel's replicas, FSDP's modules and parametrized layers have it as an attribute alone.
        """
        own = self._parameters
        return own[name] if name in own else getattr(self, name)

    def product(self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
        """Compute what ``forward`` does, with the given bias [out_features] or none, not the layer's."""
        if self._padding:
            self._check_width(x)
            x = nn.functional.pad(x, (0, self._padding))
        weight: Any = self._buffers["packed"]
        meta = None
        if weight is None:
            weight, meta = self._parameter("values"), words_of(self._buffers["metadata"])
        options, direct = self._options, self._direct_options
        if residual is not None:
            options = (*direct[:4], residual)
            direct = (*options, 1.0, self.k)
        # The dispatcher would take as long as everything else that the host does.
        if not torch.compiler.is_compiling() and only_dispatches(x, weight, bias, residual):
            return linear(x, weight, meta, bias, *direct)
        if x.dim() and x.shape[-1] != self.k:  # another K may fill as many tiles
            raise InvalidProblemError(f"x: expected [..., {self.k}], the weight's K, got {list(x.shape)}")
        y: Tensor = _linear(x, weight, meta, bias, *options)
        return y

    def _check_width(self, x: Tensor) -> None:
        """Raise InvalidProblemError unless x, which isn't padded yet, has the layer's width."""
        if not x.dim() or x.shape[-1] != self.in_features:
            raise InvalidProblemError(f"x: expected [..., {self.in_features}], got {list(x.shape)}")

    def plan(self, n: int = 1) -> GemmSparse24Plan:
        """The plan for ``n`` tokens on the layer's device, with its kernel, guarantee and explanation.

        Raises UnsupportedError or BackendUnavailableError if no kernel can serve.
        """
        return self.plan_on(plan_device(self._weight), n)

    def plan_on(self, device: int | str, n: int = 1) -> GemmSparse24Plan:
        """The plan on another device than the layer's, an argument of ``select``."""
        (m, k), element = self._shape, element_of(self._weight.dtype, "weight")
        desc = GemmSparse24Descriptor(**{"n": n, "m": m, "k": k, "element": element, **self._problem(n)})
        return GemmSparse24Plan.select(desc, preference=self.preference, device=device)

    def _problem(self, n: int) -> dict[str, Any]:
        """The descriptor's fields besides its sizes and element."""
        return {
            "epilogue": epilogue_of(self.activation, self.bias is not None, gates=True),
            "out_element": element_of(self.out_dtype or self._weight.dtype, "out_dtype"),
        }

    def extra_repr(self) -> str:
        parts = [
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}",
            f"dtype={str(self.weight_dtype).removeprefix('torch.')}",
        ]
        if self.activation != "none":
            parts.append(f"activation={self.activation}")
        if self._padding:
            parts.append(f"padded_to={self.k}")
        parts.append(f"bytes={self.weight_bytes}")
        try:
            plan = self.plan()
            promised = plan.guarantee
            flags = [
                name for name in GuaranteeRequirement.model_fields if getattr(promised, name, None) is True
            ]
            parts += [f"kernel={plan.explain().chosen}", f"guarantee={'+'.join(flags) or 'error bound'}"]
        except Sparse24Error as error:
            parts.append(f"kernel=none ({type(error).__name__})")
        return ", ".join(parts)
