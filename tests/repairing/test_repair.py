"""``repair`` on small networks: what it must reach, what it must leave alone, and what it says when it cannot."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shaver
from shaver.repairing import recalibrate, repair
from shaver.repairing.calibration import calibration_list


def seeded(build):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().double().eval()


def data(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def cnn():
    return nn.Sequential(
        *(nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=2, stride=2)),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)),
    )


def halved(dense, share=0.5):
    pruned = copy.deepcopy(dense)
    shaver.prune(pruned, shaver.score(pruned, "magnitude"), share)
    return pruned


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(model, kept):
    return all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


def loss(model, dense, x):
    with torch.no_grad():
        return float((model(x) - dense(x)).square().mean())


def test_each_layer_is_the_least_squares_fit_to_the_dense_outputs():
    dense = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    pruned, x = halved(dense), data(300, 6)
    masks = [layer.weight != 0 for layer in pruned if isinstance(layer, nn.Linear)]
    repair(pruned, x.split(100), reference=dense, damping=1e-12)
    inputs, targets, place = x, x, 0
    for layer, twin in zip(pruned, dense, strict=True):
        if isinstance(layer, nn.Linear):
            with torch.no_grad():
                targets = twin(targets)
            for row in range(layer.out_features):
                kept = masks[place][row]
                columns = torch.cat([inputs[:, kept], torch.ones(300, 1, dtype=torch.float64)], 1)
                best = torch.linalg.lstsq(columns, targets[:, row : row + 1], driver="gelsd").solution[:, 0]
                found = torch.cat([layer.weight[row, kept], layer.bias[row : row + 1]]).detach()
                torch.testing.assert_close(columns @ found, columns @ best, rtol=1e-5, atol=1e-7)
            place += 1
            with torch.no_grad():
                inputs = layer(inputs)
        else:
            inputs, targets = layer(inputs), layer(targets)


@pytest.mark.parametrize(("build", "shape"), [(mlp, (256, 6)), (cnn, (128, 2, 8, 8))])
def test_the_outputs_come_nearer_and_zeros_stay_zeros(build, shape):
    dense = seeded(build)
    if build is cnn:
        recalibrate(dense, [data(*shape, seed=5)])
    pruned = halved(dense)
    masks = {name: value != 0 for name, value in pruned.named_parameters() if value.ndim > 1}
    before = loss(pruned, dense, data(*shape, seed=3))
    report = repair(pruned, data(*shape).split(64), reference=dense)
    assert loss(pruned, dense, data(*shape, seed=3)) < 0.9 * before
    assert all(layer.after <= layer.before + 1e-9 for layer in report.layers)
    assert all((dict(pruned.named_parameters())[name][~mask] == 0).all() for name, mask in masks.items())
    assert "error before" in str(report)


def test_the_batches_may_be_cut_anyhow():
    dense, x = seeded(cnn), data(96, 2, 8, 8)
    results = []
    for size in (96, 32, 7):
        pruned = halved(dense)
        repair(pruned, x.split(size), reference=dense)
        results.append(state(pruned))
    for other in results[1:]:
        for name, value in results[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-6, atol=1e-8)


def test_removing_nothing_changes_nothing():
    dense = seeded(cnn)
    model = copy.deepcopy(dense)
    report = repair(model, [data(16, 2, 8, 8)], reference=dense)
    assert same(model, state(dense))
    assert report.layers == ()


def test_layers_before_the_first_removed_weight_stay_as_they_are():
    dense = seeded(mlp)
    model = copy.deepcopy(dense)
    with torch.no_grad():
        model[2].weight[0, 0] = 0
    repair(model, [data(64, 6)], reference=dense)
    assert torch.equal(model[0].weight, dense[0].weight)
    assert torch.equal(model[0].bias, dense[0].bias)


def test_a_duplicate_input_can_go_at_no_cost():
    dense = seeded(lambda: nn.Linear(4, 3))
    x = data(50, 3)[:, [0, 1, 2, 0]]
    pruned = copy.deepcopy(dense)
    with torch.no_grad():
        pruned.weight[:, 3] = 0
    repair(pruned, [x], reference=dense, damping=1e-10)
    assert loss(pruned, dense, x) < 1e-16


def test_the_error_of_the_layers_before_is_made_up_for():
    dense = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)))
    pruned = copy.deepcopy(dense)
    with torch.no_grad():
        pruned[0].weight[:, 0] = 0
    x = data(200, 3)
    x = torch.cat([x.sum(1, keepdim=True), x], 1)  # the removed input is a sum of the others
    with torch.no_grad():
        pruned[0].bias += 1  # an error that only the second layer's bias can take away when the first is left alone
    frozen = {name: value != 0 for name, value in pruned.named_parameters() if name == "0.weight"}
    repair(pruned, [x], reference=dense, masks=frozen, damping=1e-10)
    assert loss(pruned, dense, x) < 1e-16


def test_zeros_of_torch_s_own_pruning_are_found():
    dense = seeded(mlp)
    pruned = copy.deepcopy(dense)
    nn.utils.prune.l1_unstructured(pruned[0], "weight", 0.5)
    before = loss(pruned, dense, data(200, 6))
    repair(pruned, [data(200, 6)], reference=dense)
    assert loss(pruned, dense, data(200, 6)) < before
    assert int((pruned[0].weight == 0).sum()) == 24


class Attention(nn.Module):
    """Packed attention beside one with separate matrices."""

    def __init__(self):
        super().__init__()
        self.first = nn.MultiheadAttention(8, 2, batch_first=True)
        self.second = nn.MultiheadAttention(8, 2, kdim=8, vdim=4, batch_first=True)

    def forward(self, x):
        x = x + self.first(x, x, x, need_weights=False)[0]
        return self.second(x, x, value=x[..., :4])[0]


def test_attention_is_repaired_in_all_its_parts():
    dense, x = seeded(Attention), data(32, 5, 8)
    pruned = halved(dense, 0.3)
    before = loss(pruned, dense, data(32, 5, 8, seed=4))
    report = repair(pruned, x.split(16), reference=dense)
    assert [layer.name for layer in report.layers] == [
        *(f"first.in_proj_weight[{part}]" for part in ("query", "key", "value")),
        "first.out_proj.weight",
        *(f"second.{part}_proj_weight" for part in "qkv"),
        "second.out_proj.weight",
    ]
    assert not report.unrepaired
    assert loss(pruned, dense, data(32, 5, 8, seed=4)) < before


class Tied(nn.Module):
    """One matrix in two places, and a module that is called twice."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.twice = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.twice(self.twice(self.two(self.one(x).relu()).relu()).relu())


def test_tied_weights_stay_tied_and_are_fitted_to_all_their_uses():
    dense, x = seeded(Tied), data(400, 6)
    pruned = halved(dense, 0.3)
    before = loss(pruned, dense, x)
    report = repair(pruned, [x], reference=dense)
    assert pruned.one.weight is pruned.two.weight
    assert [layer.name for layer in report.layers] == ["one.weight", "twice.weight"]
    assert loss(pruned, dense, x) < before


def test_what_cannot_be_repaired_is_named():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 2)
            self.idle = nn.Linear(3, 3)

        def forward(self, x):
            return self.out(self.cell(x)[0])

    dense = seeded(Recurrent)
    report = repair(halved(dense), [data(30, 6, 4)], reference=dense)
    assert [layer.name for layer in report.layers] == ["out.weight"]
    assert report.unrepaired["cell.weight_hh_l0"] == "there is no rule for GRU"
    assert "does not use" in report.unrepaired["idle.weight"]
    assert "not repaired: cell.weight_ih_l0" in str(report)


def test_the_prior_of_a_posterior_is_the_damping():
    dense, x = seeded(lambda: nn.Linear(5, 3)), data(80, 5)
    curvature = shaver.curvature.estimate(dense, [(x, torch.zeros(80).long())], structure="diag", source="ggn")
    stiff = shaver.Posterior(curvature, 1e9, dense)
    free = shaver.Posterior(curvature, 1e-9, dense)
    results = []
    for posterior in (stiff, free, None):
        pruned = halved(dense)
        repair(pruned, [x], reference=dense, posterior=posterior, damping=None if posterior else 1e-12)
        results.append(pruned.weight.detach())
    kept = results[0] != 0
    assert (results[0] - dense.weight)[kept].abs().max() < (results[1] - dense.weight)[kept].abs().max()
    torch.testing.assert_close(results[1], results[2], rtol=1e-4, atol=1e-6)


def test_a_damping_that_is_passed_wins_over_the_posterior():
    dense, x = seeded(lambda: nn.Linear(5, 3)), data(80, 5)
    curvature = shaver.curvature.estimate(dense, [(x, torch.zeros(80).long())], structure="diag", source="ggn")
    stiff = shaver.Posterior(curvature, 1e9, dense)
    results = []
    for given in ({"damping": 0.5}, {"damping": 0.5, "posterior": stiff}, {"posterior": stiff}):
        pruned = halved(dense)
        repair(pruned, [x], reference=dense, **given)
        results.append(pruned.weight.detach())
    torch.testing.assert_close(results[0], results[1])
    assert (results[0] - results[2]).abs().max() > 1e-3


def test_norm_statistics_are_those_of_the_batches():
    dense = seeded(cnn)
    x = data(60, 2, 8, 8)
    names = recalibrate(dense, x.split(20))
    inputs = dense[0](x).detach()
    assert names == ("1",)
    torch.testing.assert_close(dense[1].running_mean, inputs.mean((0, 2, 3)))
    batches = torch.stack([part.var((0, 2, 3)) for part in inputs.split(20)])
    torch.testing.assert_close(dense[1].running_var, batches.mean(0))
    assert dense[1].momentum == 0.1
    assert not dense[1].training
    assert recalibrate(seeded(mlp), []) == ()


def test_the_norm_is_measured_behind_the_repaired_layer():
    dense = seeded(cnn)
    x = data(60, 2, 8, 8)
    recalibrate(dense, [x])
    pruned = halved(dense)
    repair(pruned, x.split(20), reference=dense)
    inputs = pruned[0](x).detach()
    torch.testing.assert_close(pruned[1].running_mean, inputs.mean((0, 2, 3)))
    torch.testing.assert_close(pruned[1].running_var, inputs.var((0, 2, 3)))


@pytest.mark.parametrize("layout", ["tensor", "single", "pair", "dict", "own"])
def test_batches_need_no_labels(layout):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x)

    dense, x = seeded(Named), data(40, 4)
    batch = {"tensor": x, "single": (x,), "pair": [x, None], "dict": {"x": x, "labels": 3}, "own": {"odd": x}}[layout]
    forward = (lambda model, batch: model(batch["odd"])) if layout == "own" else None
    report = repair(halved(dense), iter([batch]), reference=dense, forward=forward)
    assert len(report.layers) == 1


def test_fewer_samples_than_inputs_constant_inputs_and_dead_units():
    dense = seeded(mlp)
    with torch.no_grad():
        dense[0].bias[:3] = -100  # never active
    pruned = halved(dense)
    x = data(3, 6)
    x[:, 2] = 1.5
    repair(pruned, [x], reference=dense)
    assert all(value.isfinite().all() for value in pruned.state_dict().values())
    assert loss(pruned, dense, x) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    dense = seeded(mlp)
    pruned = halved(dense, 0.3)
    x = data(200, 6)
    before = loss(pruned, dense, x)
    pruned, half = pruned.to(dtype), copy.deepcopy(dense).to(dtype)
    repair(pruned, [x.to(dtype)], reference=half)
    assert pruned[0].weight.dtype == dtype
    assert loss(pruned.double(), dense, x) < before


def test_modes_hooks_gradients_and_random_state_are_left_as_found():
    dense = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    dense.train()
    pruned = halved(dense)
    pruned[2].eval()
    random = torch.random.get_rng_state()
    results = []
    for _ in range(2):
        model = copy.deepcopy(pruned)
        repair(model, [data(64, 6)], reference=dense)
        results.append(state(model))
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())  # no dropout
    assert torch.equal(torch.random.get_rng_state(), random)
    assert [module.training for module in model] == [True, True, False, True]
    assert dense.training
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in [*model.modules(), *dense.modules()]
    )
    assert torch.backends.mha.get_fastpath_enabled()


def test_an_interrupted_repair_leaves_the_network_as_it_was():
    import threading

    dense = seeded(cnn)
    pruned = halved(dense)
    kept = state(pruned)

    def interrupt(done, total):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repair(pruned, data(32, 2, 8, 8).split(8), reference=dense, progress=interrupt)
    assert same(pruned, kept)
    assert threading.active_count() == 1 or not any("Lane" in type(t).__name__ for t in threading.enumerate())
    assert not any(module._forward_hooks for module in [*pruned.modules(), *dense.modules()])


def test_a_loader_is_read_up_to_a_limit_and_a_list_is_taken_whole():
    def endless(size):
        while True:
            yield torch.zeros(size, 2)

    assert sum(map(len, calibration_list(endless(100)))) == 4100
    assert len(calibration_list(endless(1))) == 512
    assert len(calibration_list("abc" for _ in range(600))) == 512, "batches of an unknown kind are counted too"
    assert len(calibration_list([torch.zeros(100, 2)] * 60)) == 60


def test_an_error_in_the_network_comes_out_and_changes_nothing():
    dense = seeded(mlp)
    pruned = halved(dense)
    kept = state(pruned)
    with pytest.raises(RuntimeError, match="shapes"):
        repair(pruned, [data(8, 6), data(8, 5)], reference=dense)
    assert same(pruned, kept)
    broken = data(8, 6)
    broken[3, 2] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinity in calibration batch 1"):
        repair(pruned, [data(8, 6), broken], reference=dense)
    with pytest.raises(ValueError, match="empty"):
        repair(pruned, iter([]), reference=dense)
    with pytest.raises(TypeError, match=r"pass \[batch\]"):
        repair(pruned, data(8, 6), reference=dense)
    with pytest.raises(ValueError, match="another network"):
        repair(pruned, [data(8, 6)], reference=seeded(lambda: nn.Sequential(nn.Linear(6, 9))))
    with pytest.raises(ValueError, match="above 0"):
        repair(pruned, [data(8, 6)], reference=dense, damping=0.0)
    assert same(pruned, kept)


def test_a_way_that_changes_with_the_batch_is_refused():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.one(x) if float(x.sum()) > 0 else self.two(x)

    dense = seeded(Fork)
    with pytest.raises(ValueError, match="must run the same layers in the same order"):
        repair(halved(dense), [torch.ones(5, 4).double(), -torch.ones(5, 4).double()], reference=dense)


def test_recalibration_that_fails_leaves_the_statistics():
    dense = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    kept = state(dense)
    with pytest.raises(ValueError, match="no calibration batches"):
        recalibrate(dense, [])
    bad = data(9, 4)
    bad[0, 0] = float("inf")
    with pytest.raises(ValueError, match="hold NaN or infinity"):
        recalibrate(dense, [bad])
    assert same(dense, kept)
    assert dense[1].momentum == 0.1


def test_relu_network_keeps_its_function_when_only_dead_inputs_go():
    dense = seeded(mlp)
    with torch.no_grad():
        dense[0].bias[:4] = -100
    pruned = copy.deepcopy(dense)
    with torch.no_grad():
        pruned[2].weight[:, :4] = 0
    x = data(100, 6)
    repair(pruned, [x], reference=dense)
    torch.testing.assert_close(F.relu(pruned(x)), F.relu(dense(x)), rtol=1e-5, atol=1e-7)
