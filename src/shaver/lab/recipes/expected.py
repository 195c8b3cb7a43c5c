"""How long a recipe takes on two cores, from what one epoch and one pass over the test data were measured to take."""

from shaver.lab.recipes.grid import Cell, cells_of
from shaver.lab.recipes.recipe import Recipe, Task

#: Seconds of an epoch over those of a MAP epoch, by structure and source, as measured for LeNet.
_RATIOS = {"": 1.0, "diag-mc": 1.1, "diag-ef": 1.1, "diag-ggn": 5.1, "kron-mc": 3.0, "kron-ef": 3.0, "kron-ggn": 5.1}
#: A process imports torch and reads its data.
_START = 5.0
#: A search for λ trains five networks for a third of the epochs.
_SEARCH = 5 / 3


def expected_seconds(recipe: Recipe, cores: int = 2) -> float | None:
    """Wall time with nothing done before; ``None`` where a task was never timed."""
    tasks = {task.name: task for task in recipe.tasks}
    if not all(task.epoch_seconds for task in recipe.tasks):
        return None
    trainings: dict[str, float] = {}
    total = 0.0
    for cell in cells_of(recipe):
        trainings[cell.training.key] = _training(cell, tasks[cell.task])
        total += _START + _evaluation(cell, tasks[cell.task])
    return (total + sum(trainings.values())) / cores


def _training(cell: Cell, task: Task) -> float:
    labels = cell.training.labels
    ratio = _RATIOS[f"{labels['structure']}-{labels['source']}".strip("-")]
    epochs = task.epochs * (1 + _SEARCH if labels["method"] == "l1" else 1)
    return epochs * (task.epoch_seconds * ratio + (task.pass_seconds if cell.training.curves else 0))


def _evaluation(cell: Cell, task: Task) -> float:
    stage = cell.stage
    points = len(stage.sparsities) * (1 if stage.name == "online" else len(stage.criteria))
    # GraSP is the dearest score: 3.6 epochs of LeNet; the others together take about one.
    # Language models score on some of their texts.
    share = 1.0 if task.length is None or task.samples is None else min(1.0, task.scored / task.samples)
    scores = 0.0 if stage.name == "online" else 5 * share * task.epoch_seconds
    return scores + points * (task.pass_seconds + stage.epochs * task.epoch_seconds)
