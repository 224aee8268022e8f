"""Self-attention under the names that Torch-Blocksparse made for DeepSpeed, and a swap of whole models."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...errors import InvalidProblemError
from .extra_keys import Masks
from .layout_buffers import Layout
from .multihead import MultiheadAttention, masked_attention
from .sparsity import SparsityInfo


class DeepSpeedSparseSelfAttention(nn.Module):
    """softmax(q k^T / sqrt(head_size)) v over kept blocks, without projections.

    The arguments are Torch-Blocksparse's: ``embed_dim`` and ``num_heads``, those of SparsityInfo, and the
    masks' modes, as in MultiheadAttention; and ``dropout``, which training applies to the softmax.
    """

    def __init__(
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
        super().__init__()
        self.dropout = dropout
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.sparsity = SparsityInfo(mode, block, stride, unidirectional, numverts, vertsize)
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        self._layouts: dict[Any, Layout] = {}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Map three tensors [Z, num_heads, tokens, head_size] to one. Raises InvalidProblemError."""
        if query.dim() != 4 or query.shape[1] != self.num_heads:
            wanted = f"[Z, {self.num_heads}, tokens, head_size]"
            raise InvalidProblemError(f"query: expected {wanted}, got {list(query.shape)}")
        where = tokens, _ = query.shape[2], query.device
        if where not in self._layouts:
            self._layouts[where] = Layout(self.sparsity.layout(self.num_heads, tokens), device=query.device)
        masks = Masks(rpe, key_padding_mask, attn_mask, self.key_padding_mask_mode, self.attn_mask_mode)
        dropout = self.dropout if self.training else 0.0
        return masked_attention(query, key, value, self._layouts[where], masks, dropout_p=dropout)


def replace_mha(model: nn.Module, sparsity: Any, **options: Any) -> list[str]:
    """Replace every ``torch.nn.MultiheadAttention`` of a model by ours with its parameters, in place.

    ``sparsity`` and ``options`` are arguments of MultiheadAttention. The result lists the names. Raises
    InvalidProblemError for a wrong model; nothing is replaced then.
    """
    if not isinstance(model, nn.Module) or isinstance(model, nn.MultiheadAttention):
        raise InvalidProblemError(
            f"model: expected a module that holds attention, got {type(model).__name__}"
        )
    made = {
        name: _like(module, sparsity, options)
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
    }
    for name, module in made.items():
        model.set_submodule(name, module)
    return list(made)


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
        **options,
    )
    state = {name: one for name, one in theirs.state_dict().items() if one is not None}
    ours.load_state_dict(state, strict=False)
    ours.train(theirs.training)
    return ours
