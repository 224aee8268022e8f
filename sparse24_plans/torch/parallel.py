"""Sparse24Linear over several devices: two styles for ``parallelize_module`` on torch.distributed.

The order in which a row-parallel layer adds up the ranks' sums doesn't depend on the collective's algorithm.
Each rank adds up and rounds a share of a large result, which moves the fewest bytes. docs/pytorch.md says
when the bits are those of one device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ..errors import InvalidProblemError, UnsupportedError
from ..vocab import ElementKind, integer
from ..weights.packed_layouts import TILE_M
from .activations import FORWARD, check_rows, is_gated
from .layer_state import META_KEY, VALUES_KEY, words_of
from .library import autocasts
from .linear import Sparse24Linear

_linear: Any = torch.ops.sparse24.linear.default
_MIN_K = 8
_LARGE = 1 << 22
"""Number of results beyond which sums in shares save more time than their extra collective costs."""


class _ShardedLinear(Sparse24Linear):
    """A Sparse24Linear of which each rank of a mesh holds a part.

    ``in_features`` and ``out_features`` are the whole layer's. Parameters are plain tensors with the rank's
    part; a state_dict has DTensors.
    """

    _mesh: DeviceMesh
    _style: ColwiseSparse24 | RowwiseSparse24
    _axis: int
    """The dimension of W that is cut: 0 is M, 1 is K."""

    def _be_sharded(self, style: Any, mesh: DeviceMesh, whole: dict[str, Tensor | None]) -> None:
        """Hold the rank's part of the whole layer's tensors."""
        self._style, self._mesh = style, mesh
        parts: Any = [None if t is None else self._part(key, t) for key, t in whole.items()]
        self._choose_options()
        self._hold(*parts)

    def _placement(self, key: str) -> Placement:
        if key == "bias" and self._axis == 1:
            return Replicate()
        return Shard(self._axis)

    def _part(self, key: str, whole: Tensor) -> Tensor:
        """The rank's part in new memory."""
        placement = self._placement(key)
        if isinstance(placement, Shard):
            whole = whole.chunk(self._mesh.size(), placement.dim)[self._mesh.get_local_rank()]
        return whole.clone(memory_format=torch.contiguous_format)

    def _shown(self, key: str, tensor: Tensor) -> Tensor:
        return _tensor(DTensor.from_local(tensor, self._mesh, [self._placement(key)], run_check=False))

    def _taken(self, key: str, given: Tensor, own: Tensor) -> Tensor:
        placement = self._placement(key)
        if isinstance(given, DTensor):
            if given.device_mesh != self._mesh:
                raise InvalidProblemError(
                    f"{key}: expected a DTensor on {self._mesh}, got one on {given.device_mesh}"
                )
            # No backend of PyTorch exchanges integers of 16 bits.
            wide: Any = given.to(torch.int32) if key == META_KEY else given
            return _tensor(wide.redistribute(placements=[placement]).to_local().to(given.dtype))
        wanted = list(own.shape)
        if isinstance(placement, Shard):
            wanted[placement.dim] *= self._mesh.size()
        if list(given.shape) != wanted:
            raise InvalidProblemError(
                f"{key}: expected a DTensor, or the whole {wanted}, got {list(given.shape)}"
            )
        return self._part(key, given)

    def _incoming(self, x: Tensor, wanted: Placement, gradient: Placement | None) -> Tensor:
        """The rank's part of x. ``gradient`` is the placement of its gradient if that isn't ``wanted``."""
        mesh, given = self._mesh, tuple(_counted(one, x) for one in self._style.input_layouts)
        if not isinstance(x, DTensor):
            no_gradient = gradient is None or not (torch.is_grad_enabled() and x.requires_grad)
            if given == (wanted,) and no_gradient:
                return x
            x = DTensor.from_local(x, mesh, given, run_check=False)
        elif x.device_mesh != mesh:
            raise InvalidProblemError(f"x: expected a DTensor on {mesh}, got one on {x.device_mesh}")
        if x.placements != (wanted,):
            x = x.redistribute(placements=[wanted])
        return _tensor(x.to_local(grad_placements=None if gradient is None else [gradient]))

    def _outgoing(self, y: Tensor, given: Placement, wanted: Placement) -> Tensor:
        style = self._style
        if style.use_local_output and given == wanted:
            return y
        whole = DTensor.from_local(y, self._mesh, [given], run_check=False)
        if given != wanted:
            whole = whole.redistribute(placements=[wanted])
        return _tensor(whole.to_local() if style.use_local_output else whole)

    def extra_repr(self) -> str:
        cut = ("out_features", "in_features")[self._axis]
        return f"{super().extra_repr()}, {cut} on {self._mesh.size()} ranks"


class ColwiseSparse24Linear(_ShardedLinear):
    """A column-parallel Sparse24Linear: each rank has rows of W and of the bias."""

    _axis = 0

    @property
    def _shape(self) -> tuple[int, int]:
        return self.out_features // self._mesh.size(), self.k

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Map x, placed by ``input_layouts``, to the result, placed by ``output_layouts``."""
        _refuse_residual(residual)
        y = super().forward(self._incoming(x, Replicate(), Partial()))
        (wanted,) = self._style.output_layouts
        return self._outgoing(y, Shard(y.dim() - 1), _counted(wanted, y))


class RowwiseSparse24Linear(_ShardedLinear):
    """A row-parallel Sparse24Linear: each rank has columns of W and the whole bias.

    If a rank has several parts of K, the layer's tensors hold the weights of the parts one below the other.
    """

    _axis = 1
    _parts: int
    """The number of parts of K on this rank."""

    @property
    def _shape(self) -> tuple[int, int]:
        return self.out_features * self._parts, self.k // (self._mesh.size() * self._parts)

    def canonical(self) -> tuple[Tensor, Tensor]:
        """Values and metadata of the rank's columns, with its parts side by side."""
        values, meta = self._held()
        return _beside(values, self._parts), _beside(meta, self._parts)

    def _choose_options(self) -> None:
        wishes = self.preference.model_dump_json(exclude_defaults=True)
        self._options = (self.out_features, "none", torch.float32, "" if wishes == "{}" else wishes)

    def _as_held(self, values: Tensor, meta: Tensor) -> tuple[Tensor, Tensor]:
        return _below(values, self._parts), _below(meta, self._parts)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Map x, placed by ``input_layouts``, to [..., out_features] placed by ``output_layouts``."""
        _refuse_residual(residual)
        partial = summed_in_pairs(self._products(self._incoming(x, Shard(x.dim() - 1), None)))
        (wanted,) = self._style.output_layouts
        placed = _counted(wanted, partial)
        if self._is_summed_in_shares(partial, placed):
            own = _scattered(partial.view(self._mesh.size(), -1, self.out_features), self._mesh)
            y = _gathered(self._finished(own, placed), self._mesh).view(partial.shape)
        else:
            summed = _SumOverRanks.apply(partial, self._mesh, getattr(placed, "dim", None))
            y = self._finished(summed, placed)
        return self._outgoing(y, placed, placed)

    def _is_summed_in_shares(self, partial: Tensor, placed: Placement) -> bool:
        """Whether each rank finishes a share of the tokens and sends rounded results to the others."""
        ranks, bias = self._mesh.size(), self.bias
        if ranks == 1 or not isinstance(placed, Replicate) or torch.compiler.is_compiling():
            return False
        learns = partial.requires_grad or (bias is not None and bias.requires_grad)
        if torch.is_grad_enabled() and learns:
            return False
        count: int = partial.numel()
        return count >= _LARGE and count // self.out_features % ranks == 0

    def _finished(self, total: Tensor, placed: Placement) -> Tensor:
        """The rounded results: sums over all of K with bias and activation."""
        if self.bias is not None:
            total = total + self._bias_of(placed, total.dim()).float()
        return _tensor(FORWARD[self.activation](total).to(self.out_dtype or self._autocast_dtype()))

    def _autocast_dtype(self) -> torch.dtype:
        """The weight's dtype when it is multiplied, which autocast gives a float32 weight."""
        dtype, kind = self._weight.dtype, self._weight.device.type
        if dtype == torch.float32 and autocasts(kind):
            return torch.get_autocast_dtype(kind)
        return dtype

    def _products(self, x: Tensor) -> list[Tensor]:
        """The float32 product of each of the rank's parts of K."""
        parts, weight = self._parts, self._weight
        metas = [None] * parts if self.metadata is None else words_of(self.metadata).chunk(parts)
        return [
            _linear(columns, w, words, None, *self._options)
            for columns, w, words in zip(x.chunk(parts, -1), weight.chunk(parts), metas, strict=True)
        ]

    def _bias_of(self, placed: Placement, dims: int) -> Tensor:
        """The bias of the rank's results. If these are a part, its gradient is summed over the ranks."""
        bias: Any = self.bias
        if not isinstance(placed, Shard):
            return _tensor(bias)
        whole = DTensor.from_local(bias, self._mesh, [Replicate()], run_check=False)
        local = _tensor(whole.to_local(grad_placements=[Partial()]))
        if placed.dim != dims - 1:
            return local
        return local.chunk(self._mesh.size())[self._mesh.get_local_rank()]

    def _problem(self, n: int) -> dict[str, Any]:
        """The fields of the product of one part of K."""
        return {"m": self.out_features, "out_element": ElementKind.F32}


def _tensor(value: Any) -> Tensor:
    made: Tensor = value
    return made


def _refuse_residual(residual: Tensor | None) -> None:
    if residual is not None:
        raise UnsupportedError("residual: expected None for a layer of several ranks, got a tensor")


def _below(matrix: Tensor, parts: int) -> Tensor:
    """[M, parts * k] as [parts * M, k]: parts side by side are put one below the other."""
    if parts == 1:
        return matrix
    m, columns = matrix.shape
    return matrix.view(m, parts, columns // parts).transpose(0, 1).reshape(parts * m, columns // parts)


def _beside(matrix: Tensor, parts: int) -> Tensor:
    """The inverse of ``_below``."""
    if parts == 1:
        return matrix
    rows, k = matrix.shape
    return matrix.view(parts, rows // parts, k).transpose(0, 1).reshape(rows // parts, parts * k)


def _counted(placement: Placement, tensor: Tensor) -> Placement:
    """The placement with its dimension counted from the front."""
    if isinstance(placement, Shard) and placement.dim < 0:
        return Shard(placement.dim + tensor.dim())
    return placement


# Sums over ranks ------------------------------------------------------------------------------------


def summed_in_pairs(parts: list[Tensor]) -> Tensor:
    """The sum pair by pair: (0 + 1) + (2 + 3) and so on. A part without a neighbour waits a round."""
    while len(parts) > 1:
        pairs = [one + other for one, other in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


class _SumOverRanks(torch.autograd.Function):
    """The sum of the ranks' tensors, pair by pair in rank order: all of it, or a part along ``dim``."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, mesh: DeviceMesh, dim: int | None) -> Tensor:
        ctx.mesh, ctx.dim = mesh, dim
        ranks = mesh.size()
        if ranks == 1:
            return partial.clone()
        if dim is not None:
            if partial.shape[dim] % ranks:
                raise InvalidProblemError(
                    f"output_layouts: expected a dimension {dim} that {ranks} ranks divide, got a result "
                    f"{list(partial.shape)}"
                )
            return _scattered(torch.stack(partial.chunk(ranks, dim)), mesh)
        if ranks == 2:
            return summed_in_pairs(list(_gathered(partial, mesh).unbind()))
        # Each rank sums a part, so that no more is moved than a ring would move.
        flat = partial.reshape(-1)
        padded = nn.functional.pad(flat, (0, -flat.numel() % ranks))
        whole = _gathered(_scattered(padded.view(ranks, -1), mesh), mesh)
        return whole.view(-1)[: flat.numel()].view(partial.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        if ctx.dim is not None and ctx.mesh.size() > 1:
            dy = torch.cat(_gathered(dy, ctx.mesh).unbind(), dim=ctx.dim)
        return dy, None, None


def _gathered(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """Every rank's tensor, [ranks, ...]."""
    found = part.new_empty((mesh.size() * part.numel(),))
    dist.all_gather_into_tensor(found, part.reshape(-1), group=mesh.get_group())
    return found.view(mesh.size(), *part.shape)


def _scattered(parts: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over ranks of part r of each rank's tensor [ranks, ...], on rank r."""
    found = torch.empty_like(parts)
    dist.all_to_all_single(found, parts.contiguous(), group=mesh.get_group())
    return summed_in_pairs(list(found.unbind()))


class _Style(ParallelStyle):
    """The arguments and checks that both styles share."""

    src_data_rank: int | None = 0  # PyTorch 2.6 doesn't set it
    _default_input: Placement
    _default_output: Placement

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        given = {"input_layouts": input_layouts, "output_layouts": output_layouts}
        for name, layout in given.items():
            if layout is not None and type(layout) not in (Shard, Replicate):
                raise InvalidProblemError(f"{name}: expected Shard or Replicate, got {layout!r}")
        if not isinstance(use_local_output, bool):
            raise InvalidProblemError(f"use_local_output: expected True or False, got {use_local_output!r}")
        self.input_layouts = (input_layouts or self._default_input,)
        self.output_layouts = (output_layouts or self._default_output,)
        self.use_local_output = use_local_output

    def __repr__(self) -> str:
        about = ", ".join(f"{name}={value}" for name, value in vars(self).items() if name != "src_data_rank")
        return f"{type(self).__name__}({about})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not Sparse24Linear:
            raise InvalidProblemError(
                f"module: expected a Sparse24Linear (to_sparse24 makes them), got a {type(module).__name__}"
            )
        if device_mesh.ndim != 1:
            raise InvalidProblemError(f"device_mesh: expected one dimension, got {device_mesh}")
        self._check(module, device_mesh.size())
        parts = _agreed(module, device_mesh, self.src_data_rank)
        self._shard(module, device_mesh, parts)
        return module

    def _check(self, layer: Sparse24Linear, ranks: int) -> None:
        raise NotImplementedError

    def _shard(self, layer: Any, mesh: DeviceMesh, whole: dict[str, Tensor | None]) -> None:
        raise NotImplementedError


def _agreed(layer: Sparse24Linear, mesh: DeviceMesh, source: int | None) -> dict[str, Tensor | None]:
    """The whole layer's canonical tensors on rank ``source``, or each rank's own if that is None."""
    with torch.no_grad():
        values, meta = layer.canonical()
        bias = None if layer.bias is None else layer.bias.detach()
        found = {VALUES_KEY: values.detach(), META_KEY: meta, "bias": bias}
        if source is None or mesh.size() == 1 or values.is_meta:
            return found
        group = mesh.get_group()
        for name, tensor in found.items():
            if tensor is not None:
                own = tensor.clone(memory_format=torch.contiguous_format)
                dist.broadcast(own.view(torch.uint8), dist.get_global_rank(group, source), group=group)
                found[name] = own
    return found


class ColwiseSparse24(_Style):
    """ColwiseParallel for a Sparse24Linear: rows of W (out features) on each rank of the mesh.

    ``input_layouts``, ``output_layouts`` and ``use_local_output`` are arguments of PyTorch's ColwiseParallel.
    By default x is replicated, and the result is a plain tensor, sharded along its last dimension.
    out_features must be a multiple of the number of ranks, or of 16 times it with a gated activation.

    If the layer requires batch invariance (or bits that are stable across hardware), results have the bits of
    one device: the ranks' plans sum K like the whole weight's plan (``PlanPreference.whole_m``).

    ``parallelize_module`` raises InvalidProblemError for other modules, meshes of more than one dimension,
    and sizes that don't divide.
    """

    _default_input, _default_output = Replicate(), Shard(-1)

    def _check(self, layer: Sparse24Linear, ranks: int) -> None:
        if layer.out_features % ranks:
            raise InvalidProblemError(
                f"out_features: expected a multiple of {ranks} ranks, got {layer.out_features}"
            )
        check_rows(layer.activation, layer.out_features, ranks)

    def _shard(self, layer: Any, mesh: DeviceMesh, whole: dict[str, Tensor | None]) -> None:
        if layer.preference.require.batch_invariant:
            layer.preference = layer.preference.model_copy(update={"whole_m": layer.out_features})
        layer.__class__ = ColwiseSparse24Linear
        layer._be_sharded(self, mesh, whole)


class RowwiseSparse24(_Style):
    """RowwiseParallel for a Sparse24Linear: columns of W (in features) on each rank of the mesh.

    ``input_layouts``, ``output_layouts`` and ``use_local_output`` are arguments of PyTorch's RowwiseParallel.
    By default x is sharded along its last dimension, and the result is a replicated plain tensor.
    in_features must be a multiple of 8 times the number of ranks.

    Each rank's product is float32. The products are added pair by pair in rank order, then come bias,
    activation and rounding. Another number of ranks therefore gives other bits, unless ``parts`` fixes into
    how many equal parts K is cut: a power of two that the number of ranks divides. A rank multiplies its
    parts one by one, and the bits are those of one rank with as many parts. If a rank has several parts,
    out_features must be a multiple of 64, the rows of a tile.

    ``parallelize_module`` raises InvalidProblemError for other modules, meshes of more than one dimension,
    and sizes that don't divide; UnsupportedError for a gated activation, for required batch invariance
    without ``parts``, and for required bits that are stable across hardware, which one sum over K defines.
    """

    _default_input, _default_output = Shard(-1), Replicate()

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        parts: int | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output
        )
        if parts is not None:
            found = integer(parts)
            if found is None or found < 1 or found & (found - 1):
                raise InvalidProblemError(f"parts: expected a power of two, got {parts!r}")
        self.parts = parts

    def _check(self, layer: Sparse24Linear, ranks: int) -> None:
        if is_gated(layer.activation):
            raise UnsupportedError(
                f"activation: {layer.activation} follows a sum over all of K, and a row-parallel layer adds "
                "up those of its ranks; use ColwiseSparse24"
            )
        parts = self.parts or ranks
        if parts % ranks:
            raise InvalidProblemError(f"parts: expected a multiple of {ranks} ranks, got {parts}")
        if layer.in_features % (_MIN_K * parts):
            raise InvalidProblemError(
                f"in_features: expected a multiple of {_MIN_K} times {parts} parts of K, got "
                f"{layer.in_features}"
            )
        if parts > ranks and layer.out_features % TILE_M:
            raise InvalidProblemError(
                f"out_features: expected a multiple of {TILE_M} where a rank has several parts of K, got "
                f"{layer.out_features}"
            )
        require = layer.preference.require
        if require.bit_stable_across_hardware:
            raise UnsupportedError(
                "require: bit_stable_across_hardware is defined for one sum over K, and a row-parallel layer "
                "adds up those of its ranks; use ColwiseSparse24"
            )
        if require.batch_invariant and self.parts is None:
            raise UnsupportedError(
                "require: batch_invariant asks for bits that depend on nothing but x and W, and those of a "
                "row-parallel layer depend on the number of ranks; with RowwiseSparse24(parts=) they don't: "
                f"say into how many parts K is cut on any number of ranks, a multiple of the {ranks} here"
            )

    def _shard(self, layer: Any, mesh: DeviceMesh, whole: dict[str, Tensor | None]) -> None:
        layer.__class__ = RowwiseSparse24Linear
        layer._parts = (self.parts or mesh.size()) // mesh.size()
        layer._be_sharded(self, mesh, whole)
