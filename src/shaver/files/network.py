"""A stored network: its weights and how to build it. Every format is read into this one class."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shaver import zoo
from shaver.io import digest, load_tensors, read_json
from shaver.structure.groups import tensors_of
from shaver.structure.record import RemovalRecord, removal_record, resize, shapes_after
from shaver.zoo.network import Network

#: How a caller names the network to build: a function, such as the class itself, or a network to load into.
Factory = Callable[[], nn.Module] | nn.Module


@dataclass(frozen=True)
class StoredNetwork:
    """The contents of a file or folder."""

    source: Path  # the file or folder, for error messages
    weights: Mapping[str, Tensor]  # every tensor of the state dict; a tied tensor under each of its names
    network: Mapping[str, Any] | None = None  # name and options of the network, for shaver.zoo.rebuild
    removed: RemovalRecord | None = None  # the record of what was removed from the network that its constructor builds
    posterior: Path | None = None  # the file of the posterior, if SpaM trained the network
    config: Mapping[str, Any] = field(default_factory=dict)  # the settings of the run that trained it
    likelihood: Mapping[str, Any] | None = None  # the state of its likelihood

    def rebuild(self, factory: Factory | None = None) -> nn.Module:
        """Build the network and fill it with the stored weights.

        Args:
            factory: A function that builds the network with its original shapes; or a network to load into, with the
                original shapes or those of the stored network. It does not change if anything does not fit.
        """
        if factory is None and self.network is None:
            raise ValueError(
                f"{self.source} holds weights but not how to build their network: pass factory=… in Python, or "
                "pass --factory package.module:function on the command line, such as --factory shaver.zoo:LeNet."
            )
        model = self._built() if factory is None else factory if isinstance(factory, nn.Module) else _made(factory)
        weights, resized = self._fitting(model)
        if resized and self.removed is not None:
            resize(deepcopy(model), self.removed)  # a layer that cannot be resized raises before the network changes
            resize(model, self.removed)
        for name, tensor in tensors_of(model).items():
            if name in weights and tensor.dtype != weights[name].dtype:
                tensor.data = tensor.data.to(weights[name].dtype)
        model.load_state_dict(weights)
        return model

    def _built(self) -> nn.Module:
        """The network that the file names, if its size fits the weights: a file must not fill the memory."""
        assert self.network is not None
        try:
            with torch.device("meta"):
                sketch = zoo.rebuild(self.network)
            self._fitting(sketch)
            return zoo.rebuild(self.network)
        except (ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{self.source} names a network that cannot be built: {error}") from error

    def _fitting(self, model: nn.Module) -> tuple[Mapping[str, Tensor], bool]:
        """The weights by the network's own names, and whether the network must be made smaller for them."""
        weights = _without_wrappers(self.weights, model)
        own = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
        stored = {name: tensor.shape for name, tensor in weights.items()}
        resized = False
        if self.removed is not None and stored != {name: shape for name, (shape, _) in own.items()}:
            resized = True
            try:
                own = shapes_after(model, self.removed)
            except ValueError as error:
                raise ValueError(f"{self.source} does not fit {type(model).__name__}: {error}") from error
        # Precisions may differ; integers and floats may not mix.
        wrong = [f"{name!r} is missing in the file" for name in own if name not in weights]
        wrong += [f"{name!r} is unknown to the network" for name in weights if name not in own]
        for name, tensor in weights.items():
            shape, dtype = own.get(name, (tensor.shape, tensor.dtype))
            alike = tensor.dtype == dtype or (tensor.is_floating_point() and dtype.is_floating_point)
            if shape != tensor.shape or not alike:
                wrong.append(
                    f"{name!r} is {in_words(tensor.shape, tensor.dtype)} in the file and {in_words(shape, dtype)} in "
                    "the network"
                )
        if wrong:
            more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            raise ValueError(f"{self.source} does not fit {type(model).__name__}: {'; '.join(wrong[:4])}{more}.")
        return weights, resized


def _made(factory: Callable[[], nn.Module]) -> nn.Module:
    if not callable(factory):
        raise TypeError(f"factory must be a function that builds the network, or a network, not {factory!r}.")
    try:
        model = factory()
    except TypeError as error:
        raise TypeError(f"factory must build the network when called without arguments: {error}.") from error
    if not isinstance(model, nn.Module):
        raise TypeError(f"factory() returned a {type(model).__name__}, not a torch.nn.Module.")
    return model


def construction(model: nn.Module) -> dict[str, Any]:
    """The entries of a plan about building a network: its class, its arguments, and what was removed from it."""
    removed = removal_record(model)
    found: dict[str, Any] = {"class": type(model).__name__}
    if isinstance(model, Network):
        found["network"] = model.arguments
    if removed is not None:
        found["removed"] = removed.to_json()
    return found


def read_plan(path: Path, kind: str, version: int) -> dict[str, Any]:
    """The plan of a folder in a format of shaver.

    Raises:
        ValueError: Another program or a newer shaver wrote it.
    """
    plan = read_json(path)
    if not isinstance(plan, dict) or plan.get("format") != kind:
        raise ValueError(f"{path} is not a plan of the format {kind!r}; another program wrote it.")
    if plan.get("version") not in range(1, version + 1):
        raise ValueError(
            f"{path.parent} has version {plan.get('version')} of the format, but this shaver reads up to version "
            f"{version}; a newer shaver wrote it: pip install --upgrade shaver."
        )
    return plan


def read_weights(path: Path, plan: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file, if they have the checksum in the plan."""
    tensors = load_tensors(path)
    if digest(tensors) != plan.get("sha256"):
        raise ValueError(f"{path} is damaged: its contents do not match the checksum in its plan.")
    return tensors


def removed_from(plan: Mapping[str, Any], source: object) -> RemovalRecord | None:
    """The record of removal in a plan that :func:`construction` made."""
    if "removed" not in plan:
        return None
    try:
        return RemovalRecord.from_json(plan["removed"])
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def tied(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Further names of tied tensors: name → first name of the same tensor, so that it is stored once."""
    first: dict[tuple[Any, ...], str] = {}
    found = {}
    for name, tensor in tensors.items():
        identity = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and first.setdefault(identity, name) != name:
            found[name] = first[identity]
    return found


def in_words(shape: torch.Size, dtype: torch.dtype) -> str:
    """``"6x1x5x5 float32"``."""
    return f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"


def _without_wrappers(weights: Mapping[str, Tensor], model: nn.Module) -> Mapping[str, Tensor]:
    """The weights by the network's own names, without the prefixes of DistributedDataParallel and torch.compile."""
    own, found = model.state_dict().keys(), dict(weights)
    while found.keys() != own:
        prefix = next(iter(found), "").split(".")[0] + "."
        if prefix not in ("module.", "_orig_mod.") or not all(name.startswith(prefix) for name in found):
            return weights
        found = {name.removeprefix(prefix): value for name, value in found.items()}
    return found
