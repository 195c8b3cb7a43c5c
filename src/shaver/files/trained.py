"""Loading networks: saved folders, hub folders, runs of ``fit``, and a user's own state dict."""

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shaver.evidence import Posterior
from shaver.files import checkpoints, hub, saved
from shaver.files.network import Factory, StoredNetwork
from shaver.io import as_path, load_state, load_tensors
from shaver.likelihoods import Likelihood, get_likelihood
from shaver.naming import import_function

#: First bytes of files from torch.save: a zip archive, or a bare pickle.
_TORCH = (b"PK\x03\x04", b"\x80")
#: Keys under which training scripts store the weights in a larger dict.
_NESTED = ("state_dict", "model_state_dict", "model", "weights")


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network and what is known about its training.

    Attributes:
        model: The network.
        posterior: The posterior from SpaM, if it exists and belongs to these weights.
        method: How the network was trained, if known: ``"spam"``, ``"map"`` or ``"l1"``.
        likelihood: The likelihood, if known, with the noise from training; only the name of a user's own likelihood.
    """

    model: nn.Module
    posterior: Posterior | None = None
    method: str | None = None
    likelihood: Likelihood | str | None = None


def load(path: str | os.PathLike[str], factory: Factory | None = None) -> nn.Module:
    """Rebuild a network from a file or folder.

    Reads what :func:`shaver.save` and :func:`shaver.files.write_folder` wrote, the newest checkpoint of a run of
    :func:`shaver.fit`, and state dicts in safetensors or torch.save's format (tensors only, nothing is unpickled).

    Args:
        path: The folder or file.
        factory: A function that builds the network with its original shapes, such as the class itself; or a network to
            load into, with the original shapes or those of the stored network. It does not change if anything does not
            fit. A network of :mod:`shaver.zoo` needs no factory. The network gets the precision of the file.

    Raises:
        FileNotFoundError: The path does not exist, or holds none of these formats.
        ValueError: A file is damaged, another program wrote it, it does not fit the network, or it is not known how to
            build the network.
    """
    return read_network(as_path(path)).rebuild(factory)


def load_trained(path: str | os.PathLike[str], factory: Factory | str | None = None) -> TrainedNetwork:
    """Rebuild a network as :func:`load` does, in eval mode, with what is known about its training.

    Args:
        path: The folder or file.
        factory: As for :func:`load`, or ``"package.module:function"``.
    """
    stored = read_network(as_path(path))
    try:
        model = stored.rebuild(import_function(factory, "--factory") if isinstance(factory, str) else factory).eval()
    except TypeError as error:
        if isinstance(factory, str):
            raise ValueError(f"--factory {factory}: {error}") from error
        raise
    return TrainedNetwork(model, _posterior(stored, model), stored.config.get("method"), _likelihood(stored))


def read_network(path: Path) -> StoredNetwork:
    """Read a file or folder in any format that :func:`load` supports."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist.")
    if not path.is_dir():
        return _read_file(path)
    if (path / saved.PLAN).is_file():
        return saved.read_saved(path)
    if (path / hub.PLAN).is_file():
        return hub.read_hub_folder(path)
    if (found := checkpoints.load_newest(path)) is not None:
        return _of_run(*found)
    inside = sorted(p for p in path.rglob("*.safetensors") if not p.stem.endswith("posterior"))
    hint = f" There is {', '.join(map(str, inside[:3]))}{', …' if inside[3:] else ''} in it." if inside else ""
    raise FileNotFoundError(
        f"{path} holds no saved network ({saved.PLAN}), no hub folder ({hub.PLAN}) and no run of shaver.fit "
        f"(checkpoints).{hint}"
    )


def _read_file(path: Path) -> StoredNetwork:
    with open(path, "rb") as file:
        start = file.read(9)
    # A safetensors file begins with eight bytes of length, of any value, followed by JSON.
    if start.startswith(_TORCH) and start[8:] != b"{":
        return StoredNetwork(path, _state_dict_of_torch(path))
    tensors, state = load_tensors(path), load_state(path, missing=None)
    if state is None:
        return StoredNetwork(path, tensors)  # an ordinary safetensors file
    if isinstance(state, dict) and {"config", "model"} <= state.keys():
        return _of_run(path, state)
    if isinstance(state, dict) and {"network", "weights"} <= state.keys():
        beside = path.with_name(f"{path.stem}-posterior.safetensors")
        return StoredNetwork(path, state["weights"], state["network"], posterior=beside)
    raise ValueError(f"{path} does not hold a network (perhaps a posterior or masks).")


def _of_run(path: Path, state: dict[str, Any]) -> StoredNetwork:
    return StoredNetwork(
        path,
        state["model"],
        state.get("network"),
        posterior=path.parent / checkpoints.POSTERIOR,
        config=state["config"],
        likelihood=state["likelihood"],
    )


def _state_dict_of_torch(path: Path) -> Mapping[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{path} cannot be read as plain tensors ({reason}): it is damaged, or holds pickled objects, which are "
            "not loaded because they could run any code. Save it with torch.save(model.state_dict(), …)."
        ) from error
    candidates = [state, *(state.get(key) for key in _NESTED)] if isinstance(state, Mapping) else []
    for found in candidates:
        if isinstance(found, Mapping) and found and all(isinstance(value, Tensor) for value in found.values()):
            return dict(found)
    raise ValueError(f"{path} holds no state dict, neither at the top nor under {', '.join(map(repr, _NESTED))}.")


def _posterior(stored: StoredNetwork, model: nn.Module) -> Posterior | None:
    if stored.posterior is None or not stored.posterior.is_file():
        return None
    posterior, weights = Posterior.load(stored.posterior), dict(model.named_parameters())
    same = all(
        name in weights and torch.equal(theta, weights[name].detach()) for name, theta in posterior.theta.items()
    )
    return posterior if same else None  # the weights may be those of an earlier checkpoint


def _likelihood(stored: StoredNetwork) -> Likelihood | str | None:
    name: str | None = stored.config.get("likelihood")
    if name not in ("classification", "regression"):
        return name
    likelihood = get_likelihood(name)
    likelihood.load_state(dict(stored.likelihood or {}))
    return likelihood
