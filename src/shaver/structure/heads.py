"""The heads of ``torch.nn.MultiheadAttention``, whose projections no module call shows."""

import torch
from torch import Tensor, nn

from shaver.structure.groups import Group, Slice
from shaver.structure.layers import tensor_names


def packed_heads(model: nn.Module) -> dict[str, Group]:
    """One group for every such module with more than one head, from its own attributes."""
    names = tensor_names(model)
    groups = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention) or module.num_heads < 2:
            continue
        heads, width = module.num_heads, module.num_heads * module.head_dim
        columns = torch.arange(width).reshape(heads, -1)
        # Queries, keys and values lie under each other in one weight, unless they differ in what they read.
        rows = torch.cat([columns + part * width for part in range(3)], 1)
        separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        pieces: list[tuple[Tensor | None, int, Tensor]] = [
            (module.in_proj_weight, 0, rows),
            *((weight, 0, columns) for weight in separate),
        ]
        # One more key and value for every head, if asked for when it was built.
        pieces += [(module.in_proj_bias, 0, rows), (module.bias_k, 2, columns), (module.bias_v, 2, columns)]
        slices = [Slice(names[id(tensor)], dim, index, "makes") for tensor, dim, index in pieces if tensor is not None]
        slices.append(Slice(names[id(module.out_proj.weight)], 1, columns, "reads"))
        groups[name] = Group(name, "heads", heads, tuple(slices))
    return groups
