"""``MultiheadAttention`` with block-sparse scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from ...blocksparse.dropout import MAX_DROPOUT
from ...blocksparse.layout import BlockSparseLayout
from ...errors import InvalidProblemError, UnsupportedError, shown
from ...vocab import checked_flag
from ..elements import device_of
from .extra_keys import Masks, widened, with_extra_keys
from .functional import attention, matmul, softmax
from .layout_buffers import Layout, layout_of, untraced
from .rule_checks import check_mask_modes, counted
from .sparsity import SparsityConfig, SparsityInfo

F = nn.functional
_RULES = (SparsityInfo, SparsityConfig)


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    masks: Masks,
    causal: bool = False,
    dropout_p: float = 0.0,
    kv_tokens: int | None = None,
) -> Tensor:
    """Attention by its op, or with masks by products and ``softmax``, whose arguments ``masks`` are.

    With ``kv_tokens`` only so many of the first tokens of k and v count.
    """
    if not masks.given:
        lengths: Any = (None, None)
        if kv_tokens is not None:
            lengths = (q.new_full((len(q),), n, dtype=torch.int32) for n in (q.shape[2], kv_tokens))
        options = dict(zip(("q_lengths", "kv_lengths"), lengths, strict=True))
        o: Tensor = attention(q, k, v, layout, causal=causal, dropout_p=dropout_p, **options)
        return o
    scores = matmul(q, k, layout, "sdd", trans_b=True, alpha=q.shape[3] ** -0.5)
    found = softmax(scores, layout, 1.0, *masks, causal=causal)
    return matmul(F.dropout(found, dropout_p), v, layout, "dsd")


def check_dropout_and_modes(dropout: float, key_padding_mask_mode: str, attn_mask_mode: str) -> None:
    """Raise InvalidProblemError for an argument that no call of a module could use."""
    if not isinstance(dropout, Real) or not 0 <= dropout <= MAX_DROPOUT:
        raise InvalidProblemError(
            f"dropout: expected a probability from 0 to 1 - 2^-16, got {shown(dropout)}"
        )
    check_mask_modes(key_padding_mask_mode, attn_mask_mode)


def made_untraced(make: Callable[[], Layout], tokens: int, first: str) -> Layout:
    """The layout that ``make`` makes.

    Raises UnsupportedError within a graph, saying what to call ``first``.
    """
    if torch.compiler.is_compiling():
        raise UnsupportedError(f"query: {tokens} tokens have no layout yet; call {first} before compiling")
    made: Layout = untraced(make)
    return made


def _is_bitmap(given: Any) -> bool:
    known = isinstance(given, (*_RULES, Layout, BlockSparseLayout))
    return not known and (isinstance(given, (list, tuple)) or hasattr(given, "shape"))


def _takes_a_bitmap(init: Callable[..., None]) -> Callable[..., None]:
    """Let the argument behind a bitmap be its block, as in Torch-Blocksparse's last form."""

    @wraps(init)
    def bound(*given: Any, **options: Any) -> None:
        before, behind = given[:4], given[4:]  # the module, embed_dim, num_heads and the bitmap
        if behind and "block" not in options and _is_bitmap(before[-1]):
            options["block"], behind = behind[0], behind[1:]
        init(*before, *behind, **options)

    return bound


class MultiheadAttention(nn.Module):
    """``torch.nn.MultiheadAttention`` with block-sparse scores, and with its parameters.

    Parameters
    ----------
    embed_dim, num_heads : int
    sparsity : SparsityInfo, SparsityConfig, Layout, BlockSparseLayout, Tensor or array
        A rule, which makes one layout for each number of tokens; or a layout of num_heads heads, or its
        bitmap. ``layout`` is another name of this argument. A Layout is shared.
    block : int, optional
        16, 32, 64 or 128; needed beside a bitmap. Torch-Blocksparse's order holds there: the argument behind
        the bitmap is the block, and ``dropout`` and all others follow it.
    dropout, bias, kdim, vdim, batch_first, device, dtype
        The arguments of ``torch.nn.MultiheadAttention``.
    add_bias_kv, add_zero_attn : bool
        Whether every query also sees a learned key, and a key of zeros. They are in one more block column,
        which the module's layouts get behind those of ``sparsity``. This column follows an ``update`` of a
        given layout at the next call; before a compiled module or a captured graph sees the new mask,
        ``layout_for`` must be called.
    key_padding_mask_mode, attn_mask_mode : str
        Whether the masks of ``forward`` are added (``add``) or drop cells (``mul``). The defaults are
        Torch-Blocksparse's; PyTorch's masks are for ``add``. A bool mask is True where a cell is dropped if
        the mode is ``add``, and where it is kept if the mode is ``mul``.
    causal : bool
        Whether cells whose column is beyond their row are dropped.

    ``forward`` differs from PyTorch's: it returns no weights, its seventh argument is ``rpe``, and it refuses
    two-dimensional inputs and three-dimensional masks. A query that sees no key gets zeros, not NaN.

    Without masks it calls the op ``blocksparse_attention``, with masks a product, a softmax and a product.
    Raises InvalidProblemError naming the argument.
    """

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    SparsityInfo = SparsityInfo
    _qkv_same_embed_dim = False
    """Tells nn.TransformerEncoderLayer to call this module instead of using its parameters directly."""

    @_takes_a_bitmap
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        sparsity: Any = None,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        *,
        layout: Any = None,
        block: int | None = None,
        causal: bool = False,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if sparsity is not None and layout is not None:
            raise InvalidProblemError("layout: expected None beside sparsity, which is the same argument")
        check_dropout_and_modes(dropout, key_padding_mask_mode, attn_mask_mode)
        checked_flag("bias", bias)
        self._take_sizes(embed_dim, num_heads, kdim, vdim)
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        self.causal, self.dropout = checked_flag("causal", causal), dropout
        self.batch_first = checked_flag("batch_first", batch_first)
        self.add_zero_attn = checked_flag("add_zero_attn", add_zero_attn)
        self._extra_keys = checked_flag("add_bias_kv", add_bias_kv) + add_zero_attn
        self._take_sparsity(layout if sparsity is None else sparsity, block, device)
        self._make_parameters(bias, add_bias_kv, {"device": device, "dtype": dtype})

    def _take_sizes(self, embed_dim: int, num_heads: int, kdim: int | None, vdim: int | None) -> None:
        size, heads = counted("embed_dim", embed_dim, least=1), counted("num_heads", num_heads, least=1)
        if size % heads:
            raise InvalidProblemError(f"num_heads: expected a divisor of {size}, got {heads}")
        self.embed_dim, self.num_heads, self.head_dim = size, heads, size // heads
        self.kdim = size if kdim is None else counted("kdim", kdim)
        self.vdim = size if vdim is None else counted("vdim", vdim)

    def _take_sparsity(self, sparsity: Any, block: int | None, device: Any) -> None:
        self.sparsity = sparsity if isinstance(sparsity, _RULES) else None
        self.layouts = nn.ModuleDict()
        device_of(device)
        if self.sparsity is not None:
            if block not in (None, self.sparsity.block):
                raise InvalidProblemError(
                    f"block: expected {self.sparsity.block}, as the rule's, got {block!r}"
                )
            return
        if not isinstance(sparsity, (Layout, BlockSparseLayout)) and not _is_bitmap(sparsity):
            raise InvalidProblemError(
                "sparsity: expected a SparsityInfo, SparsityConfig, Layout, BlockSparseLayout or bitmap, "
                f"got {type(sparsity).__name__}"
            )
        self.layouts["given"] = given = layout_of(sparsity, block, device)
        if given.shape.heads != self.num_heads:
            raise InvalidProblemError(f"sparsity: expected {self.num_heads} heads, got {given.shape.heads}")
        if self._extra_keys:
            self._widened_from = given.layout
            wide = Layout(widened(given.layout), persistent=False, device=given.tables.device)
            self.layouts["widened"] = wide

    def _make_parameters(self, bias: bool, bias_kv: bool, about: dict[str, Any]) -> None:
        size = self.embed_dim
        together = self.kdim == size and self.vdim == size
        self.in_proj_weight = nn.Parameter(torch.empty(3 * size, size, **about)) if together else None
        widths = {"q": size, "k": self.kdim, "v": self.vdim}
        for name, width in widths.items():
            weight = None if together else nn.Parameter(torch.empty(size, width, **about))
            self.register_parameter(f"{name}_proj_weight", weight)
        self.in_proj_bias = nn.Parameter(torch.empty(3 * size, **about)) if bias else None
        self.out_proj = nn.Linear(size, size, bias, **about)
        for name in ("bias_k", "bias_v"):
            self.register_parameter(name, nn.Parameter(torch.empty(1, 1, size, **about)) if bias_kv else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters the way ``torch.nn.MultiheadAttention`` does."""
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if (weight := getattr(self, name)) is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for one in (self.bias_k, self.bias_v):
            if one is not None:
                nn.init.xavier_normal_(one)

    @property
    def layout(self) -> Layout | None:
        """The given layout; None if a rule makes layouts."""
        return self.layouts["given"] if self.sparsity is None else None  # type: ignore[return-value]

    @property
    def block(self) -> int:
        """The blocks' size."""
        has_block: Any = self.sparsity or self.layouts["given"].shape
        size: int = has_block.block
        return size

    def layout_for(self, tokens: int, kv_tokens: int | None = None) -> Layout:
        """The layout for this number of tokens, made on the first call.

        Call it before ``torch.compile`` traces the module, because no graph can make a layout. Raises
        InvalidProblemError if the tokens don't fit.
        """
        kv_tokens = tokens if kv_tokens is None else kv_tokens
        found = self._given_layout() if self.sparsity is None else self._made_layout(self.sparsity, tokens)
        _, rows, cols, block, _ = found.sizes
        cols -= block if self._extra_keys else 0
        if (tokens, kv_tokens) != (rows, cols):
            raise InvalidProblemError(
                f"query, key: expected {rows} and {cols} tokens, as the layout has, got "
                f"{tokens} and {kv_tokens}"
            )
        return found

    def _made_layout(self, rule: Any, tokens: int) -> Layout:
        if (name := str(tokens)) not in self.layouts:

            def make() -> Layout:
                made = rule.layout(self.num_heads, tokens)
                made = widened(made) if self._extra_keys else made
                return Layout(made, persistent=False, device=self.out_proj.weight.device)

            self.layouts[name] = made_untraced(make, tokens, f"layout_for({tokens})")
        found: Layout = self.layouts[name]  # type: ignore[assignment]
        return found

    def _given_layout(self) -> Layout:
        """The given layout, or with extra keys the widened one, which takes the given one's mask in place."""
        given: Layout = self.layouts["given"]  # type: ignore[assignment]
        if not self._extra_keys:
            return given
        wide: Layout = self.layouts["widened"]  # type: ignore[assignment]
        is_recording = torch.compiler.is_compiling() or (
            given.tables.is_cuda and torch.cuda.is_current_stream_capturing()
        )
        now = None if is_recording and given.is_behind else given.layout  # no graph waits for the device
        if now is self._widened_from:
            return wide
        if now is None or is_recording:
            raise UnsupportedError(
                "sparsity: the mask of the given layout has changed since the last call; call layout_for "
                "before a graph is compiled or captured"
            )
        untraced(lambda: wide.update(widened(now)))
        self._widened_from = now
        return wide

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        rpe: Tensor | None = None,
        is_causal: bool = False,
        average_attn_weights: bool = True,
    ) -> tuple[Tensor, None]:
        """Map [tokens, Z, embed_dim], with ``batch_first`` [Z, tokens, embed_dim], to the same shape.

        ``key`` and ``value`` have kdim and vdim columns, and as many tokens as the layout has columns.
        ``key_padding_mask`` [Z, kv_tokens], ``attn_mask`` [tokens, kv_tokens] and ``rpe`` [heads, tokens,
        kv_tokens] or [Z, heads, tokens, kv_tokens] are arguments of ``softmax``. With ``is_causal``,
        ``attn_mask`` is taken for the causal mask and not read. The second result is always None: no weights
        are returned, whatever ``need_weights`` and ``average_attn_weights`` say.
        """
        self._check_inputs(query=(query, self.embed_dim), key=(key, self.kdim), value=(value, self.vdim))
        if rpe is not None and not isinstance(rpe, Tensor):
            raise InvalidProblemError(f"rpe: expected a Tensor or None, got {type(rpe).__name__}")
        q, k, v = (self._in_heads(one) for one in self._projected(query, key, value))
        layout, causal = self.layout_for(q.shape[2], k.shape[2]), self.causal or is_causal
        attn_mask = None if is_causal else attn_mask
        modes = self.key_padding_mask_mode, self.attn_mask_mode
        masks = Masks(rpe, key_padding_mask, attn_mask, *modes).with_numbers(q.dtype)
        kv_tokens, extra, block = k.shape[2], self._extra_keys, layout.sizes[3]
        if extra:
            k, v = with_extra_keys(k, self.bias_k, block), with_extra_keys(v, self.bias_v, block)
            if causal or masks.given:
                masks = masks.with_extra_keys(kv_tokens, extra, block, causal, q)
                causal = False
        dropout = self.dropout if self.training else 0.0
        o = masked_attention(q, k, v, layout, masks, causal, dropout, kv_tokens + extra if extra else None)
        batch, _, tokens, _ = o.shape
        order = (0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)
        sides = (batch, tokens) if self.batch_first else (tokens, batch)
        return self.out_proj(o.permute(order).reshape(*sides, self.embed_dim)), None

    def _check_inputs(self, **inputs: tuple[Tensor, int]) -> None:
        """Raise InvalidProblemError naming an input that has another width, dtype or device."""
        weight: Any = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        for name, (tensor, width) in inputs.items():
            if tensor.dim() != 3:
                raise InvalidProblemError(f"{name}: expected three dimensions, got {list(tensor.shape)}")
            if tensor.shape[2] != width:
                raise InvalidProblemError(f"{name}: expected {width} columns, got {list(tensor.shape)}")
            if tensor.device != weight.device:
                raise InvalidProblemError(
                    f"{name}: expected a tensor on {weight.device}, as the weights, got {tensor.device}"
                )
            if tensor.dtype != weight.dtype and not torch.is_autocast_enabled(weight.device.type):
                raise InvalidProblemError(
                    f"{name}: expected {weight.dtype}, as the weights, got {tensor.dtype}"
                )

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if self.in_proj_weight is not None and query is key and key is value:
            together: tuple[Tensor, ...]
            together = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
            return together
        if self.in_proj_weight is not None:
            weights: Any = self.in_proj_weight.chunk(3)
        else:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases: Any = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        inputs = (query, key, value)
        return tuple(F.linear(*one) for one in zip(inputs, weights, biases, strict=True))

    def _in_heads(self, x: Tensor) -> Tensor:
        """x as [Z, heads, tokens, head_dim]."""
        split = x.reshape(*x.shape[:2], self.num_heads, self.head_dim)
        return split.transpose(1, 2) if self.batch_first else split.permute(1, 2, 0, 3)
