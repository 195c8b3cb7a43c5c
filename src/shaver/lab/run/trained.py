"""Trained networks from files: runs of ``fit``, networks of the demo, saved ones, and a user's own state dict."""

import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shaver.evidence import Posterior
from shaver.io import load_state, load_tensors
from shaver.lab.recipes.language import build_network
from shaver.likelihoods import Likelihood, get_likelihood
from shaver.naming import check_name
from shaver.pruning import load
from shaver.pruning.files import PLAN, fill
from shaver.training import checkpoints

#: How files of torch.save begin: a zip archive, or a bare pickle.
_TORCH = (b"PK\x03\x04", b"\x80")
#: Under which names training scripts keep the weights in a larger dict.
_NESTED = ("state_dict", "model_state_dict", "model", "weights")


@dataclass(frozen=True)
class Trained:
    """A trained network.

    Attributes:
        model: The network.
        posterior: What SpaM learned, if it is there and belongs to these weights.
        method: How it was trained, if that is known: ``"spam"``, ``"map"``, ``"l1"``.
        likelihood: What its outputs mean, if that is known, with the noise of training; the bare name of a user's own.
    """

    model: nn.Module
    posterior: Posterior | None = None
    method: str | None = None
    likelihood: Likelihood | str | None = None


@dataclass(frozen=True)
class _Stored:
    """The contents of a file: weights, and whatever else it knows."""

    source: Path
    weights: Mapping[str, Tensor]
    network: Mapping[str, Any] | None = None
    posterior: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    likelihood: Mapping[str, Any] | None = None


def load_trained(path: Path, factory: str | None = None) -> Trained:
    """Read a trained network from a folder or file of any of the kinds named above.

    Args:
        path: The folder or file.
        factory: ``package.module:function`` that builds the network; networks of :mod:`shaver.zoo` that shaver saved
            need none.

    Raises:
        FileNotFoundError: There is nothing, or nothing of these kinds.
        ValueError: A file is damaged or foreign, does not fit the network, or no one knows how to build it.
    """
    build = None if factory is None else _builder(factory)
    if (path / PLAN).is_file():
        return Trained(load(path, build))
    stored = _read(path)
    if build is None:
        if stored.network is None:
            raise ValueError(
                f"{path} holds weights and not how their network is built: pass --factory package.module:function "
                "(for a network of the zoo, say, --factory shaver.zoo:LeNet)."
            )
        model = build_network(**stored.network)
    else:
        model = build()
    fill(model, _unwrapped(stored.weights, model), stored.source)
    model.eval()
    return Trained(model, _posterior(stored, model), stored.config.get("method"), _likelihood(stored))


def import_function(spec: str, option: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` names; modules beside the user are found as Python finds them.

    Raises:
        ValueError: It is not written like that, or the module has no such function.
        ImportError: There is no such module.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise ValueError(f"{option} is written package.module:function, not {spec!r}.")
    sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{option} {spec}: {error}; it is looked for here and among the installed packages."
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    found: Callable[..., Any] = getattr(module, name, None) or getattr(
        module, check_name(f"function of {module_name}", name, [n for n, v in vars(module).items() if callable(v)])
    )
    return found


def _builder(spec: str) -> Callable[[], nn.Module]:
    function = import_function(spec, "--factory")

    def build() -> nn.Module:
        try:
            model = function()
        except TypeError as error:
            raise ValueError(f"--factory {spec} could not be called without arguments: {error}.") from error
        if not isinstance(model, nn.Module):
            raise ValueError(f"--factory {spec} returned a {type(model).__name__}, not a torch.nn.Module.")
        return model

    return build


def _read(path: Path) -> _Stored:
    if path.is_dir():
        if (found := checkpoints.load_newest(path)) is not None:
            return _of_run(*found)
        inside = sorted(p for p in path.rglob("*.safetensors") if not p.stem.endswith("posterior"))
        hint = f" There is {', '.join(map(str, inside[:3]))}{', …' if inside[3:] else ''} in it." if inside else ""
        raise FileNotFoundError(f"{path} holds neither a run of shaver.fit nor a network of shaver.save.{hint}")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist.")
    with open(path, "rb") as file:
        start = file.read(9)
    if (
        start.startswith(_TORCH) and start[8:] != b"{"
    ):  # safetensors: eight bytes of length, which may be any, then JSON
        return _Stored(path, _of_torch(path))
    tensors = load_tensors(path)
    try:
        state = load_state(path)
    except ValueError:  # an ordinary safetensors file
        return _Stored(path, tensors)
    if isinstance(state, dict) and {"config", "model"} <= state.keys():
        return _of_run(path, state)
    if isinstance(state, dict) and {"network", "weights"} <= state.keys():
        beside = path.with_name(f"{path.stem}-posterior.safetensors")
        return _Stored(path, state["weights"], state["network"], beside)
    raise ValueError(f"{path} holds something else than a network (a posterior or masks, perhaps).")


def _of_run(path: Path, state: dict[str, Any]) -> _Stored:
    posterior = path.parent / checkpoints.POSTERIOR
    return _Stored(path, state["model"], state.get("network"), posterior, state["config"], state["likelihood"])


def _of_torch(path: Path) -> Mapping[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{path} cannot be read as plain tensors ({reason}): it is damaged, or holds pickled objects, which could "
            "run anything and are not loaded. torch.save(model.state_dict(), …) writes what can be read."
        ) from error
    candidates = [state, *(state.get(key) for key in _NESTED)] if isinstance(state, Mapping) else []
    for found in candidates:
        if isinstance(found, Mapping) and found and all(isinstance(value, Tensor) for value in found.values()):
            return dict(found)
    raise ValueError(f"{path} holds no state dict, neither at the top nor under {', '.join(map(repr, _NESTED))}.")


def _unwrapped(weights: Mapping[str, Tensor], model: nn.Module) -> Mapping[str, Tensor]:
    """The weights by the network's own names: DistributedDataParallel and torch.compile put theirs in front."""
    own, found = model.state_dict().keys(), dict(weights)
    while found.keys() != own:
        prefix = next(iter(found), "").split(".")[0] + "."
        if prefix not in ("module.", "_orig_mod.") or not all(name.startswith(prefix) for name in found):
            return weights
        found = {name.removeprefix(prefix): value for name, value in found.items()}
    return found


def _posterior(stored: _Stored, model: nn.Module) -> Posterior | None:
    if stored.posterior is None or not stored.posterior.is_file():
        return None
    posterior, weights = Posterior.load(stored.posterior), dict(model.named_parameters())
    same = all(
        name in weights and torch.equal(theta, weights[name].detach()) for name, theta in posterior.theta.items()
    )
    return posterior if same else None  # an earlier checkpoint of the run, say


def _likelihood(stored: _Stored) -> Likelihood | str | None:
    name: str | None = stored.config.get("likelihood")
    if name not in ("classification", "regression"):
        return name
    likelihood = get_likelihood(name)
    likelihood.load_state(dict(stored.likelihood or {}))
    return likelihood
