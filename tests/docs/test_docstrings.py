"""The examples in docstrings run, and print what they show."""

import ast
import doctest
import importlib
import pkgutil
from functools import cached_property
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shaver
from shaver.criteria import registry

#: Examples that need what a test here does not have, and where they are tested instead.
ELSEWHERE = {
    "shaver.files.card.Card": "tests/files/test_hub.py",
    "shaver.files.hub.write_folder": "tests/files/test_hub.py",
    "shaver.integrations.distributed.full_state_dict": "tests/integrations/test_distributed_fsdp.py",
    "shaver.integrations.lightning.SpaMCallback": "tests/integrations/test_lightning.py",
    "shaver.integrations.model_folder.prune_folder": "tests/integrations/test_model_folder.py",
    "shaver.integrations.oneshot.prune_blocks": "tests/integrations/test_oneshot.py",
    "shaver.integrations.sparse_tuning.merge_adapters": "tests/integrations/test_sparse_tuning.py",
    "shaver.integrations.transformers.SpaMCallback": "tests/integrations/test_transformers_trainer.py",
    "shaver.lab.report.frame.load_runs": "tests/lab/test_runner.py",
    "shaver.lab.run.runner.run_study": "tests/lab/test_runner.py",
}


class Reader:
    """What the reader of a docstring is taken to have, made when an example asks for it."""

    F, nn, shaver, torch = F, nn, shaver, torch

    @cached_property
    def model(self) -> nn.Module:
        return shaver.zoo.build("lenet", seed=0)

    @cached_property
    def LeNet(self) -> Any:
        return lambda: shaver.zoo.build("lenet")

    @cached_property
    def images(self) -> torch.Tensor:
        return torch.randn(32, 1, 28, 28)

    @cached_property
    def labels(self) -> torch.Tensor:
        return torch.arange(32) % 10

    @property
    def x(self) -> torch.Tensor:
        return self.images[:2]

    example = x

    @property
    def loader(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self.images.split(16), self.labels.split(16), strict=True))

    train = valid = test_loader = batches = loader

    @property
    def train_set(self) -> torch.Tensor:
        return self.images

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_parameters())

    theta = parameters

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.01)

    @cached_property
    def spam(self) -> Any:
        spam = shaver.SpaM(self.model, data_size=32, every=1, update=1, burn_in=0)
        for images, labels in self.loader:
            loss = F.cross_entropy(self.model(images), labels)
            self.optimizer.zero_grad()
            loss.backward()
            spam.step(self.optimizer)
        return spam

    @property
    def posterior(self) -> Any:
        return self.spam.posterior

    @cached_property
    def curvature(self) -> Any:
        return shaver.curvature.estimate(self.model, self.loader, source="ef")

    @property
    def prior(self) -> Any:
        return self.spam.prior

    @cached_property
    def likelihood(self) -> Any:
        return shaver.likelihoods.Regression()

    @cached_property
    def history(self) -> Any:
        return shaver.fit(self.model, self.loader, epochs=1, online=shaver.pruning.Online(0.5))

    @cached_property
    def groups(self) -> Any:
        return shaver.structure.find_groups(self.model, self.x)

    @cached_property
    def choice(self) -> Any:
        scores = shaver.structure.score_units(self.model, self.groups, "magnitude")
        how = shaver.structure.ChoiceOptions()
        return shaver.structure.Chooser(self.model, self.groups, how).choose(scores, 0.5)

    @cached_property
    def pruned(self) -> nn.Module:
        return shaver.zoo.build("lenet", seed=1)

    @cached_property
    def small(self) -> nn.Module:
        return shaver.compact(self.model, self.x, criterion="magnitude", sparsity=0.5)


class RunsOrPrints(doctest.OutputChecker):
    """An example that shows nothing only has to run."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def examples() -> list[doctest.DocTest]:
    found = []
    for module in pkgutil.walk_packages(shaver.__path__, "shaver."):
        if not module.name.endswith("__main__"):
            found += doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(module.name))
    return [test for test in found if test.examples and test.name.startswith("shaver.")]


EXAMPLES = examples()


def test_what_is_tested_elsewhere_exists():
    assert ELSEWHERE.keys() <= {test.name for test in EXAMPLES}


@pytest.mark.parametrize("test", [t for t in EXAMPLES if t.name not in ELSEWHERE], ids=lambda test: test.name)
def test_the_example_runs_and_prints_what_it_shows(test, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_REGISTER", dict(registry._REGISTER))
    assert not any(doctest.SKIP in example.options for example in test.examples)
    reader = Reader()
    room = importlib.import_module(".".join(test.name.split(".")[:2]))
    for node in ast.walk(ast.parse("".join(example.source for example in test.examples))):
        if isinstance(node, ast.Name) and node.id not in test.globs:
            for place in (reader, room, shaver.priors):
                if hasattr(place, node.id):
                    test.globs[node.id] = getattr(place, node.id)
                    break
    said: list[str] = []
    runner = doctest.DocTestRunner(RunsOrPrints(), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=said.append, clear_globs=False)
    assert not runner.failures, "".join(said)
