"""Multi-head attention with fewer heads than its embedding has room for."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SlimMultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` after heads were removed; made by :meth:`adopt`, called as before.

    PyTorch's own forward pass takes heads × head width to be the embedding's width; this one does not. The fused
    inference path of ``nn.TransformerEncoderLayer`` makes the same assumption and is switched off.
    """

    @classmethod
    def adopt(cls, module: nn.MultiheadAttention) -> None:
        """Turn a module whose projections were sliced into this class, in place."""
        if type(module) not in (nn.MultiheadAttention, cls):
            raise ValueError(
                f"{type(module).__name__} has a forward pass of its own; register_surgery({type(module).__name__}) "
                "can say what must change in it when heads are removed."
            )
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError("attention with add_bias_kv or add_zero_attn cannot lose heads.")
        query, key, value = _projections(module)
        module.num_heads = len(query) // module.head_dim
        module.embed_dim, module.kdim, module.vdim = query.shape[1], key.shape[1], value.shape[1]
        module._qkv_same_embed_dim = False  # keeps the fused path of the encoder layer away
        module.__class__ = cls

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``nn.MultiheadAttention.forward``; the attention weights are those of the remaining heads."""
        batched = query.dim() == 3
        inputs = [query, key, value]
        if not batched:
            inputs = [x.unsqueeze(0) for x in inputs]
            key_padding_mask = key_padding_mask.unsqueeze(0) if key_padding_mask is not None else None
        elif not self.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        biases = self.in_proj_bias.chunk(3) if self.in_proj_bias is not None else (None, None, None)
        q, k, v = (
            F.linear(x, w, b).reshape(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for x, w, b in zip(inputs, _projections(self), biases, strict=True)
        )
        mask = self._additive(q, k, attn_mask, key_padding_mask, is_causal)
        dropout = self.dropout if self.training else 0.0
        attended: Tensor | None = None
        if need_weights:
            logits = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
            attended = F.dropout((logits if mask is None else logits + mask).softmax(-1), dropout, self.training)
            mixed = attended @ v
            attended = attended.mean(1) if average_attn_weights else attended
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if not batched:
            return out.squeeze(0), attended.squeeze(0) if attended is not None else None
        return (out if self.batch_first else out.transpose(0, 1)), attended

    def _additive(
        self, q: Tensor, k: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor | None:
        """Both masks as one tensor that is added to the logits; True in a boolean mask means "do not attend"."""
        batch, heads, length, keys = *q.shape[:3], k.shape[2]
        if attn_mask is None and is_causal:
            attn_mask = torch.ones(length, keys, dtype=torch.bool, device=q.device).triu(1)
        if attn_mask is not None and attn_mask.dim() == 3:
            if len(attn_mask) != batch * heads:
                raise ValueError(
                    f"attn_mask is for {len(attn_mask)} samples × heads; there are {batch} samples and {heads} heads "
                    "left."
                )
            attn_mask = attn_mask.reshape(batch, heads, length, keys)
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.reshape(batch, 1, 1, keys)
        masks = [_floating(mask, q) for mask in (attn_mask, key_padding_mask) if mask is not None]
        return sum(masks[1:], masks[0]) if masks else None


def _projections(module: nn.MultiheadAttention) -> Sequence[Tensor]:
    """The weights of queries, keys and values, which are stacked unless their inputs differ in width."""
    if module.in_proj_weight is None:
        return module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    return module.in_proj_weight.chunk(3)


def _floating(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)
