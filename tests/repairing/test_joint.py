"""``joint_fit``: all layers together, nearer to the dense network's outputs, and nothing else is touched."""

import copy

import pytest
import torch
from torch import nn

import shaver
from shaver.measure.evaluating import evaluating
from shaver.repairing import joint, joint_fit, repair
from shaver.repairing.joint import OutputError


def seeded(build):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().eval()


def data(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mlp():
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))


def pruned_mlp(share=0.8):
    dense = seeded(mlp)
    pruned = copy.deepcopy(dense)
    masks = shaver.prune(pruned, shaver.score(pruned, "magnitude"), share).masks
    return dense, pruned, masks


def error(model, dense, x):
    with torch.no_grad():
        return float((model(x) - dense(x)).square().mean() / dense(x).var())


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_linear_network_reaches_the_least_squares_optimum():
    dense, x = seeded(lambda: nn.Linear(8, 2)).double(), data(256, 8).double() @ data(8, 8, seed=2).double()
    pruned = copy.deepcopy(dense)
    mask = torch.tensor([1, 1, 1, 0, 0, 1, 0, 1], dtype=torch.bool).expand(2, 8)
    pruned.weight.data *= mask
    columns = torch.cat([x[:, mask[0]], torch.ones(256, 1, dtype=torch.float64)], 1)
    target = dense(x).detach()
    least = float((columns @ torch.linalg.lstsq(columns, target).solution - target).square().mean())
    joint_fit(pruned, x.split(64), reference=dense, passes=400, masks={"weight": mask})
    reached = float((pruned(x) - target).detach().square().mean())
    assert least <= reached < 1.02 * least
    assert bool((pruned.weight[~mask] == 0).all())


@pytest.mark.parametrize("room", [2**30, 0])
def test_the_error_is_that_of_all_outputs_whether_or_not_the_dense_ones_are_kept(room, monkeypatch):
    monkeypatch.setattr(joint, "KEPT", room)
    dense, pruned, _ = pruned_mlp()
    x = data(150, 6) + 3
    with evaluating(dense), evaluating(pruned):
        found = OutputError(dense, x.split(50), None)
        by_batch = [float(found.of(pruned, place)) for place in range(3)]
        aim = dense(x).double()
        expected = float((pruned(x).double() - aim).square().mean() / aim.var(correction=0))
        assert found.mean(pruned) == pytest.approx(expected, rel=1e-5)
        assert found.mean(pruned, [1]) == by_batch[1]
    assert sum(by_batch) / 3 == pytest.approx(expected, rel=1e-5)
    fitted = copy.deepcopy(pruned)
    before, after = joint_fit(fitted, x.split(50), reference=dense, passes=3)
    assert before == pytest.approx(expected, rel=1e-5)
    assert after < before


def test_it_comes_nearer_than_layer_by_layer_also_on_other_data():
    dense, pruned, masks = pruned_mlp()
    x, other = data(1024, 6), data(1024, 6, seed=3)
    repaired = copy.deepcopy(pruned)
    repair(repaired, x.split(64), reference=dense, masks=masks)
    report = repair(pruned, x.split(64), reference=dense, masks=masks, passes=20)
    assert error(pruned, dense, other) < 0.8 * error(repaired, dense, other)
    assert report.joint is not None
    assert report.joint[1] < report.joint[0]
    assert f"{report.joint[1]:.4f}" in str(report)
    assert all(bool((p[~masks[n]] == 0).all()) for n, p in pruned.named_parameters() if n in masks)


@pytest.mark.parametrize("way", ["prune", "compact"])
def test_prune_and_compact_take_passes(way):
    dense, x, other = seeded(mlp), data(1024, 6).split(64), data(1024, 6, seed=3)
    found = {}
    for passes in (0, 20):
        model = copy.deepcopy(dense)
        if way == "prune":
            shaver.prune(model, shaver.score(model, "magnitude"), 0.8, calibration=x, passes=passes)
        else:
            model = shaver.compact(model, x[0][:2], sparsity=0.6, calibration=x, passes=passes)
        found[passes] = error(model, dense, other)
    assert found[20] < 0.8 * found[0]


def test_a_fit_that_does_not_carry_over_is_not_taken():
    dense, pruned, masks = pruned_mlp()
    before = state(pruned)
    errors = joint_fit(pruned, data(1024, 6).split(64), reference=dense, passes=2, masks=masks, rate=100.0)
    assert errors[0] == errors[1]
    assert all(torch.equal(value, before[name]) for name, value in pruned.state_dict().items())


class Words(nn.Module):
    """An embedding, a norm and a frozen layer; returns a dict."""

    def __init__(self):
        super().__init__()
        self.embedding, self.first = nn.Embedding(20, 8), nn.Linear(8, 16)
        self.norm, self.last = nn.BatchNorm1d(16), nn.Linear(16, 2)
        self.drop = nn.Dropout(0.5)
        self.first.requires_grad_(False)

    def forward(self, ids, labels=None):
        hidden = self.norm(self.first(self.embedding(ids).mean(1)))
        return {"logits": self.last(self.drop(hidden).relu()), "ids": ids}


def test_embeddings_statistics_flags_modes_gradients_and_random_state_are_left_as_found():
    dense = seeded(Words)
    model = copy.deepcopy(dense).train()
    model.norm.eval()
    with torch.no_grad():
        model.first.weight *= model.first.weight.abs() > 0.15
    masks = {"first.weight": model.first.weight != 0}
    model.last.weight.grad = torch.ones_like(model.last.weight)
    ids = torch.randint(20, (512, 5), generator=torch.Generator().manual_seed(2))
    batches = [{"ids": part, "labels": part[:, 0]} for part in ids.split(64)]
    before, random = state(model), torch.get_rng_state()
    errors = joint_fit(model, batches, reference=dense, passes=10, masks=masks)
    assert errors[1] < errors[0]
    assert torch.equal(torch.get_rng_state(), random)
    untouched = ["embedding.weight", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in untouched)
    assert not torch.equal(model.first.weight, before["first.weight"])
    assert (model.training, model.norm.training, model.first.weight.requires_grad) == (True, False, False)
    assert bool((model.last.weight.grad == 1).all())
    assert model.first.weight.grad is None
    assert all(parameter.grad is None for parameter in dense.parameters())


def test_an_interrupted_fit_leaves_the_network_as_it_was():
    dense, pruned, masks = pruned_mlp()
    before = state(pruned)

    def stop(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        joint_fit(pruned, data(512, 6).split(64), reference=dense, passes=5, masks=masks, progress=stop)
    assert all(torch.equal(value, before[name]) for name, value in pruned.state_dict().items())


def test_progress_counts_layers_and_passes():
    dense, pruned, masks = pruned_mlp()
    seen = []
    repair(pruned, [data(64, 6)], reference=dense, masks=masks, passes=4, progress=lambda *now: seen.append(now))
    assert seen == [(number, 7) for number in range(1, 8)]


def test_progress_of_rounds_and_of_a_compaction():
    dense, x, seen = seeded(mlp), [data(64, 6)], []
    scores = shaver.score(dense, "magnitude")
    arguments = {"calibration": x, "passes": 2, "progress": lambda *now: seen.append(now)}
    shaver.prune(
        copy.deepcopy(dense), scores, 0.65, **arguments
    )  # three rounds and the given ranking of three layers, two passes
    assert seen == [(number, 14) for number in range(1, 15)]
    seen.clear()
    shaver.compact(dense, x[0][:2], sparsity=0.5, **arguments)
    assert seen == [(1, 3), (2, 3), (3, 3), (1, 2), (2, 2)]


def test_errors_say_what_would_work():
    dense, pruned, masks = pruned_mlp()
    x = [data(64, 6)]
    with pytest.raises(ValueError, match=r"passes must be an integer of at least 0, not -1"):
        repair(pruned, x, reference=dense, masks=masks, passes=-1)
    with pytest.raises(ValueError, match=r"give calibration="):
        shaver.prune(pruned, shaver.score(pruned, "magnitude"), 0.9, passes=3)
    with pytest.raises(ValueError, match=r"give calibration="):
        shaver.compact(pruned, x[0][:2], criterion="magnitude", sparsity=0.5, passes=3)
    with pytest.raises(ValueError, match=r"\(64, 3\).*\(64, 5\).*different networks"):
        joint_fit(pruned, x, reference=seeded(lambda: nn.Linear(6, 5)), passes=1)
    with pytest.raises(ValueError, match=r"model\.float\(\)"):
        joint_fit(pruned.bfloat16(), [x[0].bfloat16()], reference=copy.deepcopy(dense).bfloat16(), passes=1)
    with pytest.raises(ValueError, match="no floating-point tensor"):
        joint_fit(nn.Flatten(), [torch.ones(2, 3, dtype=torch.long)], reference=nn.Flatten(), passes=1)
