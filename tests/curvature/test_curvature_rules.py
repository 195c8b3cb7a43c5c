"""A rule of one's own: used where it holds, replaced by the generic rule where it does not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shaver.curvature import Dense, OnlineCurvature, Outer, estimate, register_rule
from shaver.curvature import rules as registry
from shaver.testing import check_rule
from tests.curvature.cases import Case, chain, normal, of
from tests.curvature.networks import pool_positions
from tests.curvature.reference import assert_all_same


class Gain(nn.Module):
    """y = x * gain, one gain a feature: the example of ``register_rule``."""

    def __init__(self, features: int = 5) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Transposed(nn.Module):
    """y = x W."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


@pytest.fixture(autouse=True)
def registered_only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))


def docstring_rule(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Dense]:
    return {"gain": Dense((grads * inputs).flatten(2, -2).sum(2))}  # (K, B, features)


def positions(build: Any) -> Case:
    return Case("gain", chain(of(nn.Linear, 4, 5), build, nn.Tanh, of(nn.Linear, 5, 3), pool_positions), normal(3, 4))


def check(case: Case, rule: str, parameter: str = "1.gain") -> None:
    """Every way to the diagonal gives the reference's numbers, and ``coverage`` says by which rule."""
    model, batches = case.model(), case.batches((4, 3))
    problem = case.problem(model, batches)
    for source in ("ggn", "ef"):
        found = estimate(model, batches, source=source)
        assert_all_same(found.diagonal(), problem.diagonal(source))
        (line,) = (line for line in found.coverage().splitlines() if line.startswith(parameter))
        assert line.split(maxsplit=2)[2].startswith(rule)
    online = OnlineCurvature(model, data_size=7, every=1, decay=0.0, source="ef")
    for x, y in batches:
        nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    online.step()
    assert_all_same(online.curvature().diagonal(), problem.diagonal("ef"))
    assert online.curvature().rules[parameter].startswith(rule)


def test_the_rule_of_the_docstring_is_used():
    register_rule(Gain)(docstring_rule)
    check(positions(Gain), "docstring rule")


def test_without_it_something_general_is():
    check(positions(Gain), "one copy per sample")
    check(positions(lambda: nn.Sequential(Transposed(), nn.Linear(4, 5))), "one copy per sample", "1.0.matrix")


def test_it_has_the_name_it_is_given():
    register_rule(Gain, name="feature gain")(docstring_rule)
    check(positions(Gain), "feature gain")


def test_a_matrix_rule_has_kronecker_factors_too():
    @register_rule(Transposed)
    def product(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Outer]:
        a, b = inputs.flatten(1, -2).mT, grads.flatten(2, -2).mT
        return {"matrix": Outer(lambda piece: a[piece], b, module.matrix.shape, transposed=True)}

    case = positions(lambda: nn.Sequential(Transposed(), nn.Linear(4, 5)))
    check(case, "product", "1.0.matrix")
    model, batches = case.model(), case.batches()
    block = dict(estimate(model, batches, structure="kron"))["1.0.matrix"]
    assert block.A.shape == (1, 5, 5)  # type: ignore[union-attr]
    assert block.G.shape == (1, 4, 4)  # type: ignore[union-attr]


def wrong_by_two(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Dense]:
    return {"gain": Dense(2 * (grads * inputs).flatten(2, -2).sum(2))}


def squares_before_the_sum(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Dense]:
    return {"gain": Dense((grads * inputs).flatten(2, -2).square().sum(2).sqrt())}


def wrong_shape(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Dense]:
    return {"gain": Dense(grads * inputs)}


def wrong_name(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Dense]:
    return {"scale": Dense((grads * inputs).flatten(2, -2).sum(2))}


def raises(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Dense]:
    raise ValueError("not for these inputs")


@pytest.mark.parametrize("rule", [wrong_by_two, squares_before_the_sum, wrong_shape, wrong_name, raises])
def test_a_wrong_rule_gives_way_and_the_numbers_are_right(rule: Any):
    register_rule(Gain)(rule)
    check(positions(Gain), "generic: no rule for this use in Gain")


def test_a_subclass_with_a_forward_of_its_own_is_not_trusted_to_the_rule():
    register_rule(Gain)(docstring_rule)

    class Half(Gain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 2

    class Same(Gain):
        pass

    check(positions(Same), "docstring rule")
    case = positions(Half)
    rule = estimate(case.model(), case.batches()).rules["1.gain"]
    assert not rule.startswith("docstring rule")
    check(case, rule)


def test_one_function_serves_several_types():
    class Louder(Gain):
        def forward(self, x: Tensor) -> Tensor:
            return self.gain * x

    register_rule(Gain, Louder)(docstring_rule)
    check(positions(Gain), "docstring rule")
    check(positions(Louder), "docstring rule")


# check_rule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.Linear(4, 3), torch.randn(5, 2, 4)),
        (nn.Conv2d(2, 4, 3, padding=1, groups=2), torch.randn(5, 2, 4, 4)),
        (nn.Embedding(6, 3, padding_idx=0), torch.randint(6, (5, 4))),
        (nn.LayerNorm((3, 4)), torch.randn(5, 3, 4)),
        (nn.PReLU(4), torch.randn(5, 4, 3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_rules_of_the_library_pass_the_check(module: nn.Module, inputs: Tensor):
    check_rule(module, inputs)


def test_the_check_passes_the_rule_of_the_docstring():
    register_rule(Gain)(docstring_rule)
    check_rule(Gain(), torch.randn(4, 3, 5))


def touches(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Dense]:
    with torch.no_grad():
        module.gain.mul_(2)
    return docstring_rule(module, inputs, grads)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (wrong_by_two, "differ from autograd"),
        (squares_before_the_sum, "differ from autograd"),
        (wrong_shape, "gradients of shape"),
        (wrong_name, "no use for the parameter 'gain'"),
        (touches, "it changed the model's weights"),
    ],
)
def test_the_check_says_what_is_wrong(rule: Any, message: str):
    register_rule(Gain)(rule)
    with pytest.raises(AssertionError, match=message):
        check_rule(Gain(), torch.randn(4, 3, 5))


def test_the_check_needs_a_rule():
    with pytest.raises(AssertionError, match="no rule is registered for Gain"):
        check_rule(Gain(), torch.randn(4, 3, 5))
