"""Whole units of a causal model's blocks: which can be removed, which are, and the smaller model that is left.

Units are the hidden units of the feed-forward part and the key-value heads with their query heads. The layer that reads
the units determines the cost of each, and compensates for those that are removed by one solve for all rows,
W_K ← W_K + W_R A_RK (A_KK + Λ)⁻¹. Every block loses the same number, because the configuration has one entry for all.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shaver.integrations.block_moments import weight_scores
from shaver.integrations.causal_blocks import BlockChain
from shaver.structure import find_groups
from shaver.structure.config_widths import evened, expressible
from shaver.structure.damage import UnitReader, eliminate
from shaver.structure.groups import Group, Groups, kept_units, mask_units, remaining, tensors_of
from shaver.structure.record import RemovalRecord, resize
from shaver.structure.scores import unit_scores

#: Largest difference of logits, relative to the largest, between the model with zeros and the smaller one.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True)
class Widths:
    """The units that every block has, and how many of each group stay.

    Attributes:
        groups: Of one block, with the names of its own parameters.
        stay: Group → number of units that stay.
    """

    groups: Groups
    stay: Mapping[str, int]


def find_widths(chain: BlockChain, share: float) -> Widths:
    """The groups of a block whose widths the model's configuration expresses, and how many units of each stay.

    The share of units to remove is rounded to whole units of each group.

    Raises:
        ValueError: Blocks differ in their shapes, no width can be expressed, or the share is below half a unit.
    """
    shapes = [{name: tensor.shape for name, tensor in block.state_dict().items()} for block in chain.blocks]
    other = next((number for number, found in enumerate(shapes) if found != shapes[0]), None)
    if other is not None:
        raise ValueError(
            f"{chain.path}.{other} has other shapes than {chain.path}.0: units are removed block by block only from "
            "models whose blocks are all alike. shaver.compact takes other models."
        )
    tokens = chain.some_tokens
    first = deepcopy(chain.blocks[0]).float()
    groups = find_groups(first, chain.entering(tokens), forward=chain.calls(tokens)[0])
    expressed, _ = expressible(chain.model, _everywhere(chain, groups))
    within = {name: group for name, group in groups.items() if f"{chain.path}.0.{name}" in expressed}
    stay = {name: group.units - round(share * group.units) for name, group in within.items()}
    if all(stay[name] == group.units for name, group in within.items()):
        sizes = " and ".join(f"{group.units} of {name}" for name, group in within.items())
        raise ValueError(f"a share of {share} is less than half a unit of {sizes}: nothing would be removed.")
    return Widths(Groups(within, groups.left_out, groups.shapes), {name: max(1, n) for name, n in stay.items()})


@dataclass
class BlockUnits:
    """The units of one block while it is pruned.

    Attributes:
        widths: What stays of each group.
        criterion: ``"opd"``, ``"wanda"`` or ``"magnitude"``.
        repair: Let the layers that read the units compensate for those that are removed.
        kept: Group → one truth value per unit, as far as decided.
    """

    widths: Widths
    criterion: str
    repair: bool
    kept: dict[str, Tensor] = field(default_factory=dict)

    def reduced(self, block: nn.Module, path: str, mean: Tensor, second: Tensor, ridge: float) -> Tensor:
        """The weight of a layer after the units that it reads were removed; zero in their columns.

        ``block`` has the weights that make the units as they were. ``mean`` is the layer's weight before, ``second``
        the second moment of its inputs, and ``ridge`` Λ.
        """
        for name, columns in _read_by(self.widths.groups, path):
            group, stay = self.widths.groups[name], self.widths.stay[name]
            reader = UnitReader(mean.double(), second.double(), columns, ridge=ridge) if self.repair else None
            if name not in self.kept and reader is not None and self.criterion == "opd":
                _, alive = eliminate(group.units, [reader], stay)
                self.kept[name] = torch.zeros(group.units, dtype=torch.bool).index_fill_(0, alive, True)
            else:
                if name not in self.kept:
                    scores = self._scores(block, group, mean, second, columns, ridge)
                    best = scores.argsort(stable=True, descending=True)[:stay]
                    self.kept[name] = torch.zeros(group.units, dtype=torch.bool).index_fill_(0, best, True)
                if reader is not None:
                    reader.remove((~self.kept[name]).nonzero().flatten())
            mean = mean.clone() if reader is None else reader.weight.to(mean.dtype)
            mean[:, columns[~self.kept[name]].flatten()] = 0
        return mean

    def _scores(
        self, block: nn.Module, group: Group, mean: Tensor, second: Tensor, columns: Tensor, ridge: float
    ) -> Tensor:
        """What the units are ranked by where they are not removed one after the other."""
        if self.criterion == "magnitude":
            weights = {name: parameter.detach().abs() for name, parameter in block.named_parameters()}
            return unit_scores(Groups({group.name: group}), weights)[group.name]
        return weight_scores(mean, second, ridge, self.criterion).sum(0)[columns].sum(1)

    def mask(self, block: nn.Module) -> dict[str, int]:
        """Zero everything that belongs to the removed units; parameter → how many of its weights stay."""
        masks = mask_units(block, self.widths.groups, self.kept)
        masks.apply_(block)
        return {name: int(mask.sum()) for name, mask in masks.items()}


@torch.no_grad()
def shrink(chain: BlockChain, widths: Widths) -> None:
    """Remove the units that are zero in every block, and adapt the configuration.

    Raises:
        RuntimeError: The smaller model gives other logits; that is a bug.
    """
    model: Any = chain.model
    groups = _everywhere(chain, widths.groups)
    kept = kept_units(groups, {name: parameter.detach() != 0 for name, parameter in model.named_parameters()})
    kept = evened(kept, {name: groups[name].kind for name in groups})
    before = chain.logits()
    sizes = {name: tensor.shape for name, tensor in tensors_of(model).items()}
    staying = remaining(groups, kept, sizes)
    resize(model, RemovalRecord({name: sizes[name] for name in staying}, staying))
    off = float((chain.logits() - before).abs().max() / before.abs().max())
    limit = _TOLERANCES.get(model.dtype, 0.1)
    if not off <= limit:
        raise RuntimeError(f"the smaller model's logits differ by {off:.2g} of the largest, more than {limit:.2g}.")


def _everywhere(chain: BlockChain, groups: Groups) -> Groups:
    """The groups of one block as those of all blocks of the model."""
    found: dict[str, Group] = {}
    for number in range(len(chain)):
        place = f"{chain.path}.{number}."
        for name, group in groups.items():
            slices = tuple(replace(piece, tensor=place + piece.tensor) for piece in group.slices)
            found[place + name] = replace(group, name=place + name, slices=slices)
    return Groups(found)


def _read_by(groups: Groups, path: str) -> list[tuple[str, Tensor]]:
    """The groups that a layer reads, each with the columns of its units."""
    pieces = [(name, piece) for name, group in groups.items() for piece in group.slices]
    return [(name, piece.index) for name, piece in pieces if (piece.role, piece.tensor) == ("reads", f"{path}.weight")]
