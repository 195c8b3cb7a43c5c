"""Options that every command on a trained network shares; they import no torch, so that help comes at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro


def optional(metavar: str) -> Any:
    """How an option without a default of its own appears in the help: what it takes, and no "default: None"."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class NetworkOptions:
    """Which network, what it is scored with and measured on, and where the result goes.

    Attributes:
        checkpoint: The trained network: a folder or checkpoint of shaver.fit, a network of a demo's models/ folder, a
            folder of shaver.save, a safetensors file, or a PyTorch file that holds nothing but a state dict.
        data: Data to measure on, and for the criteria that need them: cancer, digits, mnist, fashion, cifar10,
            cifar100, or package.module:function, which returns something with .train, .test and perhaps .valid,
            each a list of batches or a DataLoader. Without data nothing is said about accuracy.
        data_seed: The seed with which the data were split for training (shaver.data.load), or test samples may have
            been trained on.
        samples: Use only so many training samples for scores and curvature.
        factory: How to build the network, as package.module:function; the function takes no arguments. A network of
            shaver's zoo that shaver saved needs none, any other does: --factory shaver.zoo:LeNet.
        input_shape: The shape of one input, such as 1 28 28, for FLOPs, latency and synflow where there are no data.
        likelihood: What the outputs mean; if left out, what the run was trained with, or classification.
        prior_precision: δ for a posterior estimated after training; 1 is what MAP trains with by default.
        seed: Of the random criterion and of the choice of --samples.
        out: Write the network and a report into this folder; shaver.load reads it. Without it nothing is written.
    """

    checkpoint: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")]
    data: Annotated[str | None, optional("NAME")] = None
    data_seed: int = 0
    samples: Annotated[int | None, optional("NUMBER")] = None
    factory: Annotated[str | None, optional("MODULE:FUNCTION")] = None
    input_shape: Annotated[tuple[int, ...], optional("SIZE ...")] = ()
    likelihood: Annotated[Literal["classification", "regression"] | None, optional("classification|regression")] = None
    prior_precision: Annotated[float | None, optional("NUMBER")] = None
    seed: int = 0
    out: Annotated[Path | None, optional("FOLDER")] = None
