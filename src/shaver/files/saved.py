"""The folder that ``shaver.save`` writes: only the kept weights are stored, and loading restores every bit.

A folder holds ``plan.json`` (format, version, and the code of each tensor) and one safetensors file named after its
contents. The plan is written last and atomically, so a folder always holds one complete network, the new or the old
one. Nothing is pickled; the caller's own constructor rebuilds the network. For a network of :mod:`shaver.zoo` the plan
says how it is built. For a compact network the plan also has the kept positions of each tensor, so that the network of
the original shapes can be made smaller.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shaver.batches import check_network
from shaver.files.encoding import decode, encode
from shaver.files.network import StoredNetwork, construction, in_words, read_plan, read_weights, removed_from, tied
from shaver.io import as_path, check_folder, digest, save_tensors, write_json
from shaver.pruning.masks import Masks

#: Version 2 supports compact networks. A network that is only masked is still written as version 1.
FORMAT, VERSION, PLAN = "shaver.masked", 2, "plan.json"


def save(model: nn.Module, folder: str | os.PathLike[str], masks: Mapping[str, Tensor] | None = None) -> Path:
    """Write a pruned network, masked or compact. Zeros need almost no space, and removed units none.

    Example:
        >>> import tempfile
        >>> from shaver.files import load
        >>> layer = nn.Linear(100, 100)
        >>> with torch.no_grad():
        ...     _ = layer.weight[:, 1:].zero_()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = save(layer, folder)
        ...     same = load(folder, lambda: nn.Linear(100, 100))
        >>> torch.equal(same.weight, layer.weight)
        True

    Args:
        model: The network; parameters and buffers are stored in their own types. A compact network has the record of
            what was removed from it as an attribute. So do its copies, and networks that contain it.
        folder: Created if it does not exist. An earlier network in it is replaced; other files do not change.
        masks: Also store these masks, so that :func:`load_masks` returns them even if a kept weight is zero.
            Default: every nonzero weight counts as kept.

    Returns:
        The folder.

    Raises:
        ValueError: A weight is not zero where its mask says so; nothing is written.
    """
    check_network(model, "save")
    target = check_folder(folder)
    held = Masks({} if masks is None else masks)
    for name, parameter in held.parameters(model).items():
        stray = int((parameter.detach().cpu()[~held[name].cpu()] != 0).sum())
        if stray:
            raise ValueError(
                f"{stray} weights of {name!r} are not zero although their mask removes them; masks.apply_(model) first."
            )
    state = model.state_dict()
    same = tied(state)
    tensors: dict[str, Tensor] = {}
    entries: dict[str, dict[str, str]] = {name: {"same": first} for name, first in same.items()}
    for name, tensor in state.items():
        if name not in same:
            code, parts = encode(tensor, held.get(name))
            shape, kind = in_words(tensor.shape, tensor.dtype).split(" ")
            entries[name] = {"shape": shape, "type": kind, "code": code}
            tensors |= {f"{name}/{part}": value for part, value in parts.items()}
    checksum = digest(tensors)
    file = f"weights-{checksum[:12]}.safetensors"
    built = construction(model)
    plan = {"format": FORMAT, "version": VERSION if "removed" in built else 1, **built}
    plan |= {"weights": file, "sha256": checksum, "masks": sorted(held)}
    try:
        before = _plan(target)["weights"]
    except (OSError, ValueError):
        before = file  # no earlier network; other files do not change
    save_tensors(target / file, tensors)
    write_json(target / PLAN, plan | {"tensors": {name: entries[name] for name in state}})
    if before != file:
        (target / before).unlink(missing_ok=True)
    return target


def read_saved(folder: Path) -> StoredNetwork:
    """Read what :func:`save` wrote."""
    plan = _plan(folder)
    weights = {name: tensor for name, (tensor, _) in _decoded(folder, plan).items()}
    return StoredNetwork(folder, weights, plan.get("network"), removed_from(plan, folder))


def load_masks(folder: str | os.PathLike[str]) -> Masks:
    """The masks stored with the network; if there are none, the nonzero weights of its sparsely coded tensors.

    Raises:
        FileNotFoundError: The folder holds no plan, or not the weights it names.
        ValueError: A file is damaged, or another program wrote it.
    """
    place = as_path(folder)
    plan = _plan(place)
    decoded = _decoded(place, plan)
    chosen = plan["masks"] or [name for name, (_, present) in decoded.items() if present is not None]
    masks = {}
    for name in chosen:
        if name not in decoded:
            raise ValueError(f"{folder} is damaged: there is a mask for {name!r} but no such tensor.")
        tensor, present = decoded[name]
        masks[name] = present if present is not None else torch.ones(tensor.shape, dtype=torch.bool)
    return Masks(masks)


def _plan(folder: Path) -> dict[str, Any]:
    if not (folder / PLAN).is_file():
        raise FileNotFoundError(f"{folder} holds no saved network: there is no {PLAN} in it.")
    plan = read_plan(folder / PLAN, FORMAT, VERSION)
    keys = {"weights": str, "sha256": str, "masks": list, "tensors": dict}
    if any(not isinstance(plan.get(key), kind) for key, kind in keys.items()):
        raise ValueError(f"{folder / PLAN} is damaged: one of {', '.join(keys)} is missing.")
    plan["weights"] = Path(plan["weights"]).name  # a file of this folder and no other
    return plan


def _decoded(folder: Path, plan: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Every tensor, and a mask of its stored entries (``None`` for dense ones)."""
    file = folder / plan["weights"]
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is incomplete: {file.name}, which {PLAN} names, does not exist.")
    tensors = read_weights(file, plan)
    decoded: dict[str, tuple[Tensor, Tensor | None]] = {}
    for name, entry in plan["tensors"].items():
        try:
            if "same" in entry:
                decoded[name] = decoded[entry["same"]]
                continue
            keys = {part: f"{name}/{part}" for part in ("where", "values")}
            parts = {part: tensors[key] for part, key in keys.items() if key in tensors}
            shape = torch.Size(int(n) for n in entry["shape"].split("x") if n)
            decoded[name] = decode(entry["code"], parts, shape)
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{folder} is damaged at {name!r}: {error}.") from error
    return decoded
