"""The options of ``shaver run``; apart from what carries them out, so that its help needs no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from shaver.lab.recipes.catalogue import get_recipe
from shaver.lab.recipes.recipe import Recipe


def _own(metavar: str) -> Any:
    """How an option that defaults to the recipe's own value appears in the help."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="(default: the recipe's own)")


@dataclass(frozen=True)
class RunOptions:
    """Which recipe, what to change in it, and where it runs.

    Attributes:
        recipe: Its name; `shaver list` shows them all.
        scale: cpu is what two cores finish (what is smaller than in the paper is said everywhere); paper has the
            paper's hyper-parameters.
        tasks: Some of the recipe's networks and data, such as lenet-mnist.
        methods: How networks are trained: map, spam, l1.
        priors: SpaM's priors: parameter, unit, layer, scalar.
        curvatures: SpaM's curvatures: diag or kron, from mc, ef or ggn, such as diag-mc or kron-ggn.
        seeds: How many seeds.
        first_seed: The first one.
        epochs: Passes over the training data.
        batch_size: Samples a step.
        optimizer: sgd, adam or adamw.
        lr: Its learning rate.
        samples: Train on so many samples only.
        weights: Language models: a local folder with pretrained weights and their tokenizer, as save_pretrained
            writes it.
        vocabularies: Language models without weights: a folder with bert-base-uncased-vocab/vocab.txt or
            gpt2-bpe/encoder.json and gpt2-bpe/vocab.bpe.
        length: Language models: tokens of a text that are read.
        test_samples: Language models: judge by so many texts only.
        scored: Language models: training texts that SNIP, GraSP and MAP's curvature see.
        stages: Some of the recipe's ways to prune: posthoc, finetuned, online, structured, two-steps.
        criteria: How weights are ranked: opd, obd, magnitude, snip, grasp, synflow, wanda, random.
        sparsities: Shares to remove, such as 0.9 0.95.
        tuning_epochs: Epochs of fine-tuning, where the recipe does it.
        out: The run folder; runs/RECIPE-SCALE if left out. Trained networks go into networks/ beside it.
        processes: Cells at once, one thread each; as many as cores if left out (for slurm: 100 jobs).
        engine: local runs cells as processes here, slurm as jobs of a cluster through submitit.
        slurm: Options of submitit's executor, such as timeout_min=240 slurm_partition=gpu mem_gb=8.
        any_code: Keep finished cells, and continue interrupted ones, that another version of the code made.
        show: Print the recipe with all its settings, and run nothing.
    """

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE")]
    scale: Literal["cpu", "paper"] = "cpu"
    tasks: Annotated[tuple[str, ...] | None, _own("NAME ...")] = None
    methods: Annotated[tuple[str, ...] | None, _own("NAME ...")] = None
    priors: Annotated[tuple[str, ...] | None, _own("NAME ...")] = None
    curvatures: Annotated[tuple[str, ...] | None, _own("NAME ...")] = None
    seeds: Annotated[int | None, _own("NUMBER")] = None
    first_seed: Annotated[int | None, _own("NUMBER")] = None
    epochs: Annotated[int | None, _own("NUMBER")] = None
    batch_size: Annotated[int | None, _own("NUMBER")] = None
    optimizer: Annotated[str | None, _own("NAME")] = None
    lr: Annotated[float | None, _own("NUMBER")] = None
    samples: Annotated[int | None, _own("NUMBER")] = None
    weights: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    vocabularies: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    length: Annotated[int | None, _own("NUMBER")] = None
    test_samples: Annotated[int | None, _own("NUMBER")] = None
    scored: Annotated[int | None, _own("NUMBER")] = None
    stages: Annotated[tuple[str, ...] | None, _own("NAME ...")] = None
    criteria: Annotated[tuple[str, ...] | None, _own("NAME ...")] = None
    sparsities: Annotated[tuple[float, ...] | None, _own("SHARE ...")] = None
    tuning_epochs: Annotated[int | None, _own("NUMBER")] = None
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    processes: Annotated[int | None, tyro.conf.arg(metavar="NUMBER", help_behavior_hint="")] = None
    engine: Literal["local", "slurm"] = "local"
    slurm: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE ...", help_behavior_hint="")] = ()
    any_code: tyro.conf.FlagCreatePairsOff[bool] = False
    show: tyro.conf.FlagCreatePairsOff[bool] = False

    def chosen(self) -> Recipe:
        """The recipe with what the command line changes in it."""
        changed = (
            *("tasks", "methods", "priors", "curvatures", "seeds", "first_seed", "epochs", "batch_size", "optimizer"),
            *(
                "lr",
                "samples",
                "weights",
                "vocabularies",
                "length",
                "test_samples",
                "scored",
                "stages",
                "criteria",
                "sparsities",
                "tuning_epochs",
            ),
        )
        return get_recipe(self.recipe, self.scale).override(**{name: getattr(self, name) for name in changed})
