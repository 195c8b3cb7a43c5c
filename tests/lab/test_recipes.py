"""Recipes: every experiment has a name, the paper's settings, and a grid in which nothing is trained twice."""

import dataclasses
import json

import pytest
from filelock import FileLock

import shaver
from shaver.commands.main import main
from shaver.lab import get_recipe, recipe_names
from shaver.lab.recipes.grid import Cell, cells_of, expected_seconds
from shaver.lab.recipes.language import READERS
from shaver.lab.recipes.recipe import CRITERIA, PAPER_SPARSITIES, SCALES, SPARSITIES


def keys(name, scale="cpu", **changed):
    return {cell.key for cell in cells_of(get_recipe(name, scale).override(**changed))}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_describes_networks_and_data_that_exist(name, scale):
    recipe = get_recipe(name, scale)
    assert cells_of(recipe)
    for task in recipe.tasks:
        assert task.data in shaver.data.names()
        if task.length is None:
            assert shaver.zoo.build(**task.network, seed=0) is not None
        else:  # GPT-2's true size takes seconds
            assert task.network["name"] in READERS
        assert bool(task.note) == (scale == "cpu" and not name.startswith(("demo", "record"))), (
            "what is smaller than in the paper is said, and nothing else"
        )
    assert name in str(recipe)
    assert recipe.paper in str(recipe)


def test_all_criteria_and_the_papers_sparsities_and_three_more_are_measured():
    assert set(CRITERIA) == set(shaver.criteria.names())
    assert set(SPARSITIES) == {*PAPER_SPARSITIES, 0.97, 0.98, 0.995}


def test_the_paper_scale_has_the_papers_hyper_parameters():
    (resnet,) = get_recipe("resnet-cifar10", "paper").tasks
    assert (resnet.epochs, resnet.batch_size, resnet.lr, resnet.optimizer) == (100, 128, 0.1, "sgd")
    assert resnet.augment
    spam = next(c.training for c in cells_of(get_recipe("resnet-cifar10", "paper")) if "spam" in c.training.fit)
    assert spam.fit["spam"]["temperature"] == 0.2  # the paper's "5" counts the data five times
    assert (spam.fit["spam"]["burn_in"], spam.fit["spam"]["frequency"]) == (20, 5)
    assert spam.fit["spam"]["method"] == "gradient"
    sizes = {"resnet-cifar10": 10_992_372, "wrn-cifar10": 2_745_306, "wrn-cifar100": 2_768_436, "fcn-cancer": 13_402}
    for name, size in sizes.items():
        (task,) = get_recipe(name, "paper").tasks
        assert sum(p.numel() for p in shaver.zoo.build(**task.network).parameters()) == size


def test_recipes_share_the_cells_that_are_the_same():
    assert keys("lenet-mnist") < keys("priors")
    assert keys("lenet-mnist") < keys("uncertainty")
    assert keys("lenet-mnist") < keys("l1")
    assert keys("curves") < keys("priors")
    tuned = cells_of(get_recipe("finetuning"))
    posthoc = {cell.training.key for cell in cells_of(get_recipe("lenet-mnist"))}
    assert posthoc < {cell.training.key for cell in tuned if cell.stage.name == "finetuned"}


def test_the_grid_is_methods_times_priors_times_curvatures_times_seeds():
    recipe = get_recipe("lenet-mnist").override(
        methods=("map", "spam"), priors=("parameter", "unit"), curvatures=("diag-mc", "kron-mc"), seeds=2
    )
    labels = [cell.training.labels for cell in cells_of(recipe)]
    assert len(labels) == 2 * (1 + 2 * 2)
    assert [label["seed"] for label in labels] == [0] * 5 + [1] * 5, "whole seeds come first"
    assert {(x["prior"], x["structure"], x["source"]) for x in labels if x["method"] == "map"} == {("", "", "")}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"epochs": 7}, "epochs 7 instead of 100"),
        ({"lr": 0.01}, "learning rate 0.01 instead of 0.05"),
        ({"samples": 100}, "training samples 100"),
        ({"batch_size": 32}, "batch size 32 instead of 64"),
        ({"optimizer": "adam"}, "optimizer adam instead of sgd"),
    ],
)
def test_another_setting_is_another_network(changed, words):
    plain, other = cells_of(get_recipe("fcn-cancer")), cells_of(get_recipe("fcn-cancer").override(**changed))
    assert not {c.training.key for c in plain} & {c.training.key for c in other}
    assert words in get_recipe("fcn-cancer").override(**changed).note, "a change is on every output"


def test_fewer_epochs_are_told_once():
    assert get_recipe("lenet-mnist").override(epochs=3).note == "3 of 100 epochs"
    assert "1 epochs" in get_recipe("small-gpt-words").override(epochs=1).note
    assert "3 epochs" not in get_recipe("small-gpt-words").override(epochs=1).note


def test_other_criteria_keep_the_networks_and_change_the_cells():
    plain, other = cells_of(get_recipe("fcn-cancer")), cells_of(get_recipe("fcn-cancer").override(criteria=("opd",)))
    assert {c.training.key for c in plain} == {c.training.key for c in other}
    assert not {c.key for c in plain} & {c.key for c in other}


def test_a_cell_survives_its_file():
    for cell in cells_of(get_recipe("online")):
        assert Cell.from_dict(json.loads(json.dumps(cell.as_dict()))) == cell


def test_online_pruning_trains_once_for_each_sparsity():
    cells = [
        c for c in cells_of(get_recipe("online").override(tasks=("fcn-cancer",), seeds=1)) if c.stage.name == "online"
    ]
    assert sorted(c.training.online for c in cells) == sorted([0.8, 0.9, 0.95, 0.98, 0.99] * 2)
    assert len({c.training.key for c in cells}) == 10


def test_recipes_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        get_recipe("fcn-cancer").seeds = 9


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"methods": ("spamm",)}, "unknown method 'spamm'; did you mean 'spam'"),
        ({"priors": ("weight",)}, "unknown prior 'weight'"),
        ({"curvatures": ("diag-gnn",)}, "did you mean 'diag-ggn'"),
        ({"criteria": ("odp",)}, "unknown criterion 'odp'"),
        ({"sparsities": (1.5,)}, "shares between 0 and 1"),
        ({"seeds": 0}, "seeds must be an integer of at least 1"),
        ({"epochs": 0}, "epochs must be an integer of at least 1, not 0"),
        ({"lr": -1.0}, "lr must be a finite number above 0"),
        ({"optimizer": "sdg"}, "did you mean 'sgd'"),
        ({"tasks": ("lenet-mnist",)}, "unknown task of 'fcn-cancer' 'lenet-mnist'"),
        ({"stages": ("online",)}, "unknown stage of 'fcn-cancer' 'online'"),
        ({"tuning_epochs": 3}, "fine-tunes nothing"),
        ({"epoch": 3}, "unknown setting 'epoch'; did you mean 'epochs'"),
        ({"methods": ()}, "at least one method"),
    ],
)
def test_impossible_settings_are_explained(changed, message):
    with pytest.raises(ValueError, match=message):
        get_recipe("fcn-cancer").override(**changed)


def test_an_unknown_recipe_gets_the_nearest_name(capsys):
    assert main(["run", "lenet-minst"]) == 1
    assert "unknown recipe 'lenet-minst'; did you mean 'lenet-mnist'?" in capsys.readouterr().err


def test_the_recipe_can_be_shown_with_what_the_command_line_changes(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["run", "lenet-mnist", "--epochs", "5", "--seeds", "1", "--methods", "spam", "map"]
    assert main([*arguments, "--priors", "parameter", "unit", "--show"]) == 0
    text = capsys.readouterr().out
    assert "5 epochs" in text
    assert "spam map × parameter unit × diag-mc × 1 seeds" in text
    assert not list(tmp_path.iterdir()), "nothing is run"


def test_an_expected_time_grows_with_the_grid_and_the_epochs():
    recipe = get_recipe("lenet-mnist")
    assert expected_seconds(recipe.override(seeds=6)) == pytest.approx(2 * expected_seconds(recipe))
    assert expected_seconds(recipe.override(epochs=60)) > 1.5 * expected_seconds(recipe)
    assert expected_seconds(get_recipe("lenet-mnist", "paper")) is None, "never timed here"


def test_the_list_shows_every_recipe_and_how_far_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "fcn-cancer-cpu"
    for key, state in (("a", "done"), ("b", "done"), ("c", "failed"), ("e", "running")):
        (folder / "cells" / key).mkdir(parents=True)
        (folder / "cells" / key / "status.json").write_text(json.dumps({"state": state}))
    (folder / "study.json").write_text(json.dumps({"recipe": {}, "cells": ["a", "b", "c", "d", "e"]}))
    (tmp_path / "l1-cpu").mkdir()
    (tmp_path / "l1-cpu" / "study.json").write_text("{")
    assert main(["list", "--runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in recipe_names():
        assert any(line.split()[:1] == [name] for line in lines), name
    (cancer,) = [line for line in lines if line.split()[:1] == ["fcn-cancer"]]
    assert "2/5 done, 1 failed, 1 interrupted" in cancer, "nobody is at work there"
    with FileLock(folder / ".lock"):
        assert main(["list", "--runs", str(tmp_path)]) == 0
    assert "2/5 done, 1 running, 1 failed" in capsys.readouterr().out
    assert "Figure 2" in cancer
    assert any("damaged" in line for line in lines)


def test_a_task_has_settings_of_its_own_until_they_are_overridden():
    recipe = get_recipe("demo")
    units = [cell for cell in cells_of(recipe) if cell.task == "demo-units"]
    assert [(c.training.labels["prior"], c.training.labels["seed"], c.stage.name) for c in units] == [
        ("unit", 0, "structured")
    ]
    changed = [cell for cell in cells_of(recipe.override(seeds=2, methods=["map"])) if cell.task == "demo-units"]
    assert [(c.training.labels["method"], c.training.labels["seed"]) for c in changed] == [("map", 0), ("map", 1)]
