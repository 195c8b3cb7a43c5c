"""The options of ``shaver prune``; apart from what carries them out, so that its help needs no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro


def _optional(metavar: str) -> Any:
    """How an option without a default of its own appears in the help: what it takes, and no "default: None"."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class PruningOptions:
    """What to prune, how, how far, and what to measure it on.

    Attributes:
        checkpoint: The trained network: a folder or checkpoint of shaver.fit, a network of a demo's models/ folder, a
            folder of shaver.save, a safetensors file, or a PyTorch file that holds nothing but a state dict.
        criterion: How weights are ranked: opd (the default), obd, magnitude, snip, grasp, synflow, wanda or random.
            opd and obd read the posterior of a SpaM run, or estimate one with --data; snip, grasp and wanda need
            --data, synflow --data or --input-shape; magnitude and random need nothing.
        sparsity: The share of weights to remove, such as 0.95; or auto: whatever the evidence does not pay for.
        max_drop: Instead of a sparsity: remove as much as costs at most this share of validation accuracy (0.01 is
            one point). Needs --data; --sparsity is then the most to try.
        scope: global ranks all weights together, layer removes the same share of each layer, 2:4 (or another N:M)
            keeps N of each M weights in a row.
        data: Data to measure on, and for the criteria that need them: cancer, digits, mnist, fashion, cifar10,
            cifar100, or package.module:function, which returns something with .train, .test and perhaps .valid,
            each a list of batches or a DataLoader. Without data nothing is said about accuracy.
        data_seed: The seed with which the data were split for training (shaver.data.load), or test samples may have
            been trained on.
        valid_fraction: The share of the training data that was held out for validation; 0.1 if --max-drop needs some.
        samples: Use only so many training samples for scores and curvature.
        factory: How to build the network, as package.module:function; the function takes no arguments. A network of
            shaver's zoo that shaver saved needs none, any other does: --factory shaver.zoo:LeNet.
        input_shape: The shape of one input, such as 1 28 28, for FLOPs, latency and synflow where there are no data.
        likelihood: What the outputs mean; if left out, what the run was trained with, or classification.
        prior_precision: δ for a posterior estimated after training; 1 is what MAP trains with by default.
        cap: No layer loses more than this share of its weights.
        minimum: Each layer keeps at least so many weights.
        seed: Of the random criterion and of the choice of --samples.
        out: Write the pruned network and a report into this folder; shaver.load reads it. Without it nothing is
            written.
    """

    checkpoint: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")]
    criterion: Annotated[str | None, _optional("NAME")] = None
    sparsity: Annotated[float | Literal["auto"] | None, _optional("SHARE|auto")] = None
    max_drop: Annotated[float | None, _optional("SHARE")] = None
    scope: Annotated[str, tyro.conf.arg(metavar="global|layer|N:M")] = "global"
    data: Annotated[str | None, _optional("NAME")] = None
    data_seed: int = 0
    valid_fraction: Annotated[float | None, _optional("SHARE")] = None
    samples: Annotated[int | None, _optional("NUMBER")] = None
    factory: Annotated[str | None, _optional("MODULE:FUNCTION")] = None
    input_shape: Annotated[tuple[int, ...], _optional("SIZE ...")] = ()
    likelihood: Annotated[Literal["classification", "regression"] | None, _optional("classification|regression")] = None
    prior_precision: Annotated[float | None, _optional("NUMBER")] = None
    cap: float = 1.0
    minimum: int = 0
    seed: int = 0
    out: Annotated[Path | None, _optional("FOLDER")] = None
