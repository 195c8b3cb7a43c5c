"""Pruned and compact networks in the folder format of model hubs: ``config.json``, ``model.safetensors``, a card.

Local folders are all that is needed; a hub is asked only when a name that is no folder is given.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shaver.integrations.card import Card
from shaver.io import load_tensors, read_json, save_tensors, write_json
from shaver.pruning.files import fill
from shaver.structure.plan import Plan, plan_of, resize, shapes_after
from shaver.zoo import build
from shaver.zoo.network import Network

FORMAT, VERSION = "shaver.hub", 1
CONFIG, WEIGHTS, PLAN = "config.json", "model.safetensors", "shaver.json"


def write_folder(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    card: Card | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a network as a hub expects it, masked or compact.

    Example:
        >>> write_folder(small, "small-bert", card=Card("Small BERT", rows=rows, figures=["curve.svg"]))
        >>> again = read_folder("small-bert", factory=lambda: BertModel(config))

    ``config.json`` is the model's own configuration where it has one (transformers); ``model.safetensors`` has every
    tensor under its name, tied ones once; ``shaver.json`` says what was removed, so that the original constructor's
    network can be made as small; ``README.md`` is the card. A transformers model whose configuration can say its new
    widths is also read by ``from_pretrained(folder)``.

    Args:
        model: The network.
        folder: Created if need be.
        card: The model card; None writes none.
        config: Entries for ``config.json`` beside the model's own.
    """
    target = Path(folder)
    own: Any = getattr(model, "config", None)
    known = own.to_diff_dict() if hasattr(own, "to_diff_dict") else {}
    if known:
        known["architectures"] = [type(model).__name__]
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in model.state_dict().items():
        identity = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and identity in seen:
            tied[name] = seen[identity]
            continue
        seen[identity] = name
        tensors[name] = tensor.detach().cpu().contiguous()
    removed = plan_of(model)
    plan: dict[str, Any] = {"format": FORMAT, "version": VERSION, "class": type(model).__name__, "tied": tied}
    if removed is not None:
        plan["removed"] = removed.to_json()
    if isinstance(model, Network):
        plan["network"] = model.arguments
    target.mkdir(parents=True, exist_ok=True)
    save_tensors(target / WEIGHTS, tensors, {"format": "pt"})
    write_json(target / CONFIG, known | {"library_name": "shaver"} | dict(config or {}))
    if card is not None:
        card.write(target)
    write_json(target / PLAN, plan)  # last: a folder with a plan is complete
    return target


def read_folder(folder: str | os.PathLike[str], factory: Callable[[], nn.Module] | None = None) -> nn.Module:
    """Rebuild a network that :func:`write_folder` wrote.

    Args:
        folder: The folder.
        factory: Builds the network with its original shapes. A network of :mod:`shaver.zoo` needs none.

    Raises:
        FileNotFoundError: The folder is not there or not complete.
        ValueError: It was written by something else, or does not fit the network.
    """
    source = Path(folder)
    for name in (PLAN, WEIGHTS):
        if not (source / name).is_file():
            raise FileNotFoundError(f"{source} holds no network of shaver's in a hub's format: there is no {name}.")
    plan = read_json(source / PLAN)
    if not isinstance(plan, dict) or plan.get("format") != FORMAT:
        raise ValueError(f"{source / PLAN} was written by something else.")
    if plan.get("version") != VERSION:
        raise ValueError(f"{source} has version {plan.get('version')} of the format; this shaver reads {VERSION}.")
    if factory is None and "network" not in plan:
        raise ValueError(f"{source} holds a {plan.get('class')} and not how it is built: pass factory=….")
    model = factory() if factory is not None else build(**plan["network"])
    stored = load_tensors(source / WEIGHTS)
    stored |= {name: stored[same] for name, same in plan.get("tied", {}).items()}
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    if "removed" in plan and {name: tensor.shape for name, tensor in model.state_dict().items()} != shapes:
        removed = Plan.from_json(plan["removed"])
        try:
            shapes_after(model, removed)
        except ValueError as error:
            raise ValueError(f"{source} does not fit {type(model).__name__}: {error}") from error
        resize(model, removed)
    fill(model, stored, source)
    return model


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


def pull(name: str, factory: Callable[[], nn.Module] | None = None, *, revision: str | None = None) -> nn.Module:
    """A network from a local folder, or from the hub where ``name`` is no folder: :func:`read_folder` of a download."""
    if Path(name).is_dir():
        return read_folder(name, factory)
    return read_folder(_hub().snapshot_download(name, revision=revision), factory)


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError('the hub needs huggingface_hub: pip install "shaver[transformers]".') from error
    return huggingface_hub
