"""Self-attention under the names that Torch-Blocksparse made for DeepSpeed, and a swap of whole models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ...errors import InvalidProblemError, check_type
from ...vocab import integer
from .extra_keys import Masks
from .layout_buffers import Layout
from .multihead import MultiheadAttention, check_dropout_and_modes, made_untraced, masked_attention
from .rule_checks import counted
from .sparsity import SparsityConfig, SparsityInfo

_DEFAULT = SparsityInfo("fixed", 16, 64, unidirectional=True)
"""Torch-Blocksparse's default rule."""


class DeepSpeedSparseSelfAttention(nn.Module):
    """softmax(q k^T / sqrt(head_size)) v over kept blocks, without projections.

    The arguments are those of Torch-Blocksparse's last form: ``sparsity_config``, a SparsityInfo or a
    SparsityConfig, by default unidirectional strides of 64 tokens in blocks of 16; the two modes
    ``key_padding_mask_mode`` and ``attn_mask_mode`` as in MultiheadAttention; and ``dropout``, which training
    applies to the softmax. Its form before is taken too: ``embed_dim``, which does nothing, ``num_heads``,
    the arguments of SparsityInfo, the two modes and ``dropout``.

    Raises InvalidProblemError naming the argument.
    """

    num_heads: int | None
    """The heads that a query must have, or None for any number, which a SparsityInfo alone serves."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__()
        begins_with_sizes = "embed_dim" in options or (given and integer(given[0]) is not None)
        take = self._take_sizes if begins_with_sizes else self._take_rule
        take(*given, **options)
        self._layouts: dict[Any, Layout] = {}

    def _take_sizes(
        self,
        embed_dim: int,
        num_heads: int,
        mode: str = "fixed",
        block: int = 16,
        stride: int = 64,
        unidirectional: bool = False,
        numverts: int = 1,
        vertsize: int = 1,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        dropout: float = 0.0,
    ) -> None:
        rule = SparsityInfo(mode, block, stride, unidirectional, numverts, vertsize)
        self._take_rule(rule, key_padding_mask_mode, attn_mask_mode, dropout)
        self.embed_dim, self.num_heads = embed_dim, counted("num_heads", num_heads, least=1)

    def _take_rule(
        self,
        sparsity_config: SparsityInfo | SparsityConfig = _DEFAULT,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        dropout: float = 0.0,
    ) -> None:
        rules = SparsityInfo, SparsityConfig
        check_type("sparsity_config", sparsity_config, rules, "a SparsityInfo or SparsityConfig")
        check_dropout_and_modes(dropout, key_padding_mask_mode, attn_mask_mode)
        # Fields of a rule may be set, which must not change the default of other modules.
        self.sparsity = replace(_DEFAULT) if sparsity_config is _DEFAULT else sparsity_config
        self.dropout = dropout
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        self.num_heads = getattr(sparsity_config, "num_heads", None)

    @property
    def sparsity_config(self) -> SparsityInfo | SparsityConfig:
        """Torch-Blocksparse's name of ``sparsity``."""
        return self.sparsity

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Map three tensors [Z, num_heads, tokens, head_size] to one.

        The key may also be [Z, num_heads, head_size, tokens], unless tokens and head_size are equal, because
        Torch-Blocksparse takes a square key as it is. Masks may have dimensions of 1: ``key_padding_mask``
        [Z, 1, 1, tokens], ``attn_mask`` [1, 1, tokens, tokens]. ``rpe`` is [Z, num_heads, tokens, tokens], or
        [num_heads, tokens, tokens] for the whole batch. Raises InvalidProblemError.
        """
        if query.dim() != 4 or self.num_heads not in (None, query.shape[1]) or not query.shape[3]:
            wanted = f"[Z, {self.num_heads or 'num_heads'}, tokens, head_size]"
            raise InvalidProblemError(f"query: expected {wanted}, got {list(query.shape)}")
        heads, tokens = query.shape[1:3]
        if key.dim() == 4 and key.shape[2] != tokens and key.mT.shape == query.shape:
            key = key.mT
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.squeeze(tuple(range(1, key_padding_mask.dim())))
        if attn_mask is not None:
            attn_mask = attn_mask.squeeze()
        where = heads, tokens, query.device
        if where not in self._layouts:
            self._layouts[where] = made_untraced(
                lambda: Layout(self.sparsity.layout(heads, tokens), device=query.device), tokens, "the module"
            )
        masks = Masks(rpe, key_padding_mask, attn_mask, self.key_padding_mask_mode, self.attn_mask_mode)
        dropout = self.dropout if self.training else 0.0
        return masked_attention(query, key, value, self._layouts[where], masks, dropout_p=dropout)


def replace_mha(model: nn.Module, sparsity: Any = None, *, info: Any = None, **options: Any) -> list[str]:
    """Replace every ``torch.nn.MultiheadAttention`` of a model by ours with its parameters, in place.

    ``sparsity``, which Torch-Blocksparse names ``info``, and ``options`` are arguments of
    MultiheadAttention. Masks keep PyTorch's meaning, because ``attn_mask_mode`` is ``add`` unless given. The
    parameters are not copied, so optimizers, ties and ``requires_grad`` stay; a module that a model holds in
    several places has one replacement. The result lists the names of all places. Encoders whose attention is
    replaced make no nested tensors.

    Raises InvalidProblemError for a wrong model; nothing is replaced then.
    """
    if not isinstance(model, nn.Module) or isinstance(model, nn.MultiheadAttention):
        raise InvalidProblemError(
            f"model: expected a module that holds attention, got {type(model).__name__}"
        )
    if sparsity is not None and info is not None:
        raise InvalidProblemError("info: expected None beside sparsity, which is the same argument")
    sparsity = info if sparsity is None else sparsity
    found = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.MultiheadAttention)
    }
    made = {module: _like(module, sparsity, options) for module in dict.fromkeys(found.values())}
    for name, module in found.items():
        model.set_submodule(name, made[module])
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder):
            encoder.use_nested_tensor = False  # nested tensors have no number of tokens, which layouts need
    return list(found)


def _like(theirs: nn.MultiheadAttention, sparsity: Any, options: dict[str, Any]) -> MultiheadAttention:
    weight = theirs.out_proj.weight
    ours = MultiheadAttention(
        theirs.embed_dim,
        theirs.num_heads,
        sparsity,
        dropout=theirs.dropout,
        bias=theirs.in_proj_bias is not None,
        add_bias_kv=theirs.bias_k is not None,
        add_zero_attn=theirs.add_zero_attn,
        kdim=theirs.kdim,
        vdim=theirs.vdim,
        batch_first=theirs.batch_first,
        device=weight.device,
        dtype=weight.dtype,
        **{"attn_mask_mode": "add", **options},
    )
    given = dict(theirs.named_parameters(remove_duplicate=False))
    wanted = [name for name, _ in ours.named_parameters()]
    if sorted(given) != sorted(wanted):
        raise InvalidProblemError(
            f"model: expected attention with the parameters {', '.join(wanted)}, got {', '.join(given)}; "
            "remove its parametrizations, or replace it yourself"
        )
    for name, parameter in given.items():
        owner, _, last = name.rpartition(".")
        setattr(ours.get_submodule(owner), last, parameter)
    ours.train(theirs.training)
    return ours
