"""Every experiment of the paper under a name.

Several recipes share their trained networks: ``uncertainty`` reads the same rows as the unstructured recipes,
``priors`` contains their parameter-wise column, and ``curves`` their histories. Cells are found by their settings, so a
recipe uses the networks that another one has trained.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from shaver.lab.recipes.recipe import PAPER_SPARSITIES, PRIORS, SCALES, Recipe, Stage
from shaver.lab.recipes.tasks import TASKS
from shaver.naming import check_name

#: Fine-tuning costs a training per point, so it has fewer points.
_FEW_CRITERIA = ("opd", "magnitude", "snip", "grasp", "random")
_FEW_SPARSITIES = (0.80, 0.90, 0.95, 0.98, 0.99)
_STRUCTURED = Stage(
    "structured", ("opd", "magnitude", "snip", "grasp", "synflow", "random"), (0.20, 0.40, 0.60, 0.70, 0.80, 0.90, 0.95)
)
#: Language models: the paper's criteria, and a range in which they fall to chance.
_LANGUAGE = Stage("posthoc", _FEW_CRITERIA, (0.20, 0.40, 0.50, 0.60, 0.70, 0.80, 0.90, 0.95))
#: Instead of SpaM, for networks that were trained without it.
_TWO_STEPS = Stage("two-steps", ("opd",), _LANGUAGE.sparsities, methods=("map",))
_HEADS_AND_WIDTHS = Stage("structured", ("opd", "magnitude", "random"), (0.25, 0.50, 0.75))


def _experiment(
    title: str,
    paper: str,
    *tasks: str,
    name: str,
    scale: str,
    large: tuple[str, ...] = (),
    structures: tuple[str, ...] = ("diag",),
    **rest: Any,
) -> Recipe:
    """A recipe of some tasks, and of some large ones at the paper's scale, with further settings of :class:`Recipe`."""
    chosen = tuple(TASKS[task, scale] for task in (*tasks, *(large if scale == "paper" else ())))
    # the paper's source at its scale; Monte-Carlo samples at ours, for both structures
    source = chosen[0].source if scale == "paper" else "mc"
    settings = {"curvatures": tuple(f"{structure}-{source}" for structure in structures)} | rest
    return Recipe(name, title.format(chosen[0].title), paper, scale, chosen, **settings)


def _unstructured(paper: str, *, name: str, scale: str, seeds: int = 3) -> Recipe:
    seeds = 4 if scale == "paper" else seeds
    return _experiment("Unstructured pruning: {}", paper, name, name=name, scale=scale, seeds=seeds)


def _language(paper: str, *, name: str, scale: str, methods: tuple[str, ...] = ("map", "spam")) -> Recipe:
    """Curves of pruned language models; heads and widths of encoders are removed as well."""
    stages = (_LANGUAGE, _TWO_STEPS, *((_HEADS_AND_WIDTHS,) if "gpt" not in name else ()))
    seeds = 4 if scale == "paper" else 1
    return _experiment(
        "Language: {}", paper, name, name=name, scale=scale, methods=methods, seeds=seeds, stages=stages, curves=False
    )


def _finetuning(name: str, scale: str) -> Recipe:
    tuned = Stage("finetuned", _FEW_CRITERIA, _FEW_SPARSITIES, epochs=5 if scale == "paper" else 2)
    return _experiment(
        "One shot against fine-tuned", "Figure B4", "fcn-mnist", "lenet-mnist", "lenet-fashion", name=name,
        scale=scale, stages=(Stage(), tuned),
    )  # fmt: skip


#: Shares of training between which weights are removed, schedule of the learning rate, and options of SpaM.
_TO_THE_MIDDLE = ((0.1, 0.5), "cosine", {"burn_in": 0.1, "freeze": 0.5, "initial_precision": 20.0})
#: At the full learning rate, which falls while the masks are held.
_EARLY = ((1 / 60, 1 / 3), "late cosine", {"burn_in": 1 / 60, "freeze": 1 / 3, "initial_precision": 20.0})
#: At the end of a training with a strong prior, before the learning rate starts anew.
_LATE = ((0.65, 2 / 3), "two cosines", {"burn_in": 0.07, "freeze": 0.47})


def _record(
    task: str,
    *compressions: float,
    name: str,
    scale: str,
    removal: tuple[Any, ...] = _TO_THE_MIDDLE,
    dropout: float = 0.0,
    **training: Any,
) -> Recipe:
    """Pruning to the published compressions, all weights and biases counted, in one training from random weights.

    Once all of them are removed, the masks are held and the remaining weights leave the learned prior. Late removal in
    few steps fits a network that SpaM has made sparse, so the rivals are left out there.
    """
    # a thousandth more, so that a rounded count of weights does not fall short
    sparsities = tuple(1 - 1 / (1.001 * times) for times in compressions)
    (start, end), schedule, spam = removal
    online = {"biases": True, "debias": True, "start": start, "end": end}
    settings = {"source": "mc", "spam": spam, "online": online, "schedule": schedule, **training}
    chosen = replace(TASKS[task, scale], note="", **settings)
    if dropout:
        network, title = chosen.network | {"dropout": dropout}, f"{chosen.title}, {dropout:.0%} of the pixels dropped"
        chosen = replace(chosen, network=network, title=title)
    methods = ("spam",) if removal is _LATE else ("spam", "map", "vd", "l0")
    return Recipe(
        name, f"Highest compression: {chosen.title}", "–", scale, (chosen,), methods=methods,
        stages=(Stage("online", ("opd", "magnitude"), sparsities),), curves=False,
    )  # fmt: skip


def _record_afterwards(name: str, scale: str) -> Recipe:
    """Pruning to 99 % after training. With the data counted a third, fewer weights stay relevant."""
    task = replace(TASKS["lenet-mnist", scale], note="", source="mc", temperature=3.0)
    stage = Stage("posthoc", ("opd", "magnitude"), (0.95, 0.97, 0.98, 0.985, 0.99, 0.995))
    return Recipe(
        name, f"Pruned to 99 % after training: {task.title}", "–", scale, (task,), methods=("spam",),
        stages=(stage,), curves=False,
    )  # fmt: skip


def _runtime(name: str, scale: str) -> Recipe:
    """Times are those of cells side by side, as always; ``--processes 1`` gives each the machine for itself."""
    title, paper = "Run time of MAP, EF, GGN and KFAC, and of each criterion", "Table D5, Figure D13"
    curvatures = ("diag-mc", "diag-ef", "diag-ggn", "kron-mc", "kron-ggn")
    recipe = _experiment(
        title, paper, "fcn-mnist", "lenet-mnist", "vit-mnist", name=name, scale=scale, curvatures=curvatures, seeds=1,
        stages=(Stage(sparsities=(0.95,)),), curves=False,
    )  # fmt: skip
    if scale == "paper":
        return recipe
    tasks = tuple(replace(task, epochs=3, note=f"3 epochs, to time them; {task.note}") for task in recipe.tasks)
    return replace(recipe, tasks=tasks)


def _demo(name: str, scale: str) -> Recipe:
    cancer, digits = (TASKS[task, scale] for task in ("demo-cancer", "demo-digits"))
    structured = Stage("structured", ("opd", "magnitude", "random"), (0.3, 0.5, 0.6, 0.7, 0.8))
    own = {"methods": ("spam",), "priors": ("unit",), "seeds": 1, "stages": (structured,)}
    units = replace(digits, name="demo-units", title=f"{digits.title}, whole units removed", own=own)
    stage = Stage(sparsities=tuple(sorted((*PAPER_SPARSITIES, 0.98))))
    repaired = Stage("repaired", ("opd",), (0.8, 0.9, 0.95, 0.98))
    tasks = (digits, units, cancer)  # the longest trainings first: no core is idle at the end
    return Recipe(name, "Two small networks, pruned", "–", scale, tasks, stages=(stage, repaired), curves=False)


#: Each function takes ``name`` and ``scale``.
_RECIPES: dict[str, Callable[..., Recipe]] = {
    "demo": _demo,
    "fcn-cancer": partial(_unstructured, "Figure 2", seeds=20),
    "fcn-mnist": partial(_unstructured, "Figure 2"),
    "lenet-mnist": partial(_unstructured, "Figure 2, Table B1"),
    "lenet-fashion": partial(_unstructured, "Figure 2"),
    "lenet-cifar10": partial(_unstructured, "Figure 2"),
    "mixer-mnist": partial(_unstructured, "Figure 2, Table B2"),
    "resnet-cifar10": partial(_unstructured, "Table 1, Figure 2"),
    "wrn-cifar10": partial(_unstructured, "Figure B7"),
    "wrn-cifar100": partial(_unstructured, "Figure B7"),
    "vit-mnist": partial(_unstructured, "Figure B8"),
    "distilbert-imdb": partial(_language, "DistilBERT on IMDB, Table D4"),
    "gpt2-imdb": partial(_language, "GPT-2 on IMDB, Table D4", methods=("map",)),
    "minilm-imdb": partial(_language, "stands in for DistilBERT on IMDB"),
    "small-gpt-imdb": partial(_language, "stands in for GPT-2 on IMDB"),
    "small-gpt-words": partial(_language, "–"),
    "record-300-100": partial(_record, "lenet-300-100", 68, 100),
    "record-300-100-dropout": partial(_record, "lenet-300-100", 68, 100, dropout=0.2, epochs=45),
    "record-caffe": partial(_record, "lenet-caffe", 280, 400, removal=_EARLY),
    "record-lenet": partial(_record, "lenet-mnist", 100, removal=_LATE, temperature=3.0, epochs=45),
    "record-lenet-afterwards": _record_afterwards,
    "priors": partial(
        _experiment, "Priors and curvatures: four priors × diagonal and KFAC, OPD and GraSP",
        "Figures 4, B2 and B3, Tables B1 and B2", "fcn-cancer", "fcn-mnist", "lenet-mnist", "lenet-fashion",
        large=("mixer-mnist", "resnet-cifar10"), structures=("diag", "kron"), priors=PRIORS,
    ),
    "uncertainty": partial(
        _experiment, "Uncertainty: NLL, ECE and Brier score over sparsity", "Figure 3, Table B3",
        "resnet-cifar10", "lenet-mnist", "lenet-fashion",
    ),
    "finetuning": _finetuning,
    "online": partial(
        _experiment, "Online against post hoc", "Figure B5",
        "fcn-cancer", "fcn-mnist", "lenet-mnist", "lenet-fashion", "lenet-cifar10",
        stages=(Stage(), Stage("online", ("opd", "magnitude"), _FEW_SPARSITIES)),
    ),
    "l1": partial(
        _experiment, "L1 against SpaM and MAP", "Figure B6", "fcn-mnist", "lenet-mnist", methods=("map", "spam", "l1")
    ),
    "structured": partial(
        _experiment, "Structured pruning and its Pareto front: accuracy over FLOPs and bytes", "Figures 5 and 6",
        "fcn-cancer", "fcn-mnist", "lenet-mnist", "lenet-fashion", priors=("unit",), stages=(_STRUCTURED,),
    ),
    "compression": partial(
        _experiment, "Compression: bytes and FLOPs, structured beside unstructured", "Figures B11 and B12",
        "fcn-cancer", "lenet-fashion", methods=("spam",), priors=("parameter", "unit"), stages=(Stage(), _STRUCTURED),
    ),
    "runtime": _runtime,
    "curves": partial(
        _experiment, "Training curves of MAP and SpaM under all priors and curvatures", "Figure B1",
        "fcn-mnist", "lenet-mnist", "lenet-fashion", structures=("diag", "kron"), priors=PRIORS,
    ),
    "filters": partial(
        _experiment, "Pictures of filters and neurons at 95 %, parameter-wise and unit-wise", "Figure B10",
        "lenet-fashion", priors=("parameter", "unit"), seeds=1,
    ),
}  # fmt: skip


def recipe_names() -> list[str]:
    """The names of all recipes."""
    return list(_RECIPES)


def get_recipe(name: str, scale: str = "cpu") -> Recipe:
    """A recipe by its name.

    Raises:
        ValueError: Unknown name or scale, with the nearest match.
    """
    return _RECIPES[check_name("recipe", name, _RECIPES)](name=name, scale=check_name("scale", scale, SCALES))
