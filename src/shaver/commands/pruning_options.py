"""The options of ``shaver prune``; apart from what carries them out, so that its help needs no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from shaver.commands.network_options import NetworkOptions, optional


@dataclass(frozen=True)
class PruningOptions(NetworkOptions):
    """What to prune, how, how far, and what to measure it on.

    Attributes:
        criterion: How weights are ranked: opd (the default), obd, magnitude, snip, grasp, synflow, wanda or random.
            opd and obd read the posterior of a SpaM run, or estimate one with --data; snip, grasp and wanda need
            --data, synflow --data or --input-shape; magnitude and random need nothing.
        sparsity: The share of weights to remove, such as 0.95; or auto: whatever the evidence does not pay for.
        max_drop: Instead of a sparsity: remove as much as costs at most this share of validation accuracy (0.01 is
            one point). Needs --data; --sparsity is then the most to try.
        scope: global ranks all weights together, layer removes the same share of each layer, 2:4 (or another N:M)
            keeps N of each M weights in a row.
        valid_fraction: The share of the training data that was held out for validation; 0.1 if --max-drop needs some.
        cap: No layer loses more than this share of its weights.
        minimum: Each layer keeps at least so many weights.
    """

    criterion: Annotated[str | None, optional("NAME")] = None
    sparsity: Annotated[float | Literal["auto"] | None, optional("SHARE|auto")] = None
    max_drop: Annotated[float | None, optional("SHARE")] = None
    scope: Annotated[str, tyro.conf.arg(metavar="global|layer|N:M")] = "global"
    valid_fraction: Annotated[float | None, optional("SHARE")] = None
    cap: float = 1.0
    minimum: int = 0
