"""What is passed wrongly is named, with what would work; nothing ends in torch's or Python's words."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import shaver
from shaver.structure import ChoiceOptions, Chooser, export_onnx, find_groups, mask_units, remove_units, score_units
from shaver.structure.layers import COMPUTED


def network(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 6), nn.ReLU(), nn.Linear(6, 3))


X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
HALF: dict[str, Any] = {"criterion": "magnitude", "sparsity": 0.5}


@pytest.mark.parametrize("call", ["compact", "find_groups", "export_onnx"])
@pytest.mark.parametrize(
    ("model", "example", "message"),
    [
        (network(), X.numpy(), "not numpy.ndarray; torch.from_numpy"),
        (network(), None, "not NoneType"),
        (network(), [X], "not list; see forward="),
        (network(), "abc", "not str"),
        (network(), X.to("meta"), "on the meta device"),
        (network(), X.to_sparse(), "is sparse"),
        (network(), torch.randn(4, 7), "does not run"),
        (network(), X.double(), "does not run"),
        (network(), X.long(), "does not run"),
        (None, X, "takes a network, a torch.nn.Module, not None"),
        (nn.Linear, X, "not the class Linear; create an instance"),
        (nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)), X, "'0.weight' is lazy"),
        (nn.Linear(5, 2, device="meta"), X, "'weight' is on the meta device"),
    ],
)
def test_a_wrong_network_or_example_is_named(call: str, model: Any, example: Any, message: str, tmp_path: Path) -> None:
    if call == "export_onnx":
        pytest.importorskip("onnxscript")
    calls: dict[str, Callable[[], object]] = {
        "compact": lambda: shaver.compact(model, example, **HALF),
        "find_groups": lambda: find_groups(model, example),
        "export_onnx": lambda: export_onnx(model, example, tmp_path / "no.onnx"),
    }
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        calls[call]()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": "0.5"}, "'0.5'"),
        ({"sparsity": float("nan")}, "nan"),
        ({"sparsity": True}, "True"),
        ({"target": "flop"}, "did you mean 'flops'"),
        ({"spread": None}, "None"),
        ({"round_to": "8"}, "round_to must be an integer of at least 1, not '8'"),
        ({"min_units": 0}, "min_units must be an integer of at least 1, not 0"),
        ({"groups": {}}, r"find_groups\(model, example\), not {}"),
        ({"groups": find_groups(network(4), X)}, r"whose '0.bias' has shape \(4,\).*has shape \(8,\). Find them again"),
        ({"masks": [1]}, r"masks are a dict of one mask per parameter, by name, not \[1\]"),
        ({"masks": {"0.wieght": torch.ones(8, 5, dtype=torch.bool)}}, "did you mean '0.weight'"),
        ({"masks": {"0.weight": torch.ones(3, dtype=torch.bool)}}, r"shape \(8, 5\), not torch.bool of shape \(3,\)"),
        ({"masks": {"0.weight": torch.ones(8, 5)}}, "takes truth values"),
        ({"optimizer": "adam", "in_place": True}, "optimizer takes one torch.optim.Optimizer or several, not 'adam'"),
        ({"spam": "spam", "in_place": True}, "spam belongs to another network"),
        ({"forward": 3}, r"forward must be a function forward\(model, batch\), not 3"),
    ],
)
def test_a_wrong_option_of_compact_is_named_and_nothing_changes(options: dict[str, Any], message: str) -> None:
    model = network()
    with pytest.raises((TypeError, ValueError), match=message):
        shaver.compact(model, X, **HALF | options)
    assert torch.equal(model[0].weight, network()[0].weight)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, g: find_groups(m, X, seconds="1"), "seconds must be a number of at least 0, not '1'"),
        (lambda m, g: find_groups(m, X, kinds=[3]), "unknown kind of group 3|must be"),
        (lambda m, g: find_groups(m, X, forward=lambda model, x: None), "forward returned a NoneType"),
        (
            lambda m, g: Chooser(m, g, ChoiceOptions()).choose([1], 0.5),
            r"one tensor per group.*not \[1\]",
        ),
        (lambda m, g: score_units(m, None), "groups come from"),
        (lambda m, g: remove_units(m, g, None, X), "kept is a dict"),
        (lambda m, g: remove_units(m, g, {"0": [True] * 8}, X), "one truth value for each of its 8 units"),
        (lambda m, g: mask_units(m, g, 3), "kept is a dict"),
    ],
)
def test_wrong_arguments_of_the_other_functions_are_named(call: Any, message: str) -> None:
    model = network()
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        call(model, find_groups(model, X))


@pytest.mark.parametrize("path", [None, 3, "."])
def test_a_path_that_is_no_file_is_refused(path: Any) -> None:
    pytest.importorskip("onnxscript")
    with pytest.raises(ValueError, match="path must name a file"):
        export_onnx(network(), X, path)


def computed(way: str, layer: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        {
            "weight_norm": parametrizations.weight_norm,
            "old weight_norm": torch.nn.utils.weight_norm,
            "spectral_norm": parametrizations.spectral_norm,
            "prune": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
        }[way](layer)


@pytest.mark.parametrize("way", ["weight_norm", "old weight_norm", "spectral_norm", "prune"])
def test_a_layer_with_a_computed_weight_is_left_out_and_the_others_are_found(way: str) -> None:
    model = network()
    computed(way, model[0])
    groups = find_groups(model, X)
    assert list(groups) == ["2"]
    assert groups.left_out["0"] == COMPUTED
    with torch.no_grad():
        assert shaver.compact(model, X, **HALF)(X).shape == (4, 3)
    only = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    computed(way, only[2])
    with pytest.raises(ValueError, match=r"remove_parametrizations, remove_weight_norm or prune\.remove"):
        find_groups(only, X)


def test_flops_that_cannot_be_measured_at_some_widths_are_refused_in_words() -> None:
    class Shuffle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.conv(x).unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match=r"flops cannot be measured on Shuffle at the widths conv 1 of 4: unflatten"):
        shaver.compact(Shuffle(), torch.randn(2, 1, 3, 3), target="flops", **HALF)


def test_without_a_sparsity_only_dead_units_are_removed() -> None:
    model = network()
    with torch.no_grad():
        model[0].weight[[1, 4]] = 0
        model[0].bias[[1, 4]] = 0
        model[4].weight[:, 2] = 0  # nobody reads unit 2 of the second layer
    small = shaver.compact(model, X)
    assert (small[0].out_features, small[2].out_features) == (6, 5)
    torch.testing.assert_close(small(X), model(X))
    assert shaver.compact(network(), X)[0].out_features == 8
    assert shaver.compact(network(), X, criterion="magnitude", sparsity=0.0)[0].out_features == 8
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    assert shaver.compact(model, X)[0].out_features == 1  # a layer keeps one unit
    torch.testing.assert_close(shaver.compact(model, X)(X), model(X))


def test_both_names_of_compact_share_a_signature_and_a_description() -> None:
    import inspect

    from shaver.structure import compact, compact_with_report

    assert inspect.signature(compact).parameters == inspect.signature(compact_with_report).parameters
    assert inspect.signature(compact).return_annotation is nn.Module
    assert compact.__doc__ == compact_with_report.__doc__
    assert compact.__name__ == "compact"


def test_experts_to_which_tokens_are_routed_do_not_stop_the_search() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.hidden, self.head = nn.Linear(4, 2), nn.Linear(4, 7), nn.Linear(7, 3)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            chosen, out = self.router(x).argmax(-1), torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                out[chosen == number] = expert(x[chosen == number])
            return self.head(torch.relu(self.hidden(out)))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    groups = find_groups(Experts(), torch.randn(8, 4))
    assert "hidden" in groups
    assert "router" in groups.left_out
