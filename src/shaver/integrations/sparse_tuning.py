"""Fine-tuning a pruned model without losing its zeros: by the transformers Trainer, or by peft's low-rank adapters.

    Trainer(model, args, train_dataset=data, callbacks=[KeepZeros()]).train()

A low-rank update is dense. On a pruned layer, :func:`hold_adapters` therefore applies only the part of it that falls on
kept weights, in training as after :func:`merge_adapters`: what was trained is what is merged.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaver.closures import inner_optimizer
from shaver.integrations.block_moments import is_layer
from shaver.pruning.masks import Hold, Masks
from shaver.structure import Groups, find_groups

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError('this needs the transformers library: pip install "shaver[transformers]".') from error

#: The least share of zeros of a matrix that counts as pruned.
LEAST = 0.01


def zero_masks(model: nn.Module) -> Masks:
    """Masks of the nonzero weights, for linear layers in which at least 1 % of the weights are zero.

    Raises:
        ValueError: There are no such matrices.
    """
    found = {}
    for path, module in model.named_modules():
        if is_layer(module):
            kept = module.weight.detach() != 0  # type: ignore[operator]
            if float((~kept).float().mean()) >= LEAST:
                found[f"{path}.weight" if path else "weight"] = kept
    if not found:
        raise ValueError(
            f"no weight matrix of {type(model).__name__} has {LEAST:.0%} of zeros or more: prune it first, or leave "
            "this out."
        )
    return Masks(found)


class KeepZeros(TrainerCallback):  # type: ignore[misc]
    """Keeps the zeros of a pruned model while the Trainer fine-tunes it.

    Weights that are zero when training begins stay zero, also against momentum and weight decay. If the model has
    low-rank adapters, :func:`hold_adapters` is called too.
    """

    def __init__(self) -> None:
        self._hold: Hold | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **known: Any
    ) -> None:
        """Hold the masks of all weights that are trained."""
        masks = zero_masks(model)
        if any(_is_adapted(module) for module in model.modules()):
            hold_adapters(model)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        own = {name: mask for name, mask in masks.items() if name in trained}
        if own:
            self._hold = Masks(own).hold(model, inner_optimizer(optimizer))

    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Stop holding the masks; the removed weights are zero."""
        if self._hold is not None:
            self._hold.release()
            self._hold = None


def hold_adapters(model: nn.Module) -> int:
    """Let the LoRA layers of a peft model act on kept weights only: W + (s B A) ⊙ M, with M what is not zero in W.

    Returns:
        The number of layers on pruned matrices.

    Raises:
        ValueError: A pruned layer has an adapter of another kind than plain LoRA.
    """
    count = 0
    for path, layer in model.named_modules():
        if not _is_adapted(layer) or isinstance(getattr(layer, "kept", None), Tensor):
            continue
        whole: Any = layer
        kept = whole.base_layer.weight.detach() != 0
        if float((~kept).float().mean()) < LEAST:
            continue
        if getattr(whole, "lora_variant", None):
            raise ValueError(f"{path} has a variant of LoRA; only plain LoRA can be kept to the weights that are left.")
        whole.register_buffer("kept", kept, persistent=False)
        kind: type[nn.Module] = type(layer)
        whole.__class__ = _sparse(kind)
        count += 1
    return count


def merge_adapters(model: Any) -> nn.Module:
    """Merge the adapters of a peft model into the weights, and keep the zeros.

    Example:
        >>> model = peft.get_peft_model(pruned, peft.LoraConfig(r=8, target_modules="all-linear"))
        >>> hold_adapters(model)                                        # before training
        >>> Trainer(model, args, train_dataset=data).train()
        >>> merge_adapters(model).save_pretrained("tuned")              # as sparse as before

    Returns:
        The model without adapters, as ``merge_and_unload`` does.
    """
    adapted = [module.base_layer for module in model.modules() if _is_adapted(module)]
    kept = [(layer, layer.weight.detach() != 0) for layer in adapted]
    merged: nn.Module = model.merge_and_unload()
    with torch.no_grad():
        for layer, mask in kept:
            if float((~mask).float().mean()) >= LEAST:
                layer.weight.masked_fill_(~mask, 0)
    return merged


def by_rank(name: str, parameter: Tensor) -> Tensor | str:
    """A prior for adapters: one precision per rank of each matrix, so that ranks that the data do not need vanish.

    ``SpaMCallback(prior=by_rank)`` learns it. ``shaver.compact(model, x, groups=rank_groups(model, x), …)`` removes
    ranks, and peft opens the result.
    """
    ranks = torch.arange(parameter.shape[1 if "lora_B" in name else 0])
    if "lora_A" in name and parameter.ndim == 2:
        return ranks.unsqueeze(1)
    return ranks.unsqueeze(0) if "lora_B" in name and parameter.ndim == 2 else name


def rank_groups(model: nn.Module, example: Any) -> Groups:
    """The groups of a peft model that are ranks of its adapters, for ``shaver.compact(…, groups=…)``.

    Raises:
        ValueError: There are none.
    """
    found = find_groups(model, example)
    ranks = {name: group for name, group in found.items() if ".lora_A." in name}
    if not ranks:
        raise ValueError(f"{type(model).__name__} has no low-rank adapters: peft.get_peft_model adds them.")
    return Groups(ranks, found.left_out, found.shapes)


def _is_adapted(module: Any) -> bool:
    """Whether this is a LoRA layer of peft around a linear layer."""
    base = getattr(module, "base_layer", None)
    is_lora = isinstance(getattr(module, "lora_A", None), nn.ModuleDict) and hasattr(module, "get_delta_weight")
    return is_lora and isinstance(base, nn.Module) and is_layer(base)


def _forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if self.disable_adapters or self.merged or kwargs.get("adapter_names") is not None:
        plain: Tensor = super(type(self), self).forward(x, *args, **kwargs)
        return plain
    result: Tensor = self.base_layer(x, *args, **kwargs)
    for name in self.active_adapters:
        if name in self.lora_A:
            update = self.get_delta_weight(name) * self.kept
            rows = self.lora_dropout[name](x.to(update.dtype))
            result = result + F.linear(rows, update.t() if self.fan_in_fan_out else update).to(result.dtype)
    return result


def _sparse(kind: type) -> type:
    """The class of a LoRA layer whose update acts on kept weights only."""
    return type(f"Sparse{kind.__name__}", (kind,), {"forward": _forward, "__module__": __name__})
