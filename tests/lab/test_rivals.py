"""The rivals' formulas hold, and their recipes end with plain networks that have exact zeros."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from shaver.data import InMemory
from shaver.io import load_state
from shaver.lab import get_recipe, run_study
from shaver.lab.recipes.grid import cells_of
from shaver.lab.recipes.recipe import SCHEDULES, Recipe, Stage, Task
from shaver.lab.run.results import read_rows
from shaver.lab.run.rivals import RIVALS, HardConcrete, VariationalDropout, train_rival
from tests.lab.conftest import InProcess

CANCER = {"name": "fcn", "inputs": 30, "hidden": [8], "classes": 2}
TINY = Task(
    "tiny", "Tiny FCN", "cpu", "tiny", CANCER, "cancer", epochs=3, batch_size=64, source="mc",
    online={"biases": True, "end": 0.7},
)  # fmt: skip


def divergence(log_alpha: float) -> float:
    """−½ log α + E log|1 + √α z| by quadrature: the divergence from the log-uniform prior up to a constant."""
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    inner = (1 + math.exp(0.5 * log_alpha) * z).abs().clamp_min(1e-12).log()
    return -0.5 * log_alpha + float(torch.trapezoid(density * inner, z))


@pytest.mark.parametrize("log_alpha", [-6.0, -2.0, 0.0, 2.0, 6.0])
def test_the_divergence_of_variational_dropout_is_that_of_a_log_uniform_prior(log_alpha):
    def penalty(log_alpha: float) -> float:
        layer = nn.Linear(1, 1).double()
        layer.weight.data.fill_(1.0)
        gated = VariationalDropout(layer)
        gated.log_variance.data.fill_(log_alpha)
        return float(gated.penalty().detach())

    assert penalty(log_alpha) - penalty(7.9) == pytest.approx(divergence(log_alpha) - divergence(7.9), abs=0.02)


def test_the_penalty_of_l0_is_the_expected_number_of_open_gates():
    gated = HardConcrete(nn.Linear(200, 200, bias=False))
    nn.init.ones_(gated.layer.weight)
    for value in (-2.0, 0.0, 2.0):
        gated.log_alpha.data.fill_(value)
        torch.manual_seed(0)
        drawn = gated(torch.eye(200))  # the gates themselves
        assert float((drawn > 0).double().mean()) == pytest.approx(float(gated.penalty().detach()) / 200**2, abs=0.02)


@pytest.mark.parametrize("method", RIVALS)
def test_a_rival_leaves_a_plain_network_with_exact_zeros(method):
    torch.manual_seed(0)
    x = torch.randn(256, 20)
    y = (x[:, 0] > 0).long()  # one input decides
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 2))
    batches = InMemory(x, y, classes=2).batches(32, shuffle=True)
    train_rival(method, model, batches, epochs=60, lr=3e-3, strength=2.0)
    assert [type(layer) for layer in model] == [nn.Linear, nn.ReLU, nn.Linear]
    assert float((model(x).argmax(1) == y).double().mean()) > 0.9
    zeros = [float((layer.weight == 0).double().mean()) for layer in (model[0], model[2])]
    assert zeros[0] > 0.3  # most of what reads the other inputs
    assert bool((model[0].weight[:, 0] != 0).any())


def test_a_study_runs_rivals_beside_ours(tmp_path):
    stage = Stage("online", ("opd", "magnitude"), (0.5, 0.8))
    recipe = Recipe("tiny", "A tiny study", "nothing", "cpu", (TINY,), ("spam", "map", "vd"), seeds=1, stages=(stage,))
    assert [cell.training.labels["method"] for cell in cells_of(recipe)] == ["spam", "spam", "map", "map", "vd"]
    outcome = run_study(recipe, tmp_path / "run", engine=InProcess())
    assert (outcome.failed, outcome.rows) == ({}, 5)


def test_magnitude_pruning_has_the_prior_that_spam_starts_from(tmp_path):
    sizes = []
    for precision in (1.0, 300.0):
        task = replace(TINY, spam={"initial_precision": precision})
        recipe = Recipe("tiny", "A tiny study", "nothing", "cpu", (task,), ("map",), seeds=1,
                        stages=(Stage("online", ("magnitude",), (0.5,)),))  # fmt: skip
        run = tmp_path / str(precision)
        assert run_study(recipe, run, engine=InProcess()).failed == {}
        weights = load_state(run / "cells" / cells_of(recipe)[0].key / "model.safetensors")["weights"]
        sizes.append(sum(float(weight.square().sum()) for weight in weights.values()))
    assert sizes[1] < 0.8 * sizes[0]


def test_the_learning_rate_of_the_record_starts_anew_when_the_masks_are_final():
    (task,) = get_recipe("record-lenet").tasks
    factor, end = SCHEDULES[task.schedule], task.online["end"]
    assert [factor(share) for share in (0.0, end / 2, end, (1 + end) / 2, 1.0)] == pytest.approx([1, 0.5, 1, 0.5, 0])
    assert factor(end - 1e-6) == pytest.approx(0, abs=1e-9)


def test_a_late_cosine_begins_when_the_masks_of_the_record_are_final(tmp_path):
    (task,) = get_recipe("record-caffe").tasks
    assert task.online["end"] == pytest.approx(1 / 3)
    short = replace(TINY, schedule=task.schedule, online=task.online, lr=0.1)
    recipe = Recipe("tiny", "A tiny study", "nothing", "cpu", (short,), ("spam", "map"), seeds=1,
                    stages=(Stage("online", ("opd", "magnitude"), (0.5,)),))  # fmt: skip
    assert run_study(recipe, tmp_path / "run", engine=InProcess()).failed == {}
    for cell in cells_of(recipe):
        first, second, last = read_rows(tmp_path / "run" / "cells" / cell.key / "history.csv")
        assert float(first["lr"]) == pytest.approx(0.1)
        assert float(first["sparsity"]) == pytest.approx(0.5, abs=0.01), "of three epochs the first prunes"
        assert 0.09 > float(second["lr"]) > 0.01 > float(last["lr"])


def test_rivals_have_one_stage():
    with pytest.raises(ValueError, match="prune while they train; use stage 'online'"):
        Recipe("tiny", "A tiny study", "nothing", "cpu", (TINY,), ("vd",))
