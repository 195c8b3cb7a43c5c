"""What a group claims, checked on the model itself by changing its tensors: nothing of how groups are found is used."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor, nn

from shaver.structure import Group, Groups, remaining

Run = Callable[[nn.Module], Tensor]


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Float64 and evaluation mode, random in all but the numbers that a whole layer shares (Fixup's)."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter += noise / max(1.0, parameter[0].numel() ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer += torch.rand(buffer.shape, generator=generator, dtype=torch.float64)
    return model


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


@contextmanager
def filled(model: nn.Module, group: Group, units: Tensor, **fillings: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Put something into the slices of some units, by role: ``filled(model, group, units, makes=torch.zeros_like)``."""
    tensors = tensors_of(model)
    kept = {piece.tensor: tensors[piece.tensor].detach().clone() for piece in group.slices}
    try:
        with torch.no_grad():
            for piece in group.slices:
                if piece.role in fillings:
                    at = piece.index[units].flatten()
                    part = tensors[piece.tensor].index_select(piece.dim, at)
                    tensors[piece.tensor].index_copy_(piece.dim, at, fillings[piece.role](part))
        yield
    finally:
        with torch.no_grad():
            for name, data in kept.items():
                tensors[name].copy_(data)


@torch.no_grad()
def check_units(model: nn.Module, groups: Groups, run: Run, *, constant: Collection[str] = ()) -> None:
    """Silent units are not read, and units that are not read are not heard.

    Args:
        model: From :func:`randomised`.
        groups: Of the model.
        run: Its output.
        constant: Groups whose activation does not map zero to zero.
    """
    generator = torch.Generator().manual_seed(0)

    def garbage(part: Tensor) -> Tensor:
        return 10 * torch.rand(part.shape, generator=generator, dtype=part.dtype) + 1

    whole = run(model)
    for name, group in groups.items():
        some = torch.randperm(group.units, generator=generator)[: max(1, 2 * group.units // 3)]
        zero = torch.zeros_like
        with filled(model, group, some, makes=zero):
            silent = run(model)
        with filled(model, group, some, makes=zero, reads=garbage):
            assert name in constant or _equal(run(model), silent), f"{name}: something else is read with its units"
        with filled(model, group, some, reads=zero):
            unread = run(model)
        with filled(model, group, some, makes=garbage, reads=zero):
            assert _equal(run(model), unread), f"{name}: its units are heard elsewhere"
        assert not _equal(unread, whole), f"{name}: its units do nothing, so that nothing was checked"
    check_positions(groups)


def check_positions(groups: Groups) -> None:
    """Every position of a tensor belongs to at most one unit for each dimension."""
    taken: set[tuple[str, int, int]] = set()
    for group in groups.values():
        for piece in group.slices:
            places = [(piece.tensor, piece.dim, position) for position in piece.index.flatten().tolist()]
            assert len(set(places)) == len(places)
            assert not taken & set(places), f"{group.name}: {piece.tensor}"
            taken |= set(places)


def removed(model: nn.Module, groups: Groups, kept: Mapping[str, Tensor]) -> nn.Module:
    """A copy without the other units: tensors cut, and the sizes that modules keep beside them."""
    sizes = {name: tensor.shape for name, tensor in tensors_of(model).items()}
    small = deepcopy(model)
    tensors = tensors_of(small)
    for name, dims in remaining(groups, kept, sizes).items():
        for dim, positions in dims.items():
            tensors[name].data = tensors[name].data.index_select(dim, positions)
    for module in small.modules():
        if isinstance(module, nn.Conv2d) and module.groups > 1:
            module.groups = module.groups * module.weight.shape[0] // module.out_channels
        if isinstance(module, nn.Linear):
            module.out_features = module.weight.shape[0]
        if isinstance(module, nn.Conv2d):
            module.out_channels = module.weight.shape[0]
    return small


@torch.no_grad()
def check_removal(model: nn.Module, groups: Groups, run: Run) -> None:
    """The network without half of the units of every group is the network in which they are zero."""
    generator = torch.Generator().manual_seed(1)
    kept = {
        name: torch.randperm(group.units, generator=generator) >= group.units // 2 for name, group in groups.items()
    }
    small = removed(model, groups, kept)
    masked = deepcopy(model)
    tensors = tensors_of(masked)
    for name, group in groups.items():
        for piece in group.slices:
            if piece.role == "makes":
                tensors[piece.tensor].index_fill_(piece.dim, piece.index[~kept[name]].flatten(), 0)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    assert _equal(run(small), run(masked))


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=1e-9, atol=1e-10 * float(b.abs().max())))
