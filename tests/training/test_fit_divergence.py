"""When a number stops being finite, training stops and says which one and where."""

import pytest
import torch
from torch import nn

from shaver.io import load_state
from shaver.training import Diverged, fit
from tests.training.problems import batches, network


def test_a_nan_in_the_data_is_named_as_such():
    data = batches()
    data[2][0][3, 1] = float("nan")
    with pytest.raises(
        Diverged, match=r"epoch 1, step 3: .*batch itself.*'0' is not finite in 1 of 96 places"
    ) as error:
        fit(network(), data, method="map", epochs=2)
    assert (error.value.epoch, error.value.step) == (1, 3)


def test_a_parameter_that_is_not_finite_is_named():
    model = network()
    with torch.no_grad():
        model[4].weight[0, 0] = float("inf")
    with pytest.raises(Diverged, match=r"parameter '4.weight' is not finite in 1 of 36 places"):
        fit(model, batches(), method="map", epochs=1)


class _SquareRootOfZero(nn.Module):
    """Finite forward, infinite gradient."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(3))
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        return self.linear(x) * (1 + self.scale.sqrt())


def test_a_gradient_that_is_not_finite_is_named_before_it_ruins_the_weights():
    model = _SquareRootOfZero()
    with pytest.raises(Diverged, match=r"epoch 1, step 1: the loss is finite but the gradient of 'scale'"):
        fit(model, batches(), method="map", epochs=1)
    assert torch.isfinite(model.linear.weight).all()
    assert torch.equal(model.scale, torch.zeros(3))


def test_overflowing_outputs_are_told_apart_from_bad_weights():
    class Huge(nn.Linear):
        def forward(self, x):
            return super().forward(x).exp().exp().exp()

    with pytest.raises(Diverged, match="although data and parameters are finite"):
        fit(Huge(6, 3), batches(), method="map", epochs=1)


def test_the_last_good_checkpoint_stays_and_is_named(tmp_path):
    class Poison:
        """Three clean epochs, then a NaN."""

        data_size = 96

        def __len__(self):
            return 6

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            for x, y in batches():
                yield (x * float("nan") if self.epoch == 3 else x), y

    with pytest.raises(Diverged, match=r"epoch 4, step 19.*the state after epoch 3 is in"):
        fit(network(), Poison(), method="map", epochs=6, folder=tmp_path)
    state = load_state(max(tmp_path.glob("checkpoint-*")))
    assert state["epoch"] == 3
    assert all(torch.isfinite(v).all() for v in state["model"].values())


def test_too_large_a_learning_rate_is_caught():
    with pytest.raises(Diverged, match="smaller lr"):
        fit(nn.Linear(6, 1), [(x, y.float().unsqueeze(1)) for x, y in batches()], method="map", epochs=50, lr=1e6,
            likelihood="regression")  # fmt: skip


def test_a_validation_loss_that_is_not_finite_is_named():
    valid = batches(seed=2)
    valid[1][0][0, 0] = float("nan")
    with pytest.raises(Diverged, match=r"epoch 1.*the validation loss is nan because the batch itself has values"):
        fit(network(), batches(), valid, method="map", epochs=2)


def dying() -> nn.Module:
    """All hidden units are off for every input: the outputs are the last bias, and so is all that learns."""
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    with torch.no_grad():
        model[0].bias.fill_(-1e3)
    return model


@pytest.mark.parametrize("method", ["map", "spam"])
def test_a_network_whose_units_have_died_is_noticed(tmp_path, method):
    with pytest.warns(UserWarning, match="after 3 epochs the network gives every sample the same outputs"):
        history = fit(dying(), batches(), method=method, epochs=3, folder=tmp_path)
    assert history.dead
    assert history.column("dead") == [True] * 3
    assert "dead" in (tmp_path / "history.csv").read_text().splitlines()[0]


def test_a_network_that_learns_is_not_called_dead(recwarn):
    for model in (network(), nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 3)).double()):
        data = [(x.to(next(model.parameters()).dtype), y) for x, y in batches()]
        history = fit(model, data, method="map", epochs=1)
        assert not history.dead
        assert "dead" not in history[0]
    assert not [w for w in recwarn if "died" in str(w.message)]
