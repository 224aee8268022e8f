"""``Sparse24WeightOnlyLinear``: a linear layer whose weight is 2:4 and stored in 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidProblemError, UnsupportedError, check_choice
from ..vocab import ElementKind, ScaleRule, TileRule, element_kind
from ..weights.packed_layouts import QUANTIZED_LAYOUTS, Quantization, stored_width
from ..weights.packing_quantized import unpack_quantized
from ..weights.quantized_weight import GROUPS, STORED, Sparse24QuantizedWeight
from .elements import DTYPE_OF, STORED_OF, canonical_weight, element_of, packed_weight, tensor_of
from .gemm_ops import WEIGHT_ONLY_LINEAR
from .layer_state import VALUES_KEY, words_of
from .library import autocasts, only_dispatches
from .linear import Sparse24Linear
from .methods import check_rule
from .quantized_linear import keeping_dtypes

_ops: Any = torch.ops.sparse24
SCALES_KEY = "weight.scales24"
"""Key of the scales in a state_dict and in our checkpoints."""
_DTYPE_OF_STORED = {stored: dtype for dtype, stored in STORED_OF.items()}


class Sparse24WeightOnlyLinear(Sparse24Linear):
    """``activation(x W^T + bias)`` with W [out_features, in_features] 2:4, stored in 4 or 8 bits.

    W = dtype(stored * scale), as Sparse24QuantizedWeight says; x has W's dtype. The layer holds ``values``
    (uint8 [M, K/4] for ``s4``, else [M, K/2]), ``metadata`` and ``scales`` [M, groups of a row]. ``to``
    changes the device alone. Gradients reach x and the bias. The ``state_dict`` has ``weight.values24``,
    ``weight.meta24``, ``weight.scales24`` and ``bias``. A new layer is zero.

    Parameters
    ----------
    in_features, out_features, bias, activation, out_dtype, require, preference, device
        Arguments of Sparse24Linear.
    stored : ElementKind or str
        ``s4``, ``s8`` or ``fp8_e4m3``.
    group : int
        Columns of a row that share a scale: 32, 64 or 128, or 0 for the whole row.
    scale_dtype : torch.dtype, optional
        ``dtype`` (default) or float32.
    dtype : torch.dtype
        W's when it is multiplied, and x's: bfloat16 or float16.

    Raises InvalidProblemError naming the argument; UnsupportedError for other dtypes.
    """

    _DTYPES = (torch.float16, torch.bfloat16)
    _SCALES: Mapping[str, str] = {SCALES_KEY: "scales"}
    scales: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        stored: ElementKind | str = ElementKind.S4,
        group: int = 128,
        scale_dtype: torch.dtype | None = None,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        **options: Any,
    ) -> None:
        if options.get("trainable"):
            raise UnsupportedError(
                "trainable: expected False, since stored values have no gradients, got True"
            )
        kind = element_kind(stored, "stored")
        check_choice("stored", kind, STORED)
        check_choice("group", group, GROUPS)
        if scale_dtype not in (None, dtype, torch.float32):
            raise InvalidProblemError(f"scale_dtype: expected {dtype} or torch.float32, got {scale_dtype}")
        self.dtype, self.weight_element, self.group = dtype, kind, group  # before a bias of this dtype
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype, **options)
        self.scale_dtype = scale_dtype or dtype
        by = self.quantization
        values = torch.zeros(
            out_features, stored_width(self.k, by), dtype=_DTYPE_OF_STORED[kind], device=device
        )
        self.values = nn.Parameter(values, requires_grad=False)
        groups = by.scales_of_a_row(self.k)
        self.register_buffer(
            "scales", torch.ones(out_features, groups, dtype=self.scale_dtype, device=device)
        )

    @classmethod
    def from_linear(  # type: ignore[override]
        cls,
        linear: nn.Linear,
        *,
        stored: ElementKind | str = ElementKind.S4,
        group: int = 128,
        scale_dtype: torch.dtype | None = None,
        scale_rule: ScaleRule | str = ScaleRule.LEAST_SQUARES,
        method: str = "prune",
        scores: Tensor | None = None,
        **options: Any,
    ) -> Sparse24WeightOnlyLinear:
        """A layer with the pruned and quantized weight of ``linear``, which stays as it is.

        ``method``, ``scores`` and further options are those of ``Sparse24Linear.from_linear``. The weight is
        quantized on the host.
        """
        by: dict[str, Any] = {"stored": stored, "group": group}
        if isinstance(linear, nn.Linear) and linear.weight.is_meta:
            check_rule(method, options.pop("rule", TileRule.OPTIMAL))
            by |= {"scale_dtype": scale_dtype, "dtype": linear.weight.dtype, "device": "meta", **options}
            empty = cls(linear.in_features, linear.out_features, linear.bias is not None, **by)
            empty._follow(linear)
            return empty
        pruned = {"rule": options.pop("rule")} if "rule" in options else {}
        sparse = Sparse24Linear.from_linear(
            linear, method=method, scores=scores, activation=options.get("activation", "none"), **pruned
        )
        cls._checked_dtype(sparse.weight_dtype)
        values, meta = (one.detach().cpu() for one in sparse.canonical())
        weight = Sparse24QuantizedWeight.quantize(
            canonical_weight(values, meta),
            **by,
            scale_element=None if scale_dtype is None else element_of(scale_dtype, "scale_dtype"),
            rule=scale_rule,
        )
        layer = cls.from_weight(weight, sparse.bias, in_features=linear.in_features, **options)
        layer._follow(sparse)
        layer.to(linear.weight.device)
        return layer

    @classmethod
    def from_weight(
        cls,
        weight: Sparse24QuantizedWeight,
        bias: Tensor | None = None,
        *,
        in_features: int | None = None,
        **options: Any,
    ) -> Sparse24WeightOnlyLinear:
        """A layer with a quantized weight, which shares its memory, and a bias [M].

        ``in_features`` is K by default, or up to 7 columns less. For a gated activation W's rows are in the
        order of ``gated_rows``.
        """
        if type(weight) is not Sparse24QuantizedWeight:
            raise InvalidProblemError(
                f"weight: expected a Sparse24QuantizedWeight, got {type(weight).__name__}"
            )
        by = weight.quantization
        layer = cls(
            weight.k if in_features is None else in_features,
            weight.m,
            bias is not None,
            stored=by.element,
            group=by.group,
            scale_dtype=DTYPE_OF[by.scale_element],
            dtype=DTYPE_OF[weight.element],
            device="meta",
            **options,
        )
        if layer.k != weight.k:
            raise InvalidProblemError(
                f"in_features: expected {weight.k} to {weight.k - 7}, got {in_features}"
            )
        values, meta, scales = (tensor_of(view.bits(), view.element) for view in weight.views)
        layer._hold(values, meta, None if bias is None else bias.detach().to(layer.dtype).clone())
        layer.scales = scales
        return layer

    # Forms ------------------------------------------------------------------------------------------

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def weight_bytes(self) -> int:
        nbytes: int = super().weight_bytes + (0 if self.scales is None else self.scales.nbytes)
        return nbytes

    @property
    def quantization(self) -> Quantization:
        """How the layer stores its values."""
        return Quantization(self.weight_element, self.group, element_of(self.scale_dtype, "scale_dtype"))

    def form(self) -> dict[str, Any]:
        return {"stored": self.weight_element.value, "group": self.group, "scale_dtype": self.scale_dtype}

    def hold_packed(self) -> None:
        """Hold the weight as the device's kernels read it, and nothing else: for inference.

        There are no gradients then, and products keep no copy in another layout. ``to`` and loading a
        state_dict restore the canonical weight. On the CPU nothing changes: its kernels read that. Raises
        UnsupportedError or BackendUnavailableError if no kernel serves.
        """
        if self.packed is None and self.plan().sku.layout == QUANTIZED_LAYOUTS[self.weight_element]:
            self._pack()

    def _pack(self) -> None:
        with torch.no_grad():
            self.packed = _ops.pack_quantized(*self._parts(), self.group)
        self.values = self.metadata = self.scales = None

    def _settle(self) -> None:
        """The layer holds the canonical weight on every device, until ``hold_packed``."""

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Stored values, metadata int16 and scales; a packed weight is unpacked on the host."""
        if self.packed is None:
            assert self.values is not None
            assert self.scales is not None
            return self.values, words_of(self.metadata), self.scales
        packed = packed_weight(self.packed.cpu(), *self._shape, self.quantization, self.dtype)
        views = unpack_quantized(packed).views
        values, meta, scales = (tensor_of(view.bits(), view.element).to(self.packed.device) for view in views)
        return values, meta, scales

    def _held(self) -> tuple[Tensor, Tensor]:
        return self._parts()[:2]

    def _hold_canonical(self) -> None:
        """Restore the canonical weight of a layer that holds it packed."""
        if self.packed is not None:
            values, meta, self.scales = self._parts()
            self._unpack(values, meta)

    def kept_values(self, stored: Tensor, rows: slice = slice(None)) -> Tensor:
        if self.weight_element is ElementKind.S4:
            low, high = stored << 4, stored & 0xF0
            stored = torch.stack([low, high], dim=-1).flatten(1).view(torch.int8) >> 4
        scales = self._parts()[2][rows].float()
        if self.group:
            scales = scales.repeat_interleave(self.group // 2, dim=1)[:, : stored.shape[1]]
        return (stored.float() * scales).to(self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Sparse24WeightOnlyLinear:
        self._hold_canonical()
        super()._apply(keeping_dtypes(fn), recurse)
        return self

    def _clear(self) -> None:
        super()._clear()
        assert self.scales is not None
        self.scales.fill_(1.0)

    @classmethod
    def _checked_dtype(cls, dtype: torch.dtype) -> torch.dtype:
        return dtype if dtype in _DTYPE_OF_STORED.values() else super()._checked_dtype(dtype)

    def _scales(self) -> dict[str, Tensor]:
        return {SCALES_KEY: self._parts()[2]}

    def _taken(self, key: str, given: Tensor, own: Tensor) -> Tensor:
        if key in (VALUES_KEY, SCALES_KEY) and given.dtype != own.dtype:
            raise InvalidProblemError(f"{key}: expected {own.dtype}, got {given.dtype}")
        return given

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *about: Any) -> None:
        self._hold_canonical()
        super()._load_from_state_dict(state_dict, prefix, *about)

    # Use ----------------------------------------------------------------------------------------------

    def product(self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
        """Compute what ``forward`` does, with the given bias [out_features] or none instead of the layer's.

        Raises InvalidProblemError for another width or dtype. Under autocast x is converted to W's dtype.
        """
        if autocasts(x.device.type) and x.is_floating_point():
            x = x.to(self.dtype)
        if x.dtype != self.dtype:
            raise InvalidProblemError(f"x: expected {self.dtype}, as the weight, got {x.dtype}")
        if self._padding:
            self._check_width(x)
            x = nn.functional.pad(x, (0, self._padding))
        m, activation, out_dtype, wishes, *_, k = self._direct_options
        if x.dim() and x.shape[-1] != k:  # another K may fill as many tiles
            raise InvalidProblemError(f"x: expected [..., {k}], the weight's K, got {list(x.shape)}")
        weight: Any = self._buffers["packed"]
        form: tuple[Any, ...] = None, m, self.scale_dtype
        if weight is None:
            weight, form = self._parameter("values"), (words_of(self._buffers["metadata"]), None, None)
        meta, *packed = form
        scales = self._buffers["scales"]
        given = x, weight, meta, scales, bias, self.group, activation, out_dtype, wishes, *packed, residual
        # The dispatcher would take as long as everything else that the host does.
        if not torch.compiler.is_compiling() and only_dispatches(x, weight, bias, residual):
            return WEIGHT_ONLY_LINEAR.kernel(*given)
        y: Tensor = _ops.weight_only_linear(*given)
        return y

    def _check_bias(self, bias: torch.dtype, weight: torch.dtype) -> None:
        super()._check_bias(bias, self.dtype)

    def _problem(self, n: int) -> dict[str, Any]:
        return {
            **super()._problem(n),
            "element": element_of(self.dtype, "dtype"),
            "out_element": element_of(self.out_dtype or self.dtype, "out_dtype"),
            **self.quantization.problem,
        }

    def extra_repr(self) -> str:
        return f"stored={self.weight_element}, group={self.group}, {super().extra_repr()}"
