"""Pruned and compact networks in the folder format of model hubs: ``config.json``, ``model.safetensors``, a card.

Local folders are all that is needed; a hub is asked only when a name that is no folder is given.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from shaver.batches import check_network
from shaver.files.card import Card
from shaver.files.network import Factory, StoredNetwork, construction, removed_from, tied
from shaver.io import check_folder, digest, load_tensors, read_json, save_tensors, write_json

FORMAT, VERSION = "shaver.hub", 1
CONFIG, WEIGHTS, PLAN = "config.json", "model.safetensors", "shaver.json"


def write_folder(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    card: Card | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a network as a hub expects it, masked or compact. :func:`shaver.load` reads it back.

    Example:
        >>> write_folder(small, "small-bert", card=Card("Small BERT", rows=rows, figures=["curve.svg"]))
        >>> again = shaver.load("small-bert", factory=lambda: BertModel(config))

    ``config.json`` is the model's own configuration where it has one (transformers); ``model.safetensors`` has every
    tensor under its name, tied ones once; ``shaver.json`` says what was removed, so that the original constructor's
    network can be made as small; ``README.md`` is the card. A transformers model whose configuration can say its new
    widths is also read by ``from_pretrained(folder)``.

    Args:
        model: The network.
        folder: Created if it does not exist.
        card: The model card; None writes none.
        config: Entries for ``config.json`` beside the model's own.
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
    write_json(target / CONFIG, known | {"library_name": "shaver"} | dict(config or {}))
    if card is not None:
        card.write(target)
    write_json(target / PLAN, plan)  # last: a folder with a plan is complete
    return target


def read_hub_folder(source: Path) -> StoredNetwork:
    """Read what :func:`write_folder` wrote.

    Raises:
        FileNotFoundError: The folder is not there or not complete.
        ValueError: It is damaged, or was written by something else.
    """
    for name in (PLAN, WEIGHTS):
        if not (source / name).is_file():
            raise FileNotFoundError(f"{source} holds no network of shaver's in a hub's format: there is no {name}.")
    plan = read_json(source / PLAN)
    if not isinstance(plan, dict) or plan.get("format") != FORMAT:
        raise ValueError(f"{source / PLAN} was written by something else.")
    if plan.get("version") != VERSION:
        raise ValueError(f"{source} has version {plan.get('version')} of the format; this shaver reads {VERSION}.")
    weights = load_tensors(source / WEIGHTS)
    if digest(weights) != plan.get("sha256"):
        raise ValueError(f"{source / WEIGHTS} is damaged: its contents are not what {PLAN} says.")
    same = plan.get("tied")
    if not isinstance(same, dict) or not all(first in weights for first in same.values()):
        raise ValueError(f"{source / PLAN} is damaged: its tied weights are not in {WEIGHTS}.")
    weights |= {name: weights[first] for name, first in same.items()}
    return StoredNetwork(source, weights, plan.get("network"), removed_from(plan, source))


def push(folder: str | os.PathLike[str], name: str, *, private: bool = True, message: str = "Upload") -> str:
    """Upload a folder that :func:`write_folder` wrote to the hub, as ``name`` (``"owner/model"``). Returns its address.

    The credentials are huggingface_hub's own affair: ``hf auth login``.
    """
    if not (Path(folder) / PLAN).is_file():
        raise FileNotFoundError(f"{folder} holds no network to push: there is no {PLAN}; write_folder(model, …) first.")
    api = _hub().HfApi()
    address = str(api.create_repo(name, private=private, exist_ok=True))
    api.upload_folder(folder_path=str(folder), repo_id=name, commit_message=message)
    return address


def pull(name: str, factory: Factory | None = None, *, revision: str | None = None) -> nn.Module:
    """A network from the hub, or from a local folder where ``name`` is one."""
    folder = name if Path(name).is_dir() else _hub().snapshot_download(name, revision=revision)
    return read_hub_folder(Path(folder)).rebuild(factory)


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError('the hub needs huggingface_hub: pip install "shaver[transformers]".') from error
    return huggingface_hub
