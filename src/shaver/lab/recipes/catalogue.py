"""Every experiment of the paper under a name.

Several recipes share their trained networks: ``uncertainty`` reads the same rows as the unstructured recipes,
``priors`` contains their parameter-wise column, and ``curves`` their histories. Cells are found by their settings, so a
recipe uses the networks that another one has trained.
"""

from collections.abc import Callable
from dataclasses import replace

from shaver.lab.recipes.recipe import PAPER_SPARSITIES, SCALES, Recipe, Stage, Task
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
_TWO_STEPS = Stage("two-steps", ("opd",), _LANGUAGE.sparsities)
_HEADS_AND_WIDTHS = Stage("structured", ("opd", "magnitude", "random"), (0.25, 0.50, 0.75))
_ALL_PRIORS = ("parameter", "unit", "layer", "scalar")


def _tasks(scale: str, *names: str) -> tuple[Task, ...]:
    return tuple(TASKS[name, scale] for name in names)


def _curvatures(scale: str, tasks: tuple[Task, ...], structures: tuple[str, ...] = ("diag",)) -> tuple[str, ...]:
    """The paper's source at its scale; Monte-Carlo samples at ours, for both structures."""
    source = tasks[0].source if scale == "paper" else "mc"
    return tuple(f"{structure}-{source}" for structure in structures)


def _unstructured(name: str, paper: str, seeds: int = 3) -> Callable[[str], Recipe]:
    def make(scale: str) -> Recipe:
        tasks = _tasks(scale, name)
        title = f"Unstructured pruning: {tasks[0].title}"
        count = 4 if scale == "paper" else seeds
        return Recipe(name, title, paper, scale, tasks, curvatures=_curvatures(scale, tasks), seeds=count)

    return make


def _language(name: str, paper: str, methods: tuple[str, ...] = ("map", "spam")) -> Callable[[str], Recipe]:
    """Curves of pruned language models; heads and widths of encoders are removed as well."""

    def make(scale: str) -> Recipe:
        tasks = _tasks(scale, name)
        stages = (_LANGUAGE, _TWO_STEPS, *((_HEADS_AND_WIDTHS,) if "gpt" not in name else ()))
        return Recipe(
            name, f"Language: {tasks[0].title}", paper, scale, tasks, methods=methods,
            curvatures=_curvatures(scale, tasks), seeds=4 if scale == "paper" else 1, stages=stages, curves=False,
        )  # fmt: skip

    return make


def _priors(scale: str) -> Recipe:
    large = ("mixer-mnist", "resnet-cifar10") if scale == "paper" else ()
    tasks = _tasks(scale, "fcn-cancer", "fcn-mnist", "lenet-mnist", "lenet-fashion", *large)
    return Recipe(
        "priors", "Priors and curvatures: four priors × diagonal and KFAC, OPD and GraSP",
        "Figures 4, B2 and B3, Tables B1 and B2",
        scale, tasks, priors=_ALL_PRIORS, curvatures=_curvatures(scale, tasks, ("diag", "kron")),
    )  # fmt: skip


def _uncertainty(scale: str) -> Recipe:
    tasks = _tasks(scale, "resnet-cifar10", "lenet-mnist", "lenet-fashion")
    title = "Uncertainty: NLL, ECE and Brier score over sparsity"
    return Recipe("uncertainty", title, "Figure 3, Table B3", scale, tasks, curvatures=_curvatures(scale, tasks))


def _finetuning(scale: str) -> Recipe:
    tasks = _tasks(scale, "fcn-mnist", "lenet-mnist", "lenet-fashion")
    tuned = Stage("finetuned", _FEW_CRITERIA, _FEW_SPARSITIES, epochs=5 if scale == "paper" else 2)
    return Recipe(
        "finetuning", "One shot against fine-tuned", "Figure B4", scale, tasks,
        curvatures=_curvatures(scale, tasks), stages=(Stage(), tuned),
    )  # fmt: skip


def _online(scale: str) -> Recipe:
    tasks = _tasks(scale, "fcn-cancer", "fcn-mnist", "lenet-mnist", "lenet-fashion", "lenet-cifar10")
    return Recipe(
        "online", "Online against post hoc", "Figure B5", scale, tasks, curvatures=_curvatures(scale, tasks),
        stages=(Stage(), Stage("online", ("opd", "magnitude"), _FEW_SPARSITIES)),
    )  # fmt: skip


def _record(name: str, task: str, *compressions: float) -> Callable[[str], Recipe]:
    """Pruning to the published compressions, all weights and biases counted, in one training from random weights.

    Weights and biases are removed until half of the training, and δ is learned as long. Then the masks are held, and
    the remaining weights leave the learned prior. Small batches are better here: more steps per epoch.
    """
    sparsities = tuple(1 - 1 / times for times in compressions)

    def make(scale: str) -> Recipe:
        online = {"biases": True, "debias": True, "start": 0.05, "end": 0.5}
        spam = {"burn_in": 0.05, "freeze": 0.5}
        chosen = replace(TASKS[task, scale], note="", source="mc", batch_size=64, spam=spam, online=online)
        return Recipe(
            name, f"Highest compression: {chosen.title}", "not there", scale, (chosen,),
            methods=("spam", "map", "vd", "l0"), stages=(Stage("online", ("opd", "magnitude"), sparsities),),
            curves=False,
        )  # fmt: skip

    return make


def _lasso(scale: str) -> Recipe:
    tasks = _tasks(scale, "fcn-mnist", "lenet-mnist")
    return Recipe(
        "l1", "L1 against SpaM and MAP", "Figure B6", scale, tasks,
        methods=("map", "spam", "l1"), curvatures=_curvatures(scale, tasks),
    )  # fmt: skip


def _structured(scale: str) -> Recipe:
    tasks = _tasks(scale, "fcn-cancer", "fcn-mnist", "lenet-mnist", "lenet-fashion")
    return Recipe(
        "structured", "Structured pruning and its Pareto front: accuracy over FLOPs and bytes", "Figures 5 and 6",
        scale, tasks, priors=("unit",), curvatures=_curvatures(scale, tasks), stages=(_STRUCTURED,),
    )  # fmt: skip


def _compression(scale: str) -> Recipe:
    tasks = _tasks(scale, "fcn-cancer", "lenet-fashion")
    return Recipe(
        "compression", "Compression: bytes and FLOPs, structured beside unstructured", "Figures B11 and B12",
        scale, tasks, methods=("spam",), priors=("parameter", "unit"), curvatures=_curvatures(scale, tasks),
        stages=(Stage(), _STRUCTURED),
    )  # fmt: skip


def _runtime(scale: str) -> Recipe:
    """Times are those of cells side by side, as always; ``--processes 1`` gives each the machine for itself."""
    tasks = _tasks(scale, "fcn-mnist", "lenet-mnist", "vit-mnist")
    if scale == "cpu":
        tasks = tuple(replace(task, epochs=3, note=f"3 epochs, to time them; {task.note}") for task in tasks)
    return Recipe(
        "runtime", "Run time of MAP, EF, GGN and KFAC, and of each criterion", "Table D5, Figure D13", scale, tasks,
        curvatures=("diag-mc", "diag-ef", "diag-ggn", "kron-mc", "kron-ggn"), seeds=1,
        stages=(Stage(sparsities=(0.95,)),), curves=False,
    )  # fmt: skip


def _curves(scale: str) -> Recipe:
    tasks = _tasks(scale, "fcn-mnist", "lenet-mnist", "lenet-fashion")
    return Recipe(
        "curves", "Training curves of MAP and SpaM under all priors and curvatures", "Figure B1", scale, tasks,
        priors=_ALL_PRIORS, curvatures=_curvatures(scale, tasks, ("diag", "kron")),
    )  # fmt: skip


def _filters(scale: str) -> Recipe:
    tasks = _tasks(scale, "lenet-fashion")
    return Recipe(
        "filters", "Pictures of filters and neurons at 95 %, parameter-wise and unit-wise", "Figure B10", scale, tasks,
        priors=("parameter", "unit"), curvatures=_curvatures(scale, tasks), seeds=1,
    )  # fmt: skip


def _demo(scale: str) -> Recipe:
    cancer, digits = _tasks(scale, "demo-cancer", "demo-digits")
    structured = Stage("structured", ("opd", "magnitude", "random"), (0.3, 0.5, 0.6, 0.7, 0.8))
    own = {"methods": ("spam",), "priors": ("unit",), "seeds": 1, "stages": (structured,)}
    units = replace(digits, name="demo-units", title=f"{digits.title}, whole units removed", own=own)
    stage = Stage(sparsities=tuple(sorted((*PAPER_SPARSITIES, 0.98))))
    tasks = (digits, units, cancer)  # the longest trainings first: no core is idle at the end
    return Recipe("demo", "Two small networks, pruned", "not there", scale, tasks, stages=(stage,), curves=False)


_RECIPES: dict[str, Callable[[str], Recipe]] = {
    "demo": _demo,
    "fcn-cancer": _unstructured("fcn-cancer", "Figure 2", seeds=20),
    "fcn-mnist": _unstructured("fcn-mnist", "Figure 2"),
    "lenet-mnist": _unstructured("lenet-mnist", "Figure 2, Table B1"),
    "lenet-fashion": _unstructured("lenet-fashion", "Figure 2"),
    "lenet-cifar10": _unstructured("lenet-cifar10", "Figure 2"),
    "mixer-mnist": _unstructured("mixer-mnist", "Figure 2, Table B2"),
    "resnet-cifar10": _unstructured("resnet-cifar10", "Table 1, Figure 2"),
    "wrn-cifar10": _unstructured("wrn-cifar10", "Figure B7"),
    "wrn-cifar100": _unstructured("wrn-cifar100", "Figure B7"),
    "vit-mnist": _unstructured("vit-mnist", "Figure B8"),
    "distilbert-imdb": _language("distilbert-imdb", "DistilBERT on IMDB, Table D4"),
    "gpt2-imdb": _language("gpt2-imdb", "GPT-2 on IMDB, Table D4", methods=("map",)),
    "minilm-imdb": _language("minilm-imdb", "stands in for DistilBERT on IMDB"),
    "small-gpt-imdb": _language("small-gpt-imdb", "stands in for GPT-2 on IMDB"),
    "small-gpt-words": _language("small-gpt-words", "not there"),
    "record-300-100": _record("record-300-100", "lenet-300-100", 68, 100),
    "record-caffe": _record("record-caffe", "lenet-caffe", 280, 400),
    "record-lenet": _record("record-lenet", "lenet-mnist", 100),
    "priors": _priors,
    "uncertainty": _uncertainty,
    "finetuning": _finetuning,
    "online": _online,
    "l1": _lasso,
    "structured": _structured,
    "compression": _compression,
    "runtime": _runtime,
    "curves": _curves,
    "filters": _filters,
}


def recipe_names() -> list[str]:
    """The names of all recipes."""
    return list(_RECIPES)


def get_recipe(name: str, scale: str = "cpu") -> Recipe:
    """A recipe by its name.

    Raises:
        ValueError: Unknown name or scale, with the nearest match.
    """
    return _RECIPES[check_name("recipe", name, _RECIPES)](check_name("scale", scale, SCALES))
