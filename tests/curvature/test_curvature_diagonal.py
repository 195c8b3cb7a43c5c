"""The diagonal, exactly: every rule, source and composite network against the dense reference in float64."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tests.curvature.networks as net
from shaver import curvature
from tests.curvature.cases import BY_NAME, CASES, Case
from tests.curvature.reference import Problem, assert_all_same


def compute(case: Case, model: torch.nn.Module, batches: list, **options: object) -> curvature.Curvature:
    return curvature.estimate(model, batches, case.likelihood, **case.reading, **options)


@pytest.mark.parametrize("source", ["ggn", "ef"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_diagonal_is_exact(case: Case, source: str):
    model, batches = case.model(), case.batches()
    problem = case.problem(model, batches)
    result = compute(case, model, batches, structure="diag", source=source)
    assert_all_same(result.diagonal(), problem.diagonal(source))
    assert result.log_likelihood == pytest.approx(problem.log_likelihood(), rel=1e-10)
    assert result.data_size == 5
    assert (result.structure, result.source) == ("diag", source)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_sample_first_then_more_is_exact_too(case: Case):
    """One sample cannot tell where samples stand in a tensor; what is learned from it must not mislead later."""
    model, batches = case.model(), case.batches((1, 4))
    result = compute(case, model, batches, source="ef")
    assert_all_same(result.diagonal(), case.problem(model, batches).diagonal("ef"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_coverage_names_the_rule_of_every_parameter(case: Case):
    model = case.model()
    result = compute(case, model, case.batches(), source="ef")
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert list(result.rules) == trainable
    assert all(result.rules.values())
    assert {name for name, rule in result.rules.items() if "generic" in rule} == case.generic
    table = result.coverage().splitlines()
    assert [line.split()[0] for line in table[1:]] == trainable


@pytest.mark.parametrize("name", ["unused", "embedding-padding"])
def test_what_the_data_do_not_touch_has_zero_curvature(name: str):
    case = BY_NAME[name]
    diagonal = compute(case, case.model(), case.batches()).diagonal()
    if name == "unused":
        for parameter in ("spare.weight", "spare.bias", "discarded.weight", "extra"):
            assert not diagonal[parameter].any()
    else:
        assert not diagonal["0.weight"][0].any()
        assert diagonal["0.weight"].any()


@pytest.mark.parametrize("name", ["lenet", "transformer-block", "attention-batch-second", "sequence-first-square"])
@pytest.mark.parametrize("source", ["ggn", "ef"])
def test_how_the_data_are_batched_does_not_matter(name: str, source: str):
    case = BY_NAME[name]
    model, (x, y) = case.model(), case.batches((7,))[0]
    whole = compute(case, model, [(x, y)], source=source)
    parts = compute(case, model, iter([(x[:3], y[:3]), (x[3:4], y[3:4]), (x[4:], y[4:])]), source=source)
    assert_all_same(parts.diagonal(), whole.diagonal())
    assert parts.log_likelihood == pytest.approx(whole.log_likelihood, rel=1e-12)
    assert parts.data_size == whole.data_size == 7


@pytest.mark.parametrize("name", ["attention-batch-first", "conv-transpose", "lenet"])
def test_a_small_memory_budget_changes_nothing_but_the_chunks(name: str):
    case = BY_NAME[name]
    model, batches = case.model(), case.batches((6,))
    free = compute(case, model, batches, source="ggn")
    tight = compute(case, model, batches, source="ggn", memory_budget=100_000)
    assert_all_same(tight.diagonal(), free.diagonal())


def test_training_mode_and_evaluation_mode_give_the_same_numbers():
    case = BY_NAME["batchnorm-block"]
    trained, evaluated = case.model().train(), case.model().eval()
    one, two = (compute(case, model, case.batches()).diagonal() for model in (trained, evaluated))
    for name in one:
        assert torch.equal(one[name], two[name])


ROUTES = {
    "all to one layer, then some": ([1, 1, 1], [1, -1, 1, -1, -1, 1]),
    "some to each": ([1, -1, 1], [-1, 1, 1, 1, -1, 1]),
    "positions of all samples, then of one": ([[1, 1]] * 3, [[1, 1], [-1, -1]]),
    "as many rows as samples, then all": ([[1, 1], [-1, -1], [1, -1]], [[1, 1], [1, 1]]),
}


@pytest.mark.parametrize("source", ["ggn", "ef"])
@pytest.mark.parametrize("routes", ROUTES.values(), ids=ROUTES)
def test_samples_routed_to_different_layers(routes: tuple[list, list], source: str):
    """Which rows a layer sees depends on the data, and the first batch may mislead about the second."""
    torch.manual_seed(0)
    model, batches = net.Experts().double(), []
    for signs in map(torch.tensor, routes):
        x = torch.randn(*signs.shape, 4, dtype=torch.float64)
        x[..., 0] = x[..., 0].abs() * signs
        batches.append((x, torch.arange(len(x)) % 3))
    result = curvature.estimate(model, batches, source=source).diagonal()
    assert_all_same(result, Problem(model, batches).diagonal(source))


def test_checkpointed_activations_change_nothing():
    case = BY_NAME["mlp"]
    body, batches = case.model(), case.batches()

    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.body, x, use_reentrant=False)

    plain = curvature.estimate(body, batches)
    saved = curvature.estimate(Checkpointed(), batches)
    diagonal = {name.removeprefix("body."): values for name, values in saved.diagonal().items()}
    assert_all_same(diagonal, plain.diagonal())
    assert {name.removeprefix("body."): rule for name, rule in saved.rules.items()} == plain.rules


@pytest.mark.parametrize("source", ["ggn", "ef"])
def test_an_activation_in_place_on_a_linear_layers_tokens(source: str):
    """Such a layer ends with a reshape, on whose result, a view, the activation works."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(3, 4), torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 5), torch.nn.ELU(inplace=True)),
        *(torch.nn.Flatten(), torch.nn.Linear(30, 3)),
    ).double()
    batches = [(torch.randn(count, 6, 3, dtype=torch.float64), torch.arange(count) % 3) for count in (4, 2)]
    result = curvature.estimate(model, batches, source=source)
    assert_all_same(result.diagonal(), Problem(model, batches).diagonal(source))
    assert set(result.rules.values()) == {"linear"}


class CalledAndUsed(torch.nn.Module):
    """A layer whose weight also enters by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(3, 4), torch.nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.body(x) + torch.nn.functional.linear(x, self.body.weight)).tanh().flatten(1))


@pytest.mark.parametrize("source", ["ggn", "ef"])
def test_a_layer_that_is_called_and_whose_weight_is_used_beside(source: str):
    torch.manual_seed(0)
    model = CalledAndUsed().double()
    batches = [(torch.randn(count, 5, 3, dtype=torch.float64), torch.arange(count) % 3) for count in (4, 2)]
    result = curvature.estimate(model, batches, source=source)
    assert_all_same(result.diagonal(), Problem(model, batches).diagonal(source))
    if source == "ef":
        (batch, _) = batches
        online = curvature.OnlineCurvature(model.train(), 4, every=1, source="ef")
        with online.measure():
            torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        assert_all_same(online.curvature().diagonal(), curvature.estimate(model, [batch], source="ef").diagonal())


def test_dict_batches_need_no_forward_where_the_names_are_the_models():
    case = BY_NAME["dict-batch"]
    model, batches = case.model(), case.batches()
    assert_all_same(curvature.estimate(model, batches).diagonal(), compute(case, model, batches).diagonal())
