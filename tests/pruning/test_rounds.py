"""Pruning with calibration data: in rounds, repaired after each."""

import copy
import itertools

import pytest
import torch
from torch import nn

import shaver
from shaver.criteria.scoring import Scores
from shaver.pruning import rounds
from shaver.pruning.rounds import levels, rescored


@pytest.fixture
def dense():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)).double()


def batches(count=4, seed=1):
    mix = torch.randn(3, 6, generator=torch.Generator().manual_seed(9), dtype=torch.float64)  # correlated inputs
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(64, 3, generator=generator, dtype=torch.float64) @ mix for _ in range(count)]


def loss(model, dense):
    x = torch.cat(batches(seed=2))
    with torch.no_grad():
        return float((model(x) - dense(x)).square().mean())


def pruned(dense, *args, **options):
    model = copy.deepcopy(dense)
    report = shaver.prune(model, shaver.score(model, "magnitude"), *args, **options)
    kept = report.masks.parameters(model)
    assert all((parameter[~report.masks[name]] == 0).all() for name, parameter in kept.items())
    return model, report


def test_levels_keep_the_same_share_each_time():
    assert levels(0.0) == [0.0]
    found = levels(0.9)
    kept = [1 - level for level in [0.0, *found]]
    ratios = [b / a for a, b in itertools.pairwise(kept)]
    assert found[-1] == 0.9
    assert all(ratio == pytest.approx(ratios[0]) and ratio >= 0.7 for ratio in ratios)


@pytest.mark.parametrize("options", [{}, {"scope": "layer"}, {"cap": 0.8, "minimum": 4}])
def test_calibration_brings_the_outputs_nearer_at_the_same_sparsity(dense, options):
    plain, before = pruned(dense, 0.7, **options)
    repaired, after = pruned(dense, 0.7, calibration=batches(), **options)
    assert after.achieved == before.achieved
    assert loss(repaired, dense) < 0.5 * loss(plain, dense)
    assert "repaired the weights of 3 layers" in str(after)
    assert before.repaired is None


def test_weights_that_training_shrank_to_nothing_do_not_come_back(dense):
    """As after SpaM: tiny weights with an enormous precision. Rounding alone moves them by orders of magnitude."""
    scores = {}
    for name, parameter in dense.named_parameters():
        if parameter.ndim > 1:
            is_tiny = torch.arange(parameter.numel()).reshape(parameter.shape) % 4 != 0
            with torch.no_grad():
                parameter[is_tiny] *= 1e-30
            precision = torch.ones_like(parameter).masked_fill_(is_tiny, 1e50)
            scores[name] = precision * parameter.detach().square()
    model = copy.deepcopy(dense)
    found = shaver.prune(model, Scores(scores, degree=2), 0.7, calibration=batches())
    for name, mask in found.masks.items():
        large = dense.get_parameter(name).abs() > 1e-6
        assert bool(mask[large].all()), name
    assert loss(model, dense) < 1e-12


def test_the_given_ranking_is_taken_where_its_outputs_are_nearer(dense, monkeypatch):
    """Rounds that remove the largest weights from the second on must lose to one cut by the given scores."""

    def reversed_scores(scores, before, after):
        changed = any(bool((a != b).any()) for a, b in zip(before.parameters(), after.parameters(), strict=True))
        return {name: -values if changed else values for name, values in scores.items()}

    monkeypatch.setattr("shaver.pruning.rounds.rescored", reversed_scores)
    model = copy.deepcopy(dense)
    scores = shaver.score(model, "magnitude")
    found = shaver.prune(model, scores, 0.5, calibration=batches())
    plain, once = pruned(dense, 0.5)
    shaver.repair(plain, batches(), reference=dense, masks=once.masks)
    assert all(torch.equal(found.masks[name], mask) for name, mask in once.masks.items())
    assert loss(model, dense) == pytest.approx(loss(plain, dense), rel=1e-6)


def test_passes_follow_the_chosen_masks_without_another_repair(dense, monkeypatch):
    repairs, counts = [], []

    def counted(*args, **options):
        repairs.append(options["passes"])
        return repair(*args, **options)

    repair = rounds.repair
    monkeypatch.setattr(rounds, "repair", counted)
    model, report = pruned(
        dense, 0.7, calibration=batches(), passes=3, progress=lambda done, total: counts.append((done, total))
    )
    assert repairs == [0] * (len(levels(0.7)) + 1)
    assert report.repaired.joint[1] < report.repaired.joint[0]
    assert [done for done, _ in counts] == list(range(1, counts[-1][1] + 1))
    once, _ = pruned(dense, 0.7, calibration=batches())
    shaver.repairing.joint_fit(once, batches(), reference=dense, passes=3, masks=report.masks)
    assert loss(model, dense) == pytest.approx(loss(once, dense), rel=1e-6)


def test_passes_after_a_removal_of_nothing_change_nothing(dense):
    model, _ = pruned(dense, 0.0, calibration=batches(), passes=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), dense.parameters(), strict=True))


def test_the_last_round_removes_what_the_rounds_before_have_removed(dense):
    model = copy.deepcopy(dense)
    steps = rounds.Rounds(model, batches())
    scores = shaver.score(model, "magnitude")
    first = steps.step(scores, 0.4, shaver.pruning.Masks({}))
    second = steps.step(scores, 0.7, first)
    assert all(not (second[name] & ~first[name]).any() for name in first)


def test_patterns_are_repaired(dense):
    plain, _ = pruned(dense, scope="2:4")
    repaired, report = pruned(dense, scope="2:4", calibration=batches())
    assert report.requested == "2:4"
    assert loss(repaired, dense) < loss(plain, dense)


def test_automatic_sparsity_is_repaired(dense):
    data = [(x, x[:, :3].argmax(1)) for x in batches()]
    curvature = shaver.curvature.estimate(dense, data)
    posterior = shaver.Posterior(curvature, dict.fromkeys(curvature.blocks, 5.0), dense)
    results = []
    for calibration in (None, batches()):
        model = copy.deepcopy(dense)
        report = shaver.prune(model, None, "auto", posterior=posterior, calibration=calibration)
        results.append((loss(model, dense), report.achieved, report.loss_rise))
    assert results[0][1:] == results[1][1:]
    assert results[1][0] < results[0][0]


def test_more_can_go_within_the_same_drop(dense):
    def quality(model):
        return -loss(model, dense)

    _, plain = pruned(dense, valid=quality, max_drop=0.001)
    model, repaired = pruned(dense, valid=quality, max_drop=0.001, calibration=batches())
    assert repaired.achieved > plain.achieved
    assert repaired.quality_before == 0
    assert repaired.quality_after == quality(model) >= -0.001


def test_scores_move_with_the_weights(dense):
    moved = copy.deepcopy(dense)
    with torch.no_grad():
        moved[0].weight *= -3
        moved[0].weight[0, 0] = 0
    linear = rescored(shaver.score(dense, "magnitude"), dense, moved)
    torch.testing.assert_close(linear["0.weight"], moved[0].weight.detach().abs())
    quadratic = rescored(shaver.criteria.Scores({"0.weight": dense[0].weight.detach() ** 2}, 2), dense, moved)
    torch.testing.assert_close(quadratic["0.weight"], moved[0].weight.detach() ** 2)


def test_opd_says_that_it_is_quadratic(dense):
    curvature = shaver.curvature.estimate(dense, [(x, x[:, :3].argmax(1)) for x in batches()])
    posterior = shaver.Posterior(curvature, 1.0, dense)
    assert shaver.score(dense, "opd", posterior=posterior).degree == 2
    assert shaver.score(dense, "magnitude").degree == 1


@pytest.mark.parametrize("least", [150, 170, 190, 210])
def test_the_report_of_a_search_describes_the_chosen_network(dense, least):
    """A search may end with a round that loses too much and is undone."""

    def quality(model):
        return float(sum(int((p != 0).sum()) for p in model.parameters() if p.ndim > 1) > least)

    _, report = pruned(dense, valid=quality, max_drop=0.5, calibration=batches())
    assert 0 < report.achieved < 0.9
    for layer in report.repaired.layers:
        assert layer.kept == pytest.approx(float(report.masks[layer.name].double().mean()))


@pytest.mark.parametrize("options", [{"sparsity": 0.8}, {"scope": "2:4"}, {"max_drop": 0.1, "valid": lambda m: 0.0}])
def test_an_error_leaves_the_network_as_it_was(dense, options):
    kept = copy.deepcopy(dense.state_dict())
    broken = batches()
    broken[2][0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinity in calibration batch 2"):
        shaver.prune(dense, shaver.score(dense, "magnitude"), calibration=broken, **options)
    assert all(torch.equal(value, kept[name]) for name, value in dense.state_dict().items())
