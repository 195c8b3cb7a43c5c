"""torch-pruning's dependency graph and our probes come to the same groups, and where they do not the probes decide."""

import pytest
import torch
from torch import nn

from shaver import zoo
from shaver.structure import Groups, find_groups
from tests.structure.silencing import check_units, randomised

pytest.importorskip("torch_pruning")


def content(groups: Groups) -> dict[str, object]:
    return {
        name: (group.kind, {(p.tensor, p.dim, p.role): p.index.tolist() for p in group.slices})
        for name, group in groups.items()
    }


CASES = {
    "fcn": ({"inputs": 12, "hidden": (9, 7)}, (2, 12), True),
    "lenet": ({}, (2, 1, 28, 28), True),
    "digits_cnn": ({}, (2, 1, 8, 8), True),
    "mixer": ({"image_size": 8, "patch_size": 4, "dim": 12, "token_dim": 6, "channel_dim": 10}, (2, 1, 8, 8), True),
    "wrn16": ({"depth": 10, "widen": 1}, (2, 3, 8, 8), True),
    "wrn16_fixup": ({"depth": 10, "widen": 1}, (2, 3, 8, 8), True),
}


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_both_ways_lead_to_the_same_groups(name: str, residual: bool) -> None:
    arguments, shape, _ = CASES[name]
    model, x = zoo.build(name, seed=0, **arguments), torch.randn(*shape)
    probed, traced = (find_groups(model, x, residual=residual, by=by) for by in ("probing", "torch-pruning"))
    assert content(traced) == content(probed)


def test_depthwise_concatenated_and_batch_normalised() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
            self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
            self.second, self.third = nn.Conv2d(6, 5, 1), nn.Conv2d(11, 4, 1)
            self.head = nn.Linear(4 * 16, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.depthwise(torch.relu(self.norm(self.first(x)))))
            x = torch.relu(self.third(torch.cat([x, self.second(x)], 1)))
            out: torch.Tensor = self.head(x.flatten(1))
            return out

    model, x = randomised(Net()), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    traced = find_groups(model, x, by="torch-pruning")
    assert content(traced) == content(find_groups(model, x))
    check_units(model, traced, lambda model: model(x))


def test_a_group_that_the_probes_refute_is_left_out() -> None:
    """The graph takes a shortcut that appends channels of zeros for an elementwise sum."""
    model, x = zoo.build("resnet18_fixup", seed=0), torch.randn(1, 3, 8, 8)
    groups = find_groups(model, x, residual=True, by="torch-pruning")
    assert list(groups) == [f"blocks.{n}.conv1" for n in range(8)]
    assert groups.left_out["stem"] == "its outputs arrive elsewhere than torch-pruning's graph says"


def test_heads_are_not_guessed() -> None:
    model = zoo.build("vit", seed=0, image_size=8, patch_size=4, dim=12, heads=3, mlp_dim=10)
    groups = find_groups(model, torch.randn(2, 1, 8, 8), by="torch-pruning")
    assert {group.kind for group in groups.values()} == {"hidden"}
    assert "blocks.0.attention.qkv" in groups.left_out
