"""The options of ``shaver compact`` and ``shaver export``; they import no torch, so that help comes at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from shaver.commands.network_options import NetworkOptions, optional


@dataclass(frozen=True)
class CompactOptions(NetworkOptions):
    """What to make smaller, how, how far, and what to measure it on.

    Attributes:
        sparsity: The share of the target to remove, such as 0.8. Without it only units that do nothing are removed,
            such as those that fell during gradual pruning.
        target: What it is a share of: units (channels, hidden units, heads), parameters, flops or measured latency.
        criterion: How units are ranked, by the sum over all that belongs to them: opd (the default), obd, magnitude,
            snip, grasp, synflow, wanda or random; what they need is as for shaver prune.
        spread: uniform removes the same share of each layer; global ranks the units of all layers together, so that
            widths come out freely.
        round_to: Make widths multiples of this, as hardware likes: 8, say.
        min_units: Each layer keeps at least so many units.
        residual: Also let go of channels of residual streams, which all blocks of a stage share.
        finetune: Train the small network for so many epochs afterwards, by MAP with a cosine schedule; needs --data.
        lr: Learning rate of --finetune.
        batch_size: Batch size of --finetune.
    """

    sparsity: Annotated[float | None, optional("SHARE")] = None
    target: Literal["units", "parameters", "flops", "latency"] = "units"
    criterion: Annotated[str | None, optional("NAME")] = None
    spread: Literal["uniform", "global"] = "uniform"
    round_to: int = 1
    min_units: int = 1
    residual: bool = False
    finetune: int = 0
    lr: float = 0.01
    batch_size: int = 128


@dataclass(frozen=True)
class ExportOptions:
    """Which network to write, and as what.

    Attributes:
        folder: The network: a folder that `shaver compact --out` or shaver.save wrote, or whatever shaver prune takes.
        onnx: Write an ONNX file, checked against the network; network.onnx in the folder if no path is given.
        input_shape: The shape of one input, such as 1 28 28; not needed where `shaver compact` wrote the folder.
        factory: How to build the network, as package.module:function; not needed for shaver's zoo.
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    onnx: Annotated[tuple[Path, ...] | None, optional("[PATH]")] = None
    input_shape: Annotated[tuple[int, ...], optional("SIZE ...")] = ()
    factory: Annotated[str | None, optional("MODULE:FUNCTION")] = None
