"""A run of SpaM that is saved midway and read back goes on bit by bit."""

from typing import Any

import pytest
import torch
from torch import nn

from shaver.io import load_state, save_state
from shaver.spam import SpaM
from tests.spam.toys import QUICK, N, blobs, mlp, split

KINDS: dict[str, dict[str, Any]] = {
    "mc": QUICK,
    "ef": QUICK | {"source": "ef", "prior": "unit"},
    "gradient": QUICK | {"proximal": False, "method": "gradient", "prior": "layer"},
    "kron": {"structure": "kron", "prior": "unit", "source": "mc"},
    "regression": QUICK | {"likelihood": "regression"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_saved_midway_goes_on_bit_by_bit(kind: str, tmp_path: Any):
    (x, y), options = blobs(), KINDS[kind]
    batches = split((x, y))

    def start() -> tuple[nn.Module, SpaM, torch.optim.Optimizer]:
        model = mlp()
        return model, SpaM(model, N, total_steps=40, **options), torch.optim.Adam(model.parameters(), lr=0.01)

    def go(model: nn.Module, spam: SpaM, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            a, b = batches[step % len(batches)]
            optimizer.zero_grad()
            spam.loss(model(a), a[:, :3] if kind == "regression" else b).backward()
            spam.step(optimizer)
            if step % 6 == 5:
                spam.end_epoch(batches)

    whole = start()
    go(*whole, 0, 24)
    part = start()
    go(*part, 0, 13)
    save_state(tmp_path / "state", [x.state_dict() for x in part])
    resumed = start()
    for piece, state in zip(resumed, load_state(tmp_path / "state"), strict=True):
        piece.load_state_dict(state)
    assert resumed[1].statistics() == part[1].statistics()
    go(*resumed, 13, 24)
    assert resumed[1].updates == whole[1].updates > 2
    assert resumed[1].statistics() == whole[1].statistics()
    for kept, new in (
        (whole[0].state_dict(), resumed[0].state_dict()),
        (whole[1].prior.delta(), resumed[1].prior.delta()),
    ):
        assert all(torch.equal(kept[name], new[name]) for name in kept)


def test_a_state_of_the_other_way_of_learning_is_refused():
    online, epochs = SpaM(mlp(), N), SpaM(mlp(), N, online=False)
    with pytest.raises(ValueError, match="learned online and this one learns by epochs: pass online=True"):
        epochs.load_state_dict(online.state_dict())
    with pytest.raises(ValueError, match="learned by epochs and this one learns online: pass online=False"):
        online.load_state_dict(epochs.state_dict())
