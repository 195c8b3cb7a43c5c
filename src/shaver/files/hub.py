"""Pruned and compact networks in the folder format of model hubs: ``config.json``, ``model.safetensors``, a card.

Local folders are enough; a hub is contacted only for a name that is not a folder.
"""

import os
from pathlib import Path
from typing import Any

from torch import nn

from shaver.batches import check_network
from shaver.files.card import Card
from shaver.files.network import Factory, StoredNetwork, construction, read_plan, read_weights, removed_from, tied
from shaver.io import check_folder, digest, save_tensors, write_json
from shaver.naming import require

FORMAT, VERSION = "shaver.hub", 1
CONFIG, WEIGHTS, PLAN = "config.json", "model.safetensors", "shaver.json"


def write_folder(model: nn.Module, folder: str | os.PathLike[str], *, card: Card | None = None) -> Path:
    """Write a masked or compact network in the format of a hub. :func:`shaver.load` reads it.

    Example:
        >>> write_folder(small, "small-bert", card=Card("Small BERT", rows=rows, figures=["curve.svg"]))
        >>> again = shaver.load("small-bert", factory=lambda: BertModel(config))

    ``config.json`` is the model's own configuration, if it has one (transformers). ``model.safetensors`` has every
    tensor under its name, tied tensors once. ``shaver.json`` records what was removed, so that a network of the
    original shapes can be made smaller. ``README.md`` is the card. ``from_pretrained(folder)`` also reads a
    transformers model whose configuration can express its new widths.

    Args:
        model: The network.
        folder: Created if it does not exist.
        card: The model card. Default: none.
    """
    check_network(model, "write_folder")
    target = check_folder(folder)
    own: Any = getattr(model, "config", None)
    known = own.to_diff_dict() if hasattr(own, "to_diff_dict") else {}
    if known:
        known["architectures"] = [type(model).__name__]
    state = model.state_dict()
    same = tied(state)
    tensors = {name: tensor for name, tensor in state.items() if name not in same}
    plan = {"format": FORMAT, "version": VERSION, **construction(model), "tied": same, "sha256": digest(tensors)}
    save_tensors(target / WEIGHTS, tensors, {"format": "pt"})
    write_json(target / CONFIG, known | {"library_name": "shaver"})
    if card is not None:
        card.write(target)
    write_json(target / PLAN, plan)  # last: a folder with a plan is complete
    return target


def read_hub_folder(source: Path) -> StoredNetwork:
    """Read what :func:`write_folder` wrote."""
    for name in (PLAN, WEIGHTS):
        if not (source / name).is_file():
            raise FileNotFoundError(f"{source} holds no network that shaver wrote for a hub: there is no {name}.")
    plan = read_plan(source / PLAN, FORMAT, VERSION)
    weights = read_weights(source / WEIGHTS, plan)
    same = plan.get("tied")
    if not isinstance(same, dict) or not all(first in weights for first in same.values()):
        raise ValueError(f"{source / PLAN} is damaged: its tied weights are not in {WEIGHTS}.")
    weights |= {name: weights[first] for name, first in same.items()}
    return StoredNetwork(source, weights, plan.get("network"), removed_from(plan, source))


def push(folder: str | os.PathLike[str], name: str, *, private: bool = True) -> str:
    """Upload a folder that :func:`write_folder` wrote to the hub, as ``name`` (``"owner/model"``). Returns its address.

    huggingface_hub manages the credentials: ``hf auth login``.
    """
    if not (Path(folder) / PLAN).is_file():
        raise FileNotFoundError(
            f"{folder} holds no network to push: there is no {PLAN}; call write_folder(model, …) first."
        )
    api = _hub().HfApi()
    address = str(api.create_repo(name, private=private, exist_ok=True))
    api.upload_folder(folder_path=str(folder), repo_id=name)
    return address


def pull(name: str, factory: Factory | None = None) -> nn.Module:
    """Load a network from the hub, or from a local folder if ``name`` is one."""
    folder = name if Path(name).is_dir() else _hub().snapshot_download(name)
    return read_hub_folder(Path(folder)).rebuild(factory)


def _hub() -> Any:
    return require("huggingface_hub", "the hub", "transformers")
