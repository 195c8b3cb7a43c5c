"""Bad input: each mistake gets an error that names it."""

import pytest
import torch
from torch import Tensor, nn

from shaver import curvature
from tests.curvature.cases import BY_NAME

MLP = BY_NAME["mlp"]


def estimate(model: nn.Module, batches: object, **options: object) -> curvature.Curvature:
    return curvature.estimate(model, batches, **options)


def test_an_empty_iterator():
    with pytest.raises(ValueError, match=r"(?i)empty|no batch"):
        estimate(MLP.model(), [])


def test_batches_without_samples():
    with pytest.raises(ValueError, match=r"(?i)empty|no samples"):
        estimate(MLP.model(), [(torch.zeros(0, 4, dtype=torch.float64), torch.zeros(0, dtype=torch.long))])


def test_no_trainable_parameters():
    with pytest.raises(ValueError, match=r"(?i)trainable|requires_grad"):
        estimate(MLP.model().requires_grad_(False), MLP.batches())


@pytest.mark.parametrize("source", ["ggn", "ef", "mc"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_data_that_are_not_finite_are_named_by_batch(source: str, bad: float):
    batches = MLP.batches((3, 3, 3))
    batches[1][0][2, 1] = bad
    with pytest.raises(ValueError, match=r"(?i)(nan|finite).*batch 1|batch 1.*(nan|finite)"):
        estimate(MLP.model(), batches, source=source)


class SquareRoot(nn.Module):
    """√|x| has an infinite slope at zero, while the output itself is finite."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs().sqrt()


@pytest.mark.parametrize("source", ["ggn", "ef"])
def test_infinite_curvature_is_named_by_parameter_and_batch(source: str):
    model = nn.Sequential(nn.Linear(4, 5), SquareRoot(), nn.Linear(5, 3)).double()
    batches = MLP.batches((3, 3))
    with torch.no_grad():
        model[0].weight[0] = 0
        model[0].bias[0] = 0
    with pytest.raises(ValueError, match=r"(?i)0\.(weight|bias)[\s\S]*batch 0|batch 0[\s\S]*0\.(weight|bias)"):
        estimate(model, batches, source=source)


class Detached(nn.Module):
    """Computes under no_grad, as inference code does."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize("source", ["ggn", "ef", "mc"])
def test_outputs_without_gradient(source: str):
    with pytest.raises(ValueError, match=r"(?i)gradient|no_grad|detach"):
        estimate(Detached(MLP.model()), MLP.batches(), source=source)


@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("source", ["ggn", "ef", "mc"])
def test_batch_norm_without_running_statistics_mixes_the_samples(source: str, structure: str):
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3)).double()
    with pytest.raises(ValueError, match=r"\b1\b.*track_running_stats"):
        estimate(model, MLP.batches(), source=source, structure=structure)


@pytest.mark.parametrize("name", ["conv-transpose", "lenet"])
def test_a_budget_too_small_for_one_sample_says_what_one_needs(name: str):
    case = BY_NAME[name]
    with pytest.raises((ValueError, MemoryError), match=r"(?i)memory_budget.*\d") as caught:
        estimate(case.model(), case.batches(), memory_budget=16)
    assert "16" in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value", "nearest"),
    [
        ("source", "gnn", "ggn"),
        ("structure", "diagonal", "diag"),
        ("sharing", "expnd", "expand"),
        ("likelihood", "clasification", "classification"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(option: str, value: str, nearest: str):
    with pytest.raises(ValueError, match=f"{value}.*{nearest}"):
        estimate(MLP.model(), MLP.batches(), **{option: value})


@pytest.mark.parametrize("samples", [0, -2])
def test_the_number_of_monte_carlo_samples_is_positive(samples: int):
    with pytest.raises(ValueError, match=str(samples)):
        estimate(MLP.model(), MLP.batches(), source="mc", samples=samples)


def test_labels_out_of_range_are_caught_before_any_pass():
    (x, y), *_ = MLP.batches()
    with pytest.raises(ValueError, match="label 7"):
        estimate(MLP.model(), [(x, torch.full_like(y, 7))])


def test_targets_of_another_length():
    (x, y), *_ = MLP.batches()
    with pytest.raises(ValueError, match="shape"):
        estimate(MLP.model(), [(x, y[:2])])


def test_a_batch_that_is_neither_pair_nor_dict_names_its_type():
    with pytest.raises((TypeError, ValueError), match=r"Tensor|tensor"):
        estimate(MLP.model(), [torch.zeros(3, 4, dtype=torch.float64)])


class Pair(nn.Module):
    """Returns its input beside its output."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), x


def test_outputs_that_are_not_a_tensor_point_to_forward():
    with pytest.raises((TypeError, ValueError), match="forward"):
        estimate(Pair(MLP.model()), MLP.batches())


def test_a_custom_forward_repairs_that():
    plain = estimate(MLP.model(), MLP.batches()).diagonal()
    wrapped = estimate(Pair(MLP.model()), MLP.batches(), forward=lambda model, batch: model(batch[0])[0]).diagonal()
    for name, values in plain.items():
        assert torch.equal(wrapped[f"body.{name}"], values)
