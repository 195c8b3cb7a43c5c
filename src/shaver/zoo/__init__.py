"""The paper's networks, LeNet-5-Caffe and two small ones. Each can be rebuilt from a plain dict of its arguments.

Example:
    >>> import shaver.zoo
    >>> model = shaver.zoo.build("wrn16_fixup", seed=0, classes=100)
"""

import inspect
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from shaver.naming import check_name
from shaver.zoo.fcn import FCN
from shaver.zoo.fixup import Bias, Scale
from shaver.zoo.lenet import DigitsCNN, LeNet, LeNetCaffe
from shaver.zoo.mixer import Mixer
from shaver.zoo.network import Network
from shaver.zoo.reader import Reader, rebuilt_reader
from shaver.zoo.resnet import WRN16, ResNet18, ResNet18Fixup, WRN16Fixup
from shaver.zoo.vit import ViT

__all__ = [
    "FCN",
    "WRN16",
    "Bias",
    "DigitsCNN",
    "LeNet",
    "LeNetCaffe",
    "Mixer",
    "Reader",
    "ResNet18",
    "ResNet18Fixup",
    "Scale",
    "ViT",
    "WRN16Fixup",
    "arguments_of",
    "build",
    "names",
    "rebuild",
]

_NETWORKS: dict[str, type[Network]] = {
    "fcn": FCN,
    "lenet": LeNet,
    "lenet_caffe": LeNetCaffe,
    "digits_cnn": DigitsCNN,
    "mixer": Mixer,
    "resnet18_fixup": ResNet18Fixup,
    "resnet18": ResNet18,
    "wrn16_fixup": WRN16Fixup,
    "wrn16": WRN16,
    "vit": ViT,
}


def names() -> list[str]:
    """The names that :func:`build` accepts."""
    return list(_NETWORKS)


def build(name: str, *, seed: int | None = None, **arguments: Any) -> nn.Module:
    """Build a network by name, with the options of its class.

    Example:
        >>> model = build("lenet", seed=0, image_size=32, channels=3)
        >>> arguments_of(model)
        {'name': 'lenet', 'image_size': 32, 'channels': 3, 'classes': 10}
        >>> twin = build(**arguments_of(model), seed=0)  # the same architecture and, with this seed, the same weights

    Args:
        name: One of :func:`names`.
        seed: Seed of the initial weights; the global random state does not change. Default None: weights are drawn
            from the global random state, as for any module.
        arguments: Options of the network's constructor.

    Raises:
        ValueError: A name or option is unknown, or an option has an impossible value.
    """
    network = _NETWORKS[check_name("network", name, _NETWORKS)]
    for option in arguments:
        check_name(f"option of {name!r}", option, inspect.signature(network).parameters)
    if seed is None:
        return network(**arguments)
    # Modules are made on the CPU, so only its random state has to be kept.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return network(**arguments)


def rebuild(arguments: Mapping[str, Any]) -> nn.Module:
    """Build a network from the plain dict that :func:`arguments_of` returned, such as one read from a file.

    Raises:
        ValueError: The dict does not describe a network of the zoo or a saved language model.
    """
    if not isinstance(arguments, Mapping) or not isinstance(arguments.get("name"), str):
        raise ValueError(f"{arguments!r} does not name a network to build.")
    options = {str(option): value for option, value in arguments.items()}
    name = options.pop("name")
    try:
        return rebuilt_reader(**options) if name == "reader" else build(name, **options)
    except TypeError as error:
        raise ValueError(f"{name!r} cannot be built with these options: {error}.") from error


def arguments_of(model: nn.Module) -> dict[str, Any]:
    """The plain dict from which ``build(**arguments)`` builds the same architecture.

    Raises:
        TypeError: The model is not from the zoo.
    """
    if not isinstance(model, Network):
        raise TypeError(f"{type(model).__name__} is not a network of shaver.zoo ({', '.join(_NETWORKS)}).")
    return deepcopy(model.arguments)
