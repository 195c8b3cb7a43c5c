"""Files of a masked or compact network: only what is left is stored, and loading restores every bit.

A folder holds ``plan.json`` (format, version, and how each tensor is coded) and one safetensors file named after its
contents. The plan is written last and atomically, so that a folder always holds one complete network: the new or the
old one. Nothing is pickled; the network is rebuilt by the caller's own constructor. For a network of :mod:`shaver.zoo`
the plan says how it is built. For a compact network it also says which positions of which tensors stayed, so that the
constructor's network of the original shapes can be made as small.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shaver.io import load_tensors, read_json, save_tensors, write_json
from shaver.pruning.encoding import CODES, decode, encode
from shaver.pruning.masks import Masks
from shaver.zoo import build
from shaver.zoo.network import Network

if TYPE_CHECKING:
    from shaver.structure.plan import Plan

#: Version 2 knows compact networks. A network that is only masked is still written as version 1.
FORMAT, VERSION, PLAN = "shaver.masked", 2, "plan.json"


def save(model: nn.Module, folder: str | os.PathLike[str], masks: Mapping[str, Tensor] | None = None) -> Path:
    """Write a pruned network, masked or compact: zeros cost next to nothing, removed units nothing.

    Example:
        >>> import tempfile
        >>> layer = nn.Linear(100, 100)
        >>> with torch.no_grad():
        ...     _ = layer.weight[:, 1:].zero_()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = save(layer, folder)
        ...     same = load(folder, lambda: nn.Linear(100, 100))
        >>> torch.equal(same.weight, layer.weight)
        True

    Args:
        model: The network; parameters and buffers are stored, in their own types. A compact network carries the plan
            of what was removed from it as an attribute, and so do its copies and networks of which it is a part.
        folder: Created if need be; an earlier network in it is replaced.
        masks: Store these masks too, so that :func:`load_masks` gives them back even where a kept weight is zero. By
            default whatever is not zero is what is left.

    Returns:
        The folder.

    Raises:
        ValueError: A weight is not zero where its mask says so; nothing is written.
    """
    from shaver.structure.plan import plan_of  # structure builds on pruning, so not above

    target = Path(folder)
    if masks is not None:
        _check_masked(model, Masks(masks))
    removed = plan_of(model)
    tensors: dict[str, Tensor] = {}
    entries: dict[str, dict[str, str]] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in model.state_dict().items():
        # A tied weight appears under each of its names; its numbers are stored once.
        identity = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and identity in seen:
            entries[name] = {"same": seen[identity]}
            continue
        seen[identity] = name
        code, parts = encode(tensor, masks.get(name) if masks is not None else None)
        entries[name] = {"shape": _words(tensor.shape), "type": _type(tensor.dtype), "code": code}
        tensors |= {f"{name}/{part}": value for part, value in parts.items()}
    digest = _digest(tensors)
    file = f"weights-{digest[:12]}.safetensors"
    save_tensors(target / file, tensors)
    plan: dict[str, Any] = {
        "format": FORMAT,
        "version": 1 if removed is None else VERSION,
        "class": type(model).__name__,
        "weights": file,
        "sha256": digest,
    }
    if isinstance(model, Network):
        plan["network"] = model.arguments
    if removed is not None:
        plan["removed"] = removed.to_json()
    write_json(target / PLAN, plan | {"masks": sorted(masks or ()), "tensors": entries})
    for old in target.glob("weights-*.safetensors"):
        if old.name != file:
            old.unlink()
    return target


def load(folder: str | os.PathLike[str], factory: Callable[[], nn.Module] | nn.Module | None = None) -> nn.Module:
    """Rebuild a network that :func:`save` wrote.

    Args:
        folder: The folder.
        factory: Builds the network with its original shapes, such as the class itself; or a network to load into, of
            the original shapes or as small as the stored one already, which is left as it was if anything does not
            fit. A network of :mod:`shaver.zoo` needs none.

    Raises:
        FileNotFoundError: The folder holds no plan, or not the weights it names.
        ValueError: A file is damaged or foreign, or the network has other names, shapes or types.
    """
    plan = _plan(Path(folder))
    stored = {name: tensor for name, (tensor, _) in _read(Path(folder)).items()}
    removed = _removed(plan, folder)
    if factory is None:
        arguments = plan.get("network")
        if arguments is None:
            raise ValueError(
                f"{folder} holds weights and not how their network is built: pass factory=…, on the "
                "command line --factory package.module:function."
            )
        model = build(**arguments)
    else:
        model = factory if isinstance(factory, nn.Module) else factory()
    if not isinstance(model, nn.Module):
        raise TypeError(f"factory() returned a {type(model).__name__}, not a torch.nn.Module.")
    if removed is not None and not _fits({name: (t.shape, t.dtype) for name, t in model.state_dict().items()}, stored):
        _make_small(model, removed, stored, folder)
    fill(model, stored, folder)
    return model


def fill(model: nn.Module, stored: Mapping[str, Tensor], source: object) -> None:
    """Load weights that fit in every name, shape and type; otherwise the model stays as it is.

    Raises:
        ValueError: With what does not fit, in ``source`` and in the model.
    """
    _check_fits(model, {name: (t.shape, t.dtype) for name, t in model.state_dict().items()}, stored, source)
    model.load_state_dict(stored)


def _make_small(model: nn.Module, removed: "Plan", stored: Mapping[str, Tensor], source: object) -> None:
    """Give a network of the original shapes those of the stored one, or leave it as it is with an error."""
    from shaver.structure.plan import resize, shapes_after

    try:
        after = shapes_after(model, removed)
    except ValueError as error:
        raise ValueError(f"{source} does not fit {type(model).__name__}: {error}") from error
    _check_fits(model, after, stored, source)
    resize(deepcopy(model), removed)  # a layer that cannot be made so small says so before the network is touched
    resize(model, removed)


def _fits(own: Mapping[str, tuple[torch.Size, torch.dtype]], stored: Mapping[str, Tensor]) -> bool:
    return dict(own) == {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()}


def _check_fits(
    model: nn.Module, own: Mapping[str, tuple[torch.Size, torch.dtype]], stored: Mapping[str, Tensor], source: object
) -> None:
    wrong = [f"{name!r} is missing in the file" for name in own if name not in stored]
    wrong += [f"{name!r} is unknown to the network" for name in stored if name not in own]
    for name, tensor in stored.items():
        if name in own and own[name] != (tensor.shape, tensor.dtype):
            shape, dtype = own[name]
            wrong.append(
                f"{name!r} is {_words(tensor.shape)} {_type(tensor.dtype)} in the file and "
                f"{_words(shape)} {_type(dtype)} in the network"
            )
    if wrong:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise ValueError(f"{source} does not fit {type(model).__name__}: {'; '.join(wrong[:4])}{more}.")


def load_masks(folder: str | os.PathLike[str]) -> Masks:
    """The masks stored with the network; without any, what is not zero in its sparsely coded tensors.

    Raises:
        FileNotFoundError: The folder holds no plan, or not the weights it names.
        ValueError: A file is damaged or foreign.
    """
    chosen = _plan(Path(folder))["masks"]
    decoded = _read(Path(folder))
    if not chosen:
        chosen = [name for name, (_, present) in decoded.items() if present is not None]
    masks = {}
    for name in chosen:
        tensor, present = decoded[name]
        masks[name] = present if present is not None else torch.ones(tensor.shape, dtype=torch.bool)
    return Masks(masks)


def _check_masked(model: nn.Module, masks: Masks) -> None:
    for name, parameter in masks.parameters(model).items():
        stray = int((parameter.detach().cpu()[~masks[name].cpu()] != 0).sum())
        if stray:
            raise ValueError(
                f"{stray} weights of {name!r} are not zero although their mask removes them; masks.apply_(model) first."
            )


def _plan(folder: Path) -> dict[str, Any]:
    if not (folder / PLAN).is_file():
        raise FileNotFoundError(f"{folder} holds no saved network: there is no {PLAN} in it.")
    plan = read_json(folder / PLAN)
    if not isinstance(plan, dict) or plan.get("format") != FORMAT:
        raise ValueError(f"{folder / PLAN} is not the plan of a pruned network; it was written by something else.")
    if plan.get("version") not in range(1, VERSION + 1):
        raise ValueError(
            f"{folder} has version {plan.get('version')} of the format and this shaver reads up to version {VERSION}; "
            "a newer shaver wrote it: pip install --upgrade shaver."
        )
    keys = {"weights": str, "sha256": str, "masks": list, "tensors": dict}
    if any(not isinstance(plan.get(key), kind) for key, kind in keys.items()):
        raise ValueError(f"{folder / PLAN} is damaged: one of {', '.join(keys)} is missing.")
    return plan


def _removed(plan: Mapping[str, Any], folder: object) -> "Plan | None":
    from shaver.structure.plan import Plan

    if "removed" not in plan:
        return None
    try:
        return Plan.from_json(plan["removed"])
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _read(folder: Path) -> dict[str, tuple[Tensor, Tensor | None]]:
    plan = _plan(folder)
    file = folder / Path(plan["weights"]).name
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is incomplete: {file.name}, which {PLAN} names, is not there.")
    tensors = load_tensors(file)
    if _digest(tensors) != plan["sha256"]:
        raise ValueError(f"{file} is damaged: its contents are not what {PLAN} says.")
    decoded: dict[str, tuple[Tensor, Tensor | None]] = {}
    for name, entry in plan["tensors"].items():
        try:
            if "same" in entry:
                decoded[name] = decoded[entry["same"]]
                continue
            parts = {part: tensors[f"{name}/{part}"] for part in _PARTS[entry["code"]]}
            shape = torch.Size(int(n) for n in entry["shape"].split("x") if n)
            decoded[name] = decode(entry["code"], parts, shape)
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{folder} is damaged at {name!r}: {error}.") from error
    return decoded


_PARTS = {code: ("values",) if code == "dense" else ("where", "values") for code in CODES}


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """A checksum of names, types, shapes and contents."""
    checksum = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        checksum.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return checksum.hexdigest()


def _words(shape: torch.Size) -> str:
    return "x".join(map(str, shape))


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
