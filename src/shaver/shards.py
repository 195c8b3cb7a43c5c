"""Parameters that are sharded over ranks (FSDP2): this rank's rows, and conversion from and to whole tensors.

``fully_shard`` makes every parameter a ``DTensor``. SpaM treats each weight on its own, so it works on the local rows.
Only the squares of gradients must be summed over the ranks; each rank keeps its rows of the sum.
"""

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor is a ``DTensor``. Its module is slow to import; if nothing has imported it, none exists."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's rows, sharing their memory; a plain tensor is returned as it is."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def rows_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's rows of a whole tensor that has the shape, or the number of rows, of ``like``."""
    if is_sharded(whole):
        return local(whole)
    if not is_sharded(like) or whole.shape not in (like.shape, like.shape[:1]):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return local(distribute_tensor(whole.to(mesh.device_type), mesh, placements, src_data_rank=None)).clone()


def joined(rows: Tensor, like: Tensor) -> Tensor:
    """A ``DTensor`` of this rank's rows, sharded like ``like``, with its shape or one value per row. No messages."""
    if not is_sharded(like) or rows.shape not in (local(like).shape, local(like).shape[:1]):
        return rows
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    shape, stride = (like.shape, like.stride()) if rows.ndim == like.ndim else (like.shape[:1], (1,))
    return DTensor.from_local(rows, mesh, placements, shape=shape, stride=stride)


def gathered(state: Any) -> Any:
    """A nested state with every ``DTensor`` made whole. A collective: all ranks must call it."""
    if isinstance(state, Tensor):
        return state.full_tensor() if is_sharded(state) else state  # type: ignore[attr-defined]
    if isinstance(state, Mapping):
        return {key: gathered(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(gathered(value) for value in state)
    return state


def whole_copy(model: nn.Module) -> nn.Module:
    """A copy of the network with whole parameters and without hooks. It needs memory for all weights. A collective.

    FSDP refuses ``copy.deepcopy``, so modules are copied shallowly: parameters are gathered, everything else is shared.
    """
    weights: dict[int, nn.Parameter] = {}
    for p in model.parameters():
        weights[id(p)] = nn.Parameter(gathered(p.detach()), requires_grad=p.requires_grad)
    copies: dict[int, nn.Module] = {}

    def copy(module: nn.Module) -> nn.Module:
        if id(module) in copies:
            return copies[id(module)]
        kind: Any = next(cls for cls in type(module).__mro__ if "FSDP" not in cls.__name__)
        twin: nn.Module = kind.__new__(kind)
        copies[id(module)] = twin
        twin.__dict__.update(module.__dict__)
        for name in list(twin.__dict__):
            if name.endswith("_hooks") or "_hooks_" in name:
                twin.__dict__[name] = type(twin.__dict__[name])()
        twin._parameters = {n: None if p is None else weights[id(p)] for n, p in module._parameters.items()}
        twin._buffers = dict(module._buffers)
        twin._modules = {n: None if m is None else copy(m) for n, m in module._modules.items()}
        return twin

    return copy(model)


def check_settings(prior: object, settings: Any) -> None:
    """Refuse settings that need more than a rank's own rows and sums over them."""
    if callable(prior) or not settings.online or settings.method != "fixed_point":
        raise ValueError(
            'with sharded parameters SpaM needs a named prior, online=True and method="fixed_point"; this is '
            f"prior={prior!r}, online={settings.online}, method={settings.method!r}. DistributedDataParallel supports "
            "all settings."
        )
