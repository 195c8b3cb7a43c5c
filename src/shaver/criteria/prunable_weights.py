"""Which weights may be pruned: weight matrices and kernels by default, or a user's own rule."""

from collections.abc import Callable

from torch import Tensor, nn

#: ``rule(name, parameter)``: whether the parameter may be pruned.
Rule = Callable[[str, nn.Parameter], bool]

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def prunable(
    model: nn.Module, rule: Rule | None = None, *, exclude_first: bool = False, exclude_last: bool = False
) -> dict[str, nn.Parameter]:
    """The parameters that may be pruned, by name, in the order of ``model.named_parameters()``.

    The default rule accepts parameters with two or more dimensions whose name contains "weight": matrices of linear
    layers (including the transformers library's ``Conv1D`` and the packed ``in_proj_weight`` of attention), convolution
    kernels and recurrent weights. It refuses biases, norm layers, positional tables and class tokens. It also refuses
    embeddings and output matrices tied to them: most of their rows see few samples, so their curvature is small for
    lack of data, not because they are unimportant.

    Example:
        >>> list(prunable(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), exclude_last=True))
        ['0.weight']

    Args:
        model: The network.
        rule: ``rule(name, parameter) -> bool`` that replaces the default rule.
        exclude_first: Leave out the first parameter that the rule accepts.
        exclude_last: Leave out the last parameter that the rule accepts.

    Raises:
        ValueError: No parameter may be pruned.
    """
    accepts = rule if rule is not None else _weight_rule(model)
    found = [(name, parameter) for name, parameter in model.named_parameters() if accepts(name, parameter)]
    if exclude_first:
        found = found[1:]
    if exclude_last:
        found = found[:-1]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no prunable weight under "
            + ("the rule given" if rule is not None else "the default rule (weight matrices and kernels)")
            + (" without its first or last layer" if exclude_first or exclude_last else "")
            + "; pass rule=lambda name, parameter: … to choose the parameters that may be pruned."
        )
    return dict(found)


def with_biases(model: nn.Module) -> Rule:
    """The rule that accepts the weights of the default rule, and the biases of the layers that own them.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        >>> list(prunable(net, with_biases(net)))
        ['0.weight', '0.bias']
    """
    weights = prunable(model)
    layers = {name.rpartition(".")[0] for name in weights}

    def rule(name: str, parameter: nn.Parameter) -> bool:
        owner, _, own = name.rpartition(".")
        return name in weights or ("bias" in own and owner in layers)

    return rule


def input_dim(model: nn.Module, name: str) -> int:
    """The dimension of a weight that runs over the layer's inputs: 0 for transposed layers, 1 for all others."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return 0 if isinstance(owner, _TRANSPOSED) or is_transposed_linear(owner) else 1


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether the module is the transformers library's ``Conv1D``: a linear layer that stores ``(in, out)``."""
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__ == "Conv1D" and hasattr(module, "nf") and isinstance(weight, Tensor) and weight.ndim == 2
    )


def _weight_rule(model: nn.Module) -> Rule:
    refused: set[int] = set()  # by identity: a tied weight is refused if one of its modules refuses it
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or "Norm" in type(module).__name__:
            refused |= {id(parameter) for parameter in module.parameters(recurse=False)}

    def rule(name: str, parameter: nn.Parameter) -> bool:
        return parameter.ndim >= 2 and "weight" in name.rpartition(".")[2] and id(parameter) not in refused

    return rule
