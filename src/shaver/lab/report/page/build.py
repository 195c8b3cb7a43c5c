"""The report page: a template, a style sheet and a script from this folder, filled with numbers and tables."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined

from shaver import __version__
from shaver.lab.report.canvas import COLOURS
from shaver.lab.report.figures import COSTS, changes_cost, main_curves, varying_costs
from shaver.lab.report.frame import QUANTITIES, Curve, Estimate, Experiment, training_curves
from shaver.lab.report.names import CRITERION_NAMES, METHOD_NAMES, METRICS, STAGE_NAMES, Names, in_order
from shaver.lab.report.tables import (
    failure_notes,
    percent,
    quality_table,
    removable,
    scoring_table,
    size_table,
    training_table,
)
from shaver.lab.report.times import scoring_times, training_times

if TYPE_CHECKING:
    from pandas import DataFrame

#: Bytes of the whole page.
LIMIT = 3_000_000
#: Bytes of all pictures together; those beyond are named.
_PICTURES = 1_500_000
#: The entries of a ``study.json`` that the page shows.
_FACTS = ("seeds", "versions", "machine", "started", "seconds", "code")
_SHORT = {
    "accuracy": "accuracy", "nll": "negative log likelihood", "ece": "calibration error", "brier": "Brier score",
}  # fmt: skip
#: The methods in words a newcomer understands, and their colours in bars.
_TRAINED = Names(METHOD_NAMES | {"map": "MAP (weight decay)", "spam": "SpaM (learned prior)", "l0": "L0 gates"})
_METHOD_SLOTS = {"map": 7, "l1": 2, "spam": 0, "vd": 3, "l0": 4}
#: What the pictures of the demo show; other pictures are named after their files.
_CAPTIONS = {
    "filters": "The weights of each layer: red is positive, blue is negative, black is removed.",
    "layers": "What remains of each layer: the outputs that still have a weight, and the share of weights removed.",
    "precision": "The learned prior precision δ per layer. The data do not need weights with a large δ.",
}


@dataclass(frozen=True)
class RunFolder:
    """A run folder: where it is, what its ``study.json`` says, and the pictures in it."""

    folder: Path
    study: Mapping[str, Any]
    pictures: Sequence[Path]

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The recipe of the run."""
        recipe: Mapping[str, Any] = self.study["recipe"]
        return recipe


def render_page(
    experiments: Sequence[Experiment], histories: "DataFrame", sources: Sequence[RunFolder], scale: str
) -> str:
    """The whole page as text of at most :data:`LIMIT` bytes.

    From a larger page, first the tables of all measures but accuracy are left out, then the pictures. The page says so.
    """
    assets = files("shaver.lab.report.page")
    texts = {name: (assets / name).read_text(encoding="utf-8") for name in ("template.html", "page.css", "page.js")}
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(texts["template.html"])
    values = _header(experiments, sources) | _tables(experiments) | {
        "version": __version__, "scale": scale, "methods": METHOD_NAMES, "percent": percent, "slot": _slot,
        "runs": list(map(_run, sources)), "folders": ", ".join(dict.fromkeys(source.folder.name for source in sources)),
        "data": _json(_data(experiments, histories)), "css": texts["page.css"], "script": texts["page.js"],
    }  # fmt: skip
    for fewer_tables, room in ((False, _PICTURES), (True, _PICTURES), (True, 0)):
        pictures = _pictures(sources, room)
        parts = {
            "curves": ("Accuracy", any(e.curves for e in experiments)),
            "size": ("Size and speed", values["sizes"]),
            "pareto": ("Cost", any(varying_costs(e) for e in experiments)),
            "training": ("Training", any(training_curves(e, histories) for e in experiments)),
            "tables": ("Tables", values["accuracies"] or values["others"]),
            "pictures": ("Filters", pictures["pictures"] or pictures["too_large"]),
            "times": ("Times", values["bars"] or values["durations"]),
            "reproduce": ("Reproduce", True),
        }
        sections = {key: name for key, (name, is_shown) in parts.items() if is_shown}
        page = template.render(values, **pictures, sections=sections, fewer_tables=fewer_tables)
        if len(page.encode()) <= LIMIT:
            return page
    raise ValueError(
        f"a page of {len(experiments)} experiments is larger than {LIMIT:,} bytes; report them separately."
    )


def _header(experiments: Sequence[Experiment], sources: Sequence[RunFolder]) -> dict[str, Any]:
    titles = {source.recipe["title"] for source in sources}
    title = titles.pop() if len(titles) == 1 else "How much of these networks can be removed?"
    methods = in_order((t.method for e in experiments for t in e.variants), METHOD_NAMES)
    criteria = in_order(c for e in experiments for c in e.criteria)
    sparsities = {s for e in experiments for curve in e.curves for s in curve.points if s > 0}
    trained = " and ".join(", ".join(_TRAINED[m] for m in methods).rsplit(", ", 1))
    lead = (
        f"{sum(e.networks for e in experiments)} networks, trained by {trained}, "
        f"pruned by {_count(len(criteria), 'criterion', 'criteria')} "
        f"to {_count(len(sparsities), 'sparsity', 'sparsities')} "
        f"of up to {percent(max(sparsities, default=0.0))} %, and measured on test data."
    )
    tasks = [task for source in sources for task in source.recipe["tasks"]]
    cards = []
    for e in experiments:
        failures = {v.method: str(f) for v, f in e.failures.items() if v in e.main_variants()}
        if (reached := removable(e)) or failures:
            cards.append({"title": e.title, "reached": reached, "failures": failures})
    return {
        "title": experiments[0].title if len(experiments) == 1 else title,
        "lead": lead,
        "notes": list(dict.fromkeys(f"{task['title']}: {task['note']}" for task in tasks if task.get("note"))),
        "failed": [f"{e.title}: {note}" for e in experiments for note in failure_notes(e)],
        "cards": cards,
        "repaired": any("repaired" in e.stages for e in experiments),
    }


def _tables(experiments: Sequence[Experiment]) -> dict[str, Any]:
    """The tables and bars of the page, without those that would be empty."""
    tables = {
        "sizes": [size_table(e) for e in experiments if e.criteria],
        "accuracies": [quality_table(e, METRICS[0]) for e in experiments],
        "others": [quality_table(e, metric) for e in experiments for metric in METRICS[1:]],
        "durations": [training_table(experiments), scoring_table(experiments)],
    }
    found: dict[str, Any] = {key: [table for table in those if table is not None] for key, those in tables.items()}
    found["bars"] = [times for times in (training_times(experiments), scoring_times(experiments)) if times.bars]
    return found | {"other_metrics": ", ".join(metric.title for metric in METRICS[1:])}


def _pictures(sources: Sequence[RunFolder], room: int) -> dict[str, Any]:
    """Captions and contents of the pictures that fit, as images: nothing in them runs, and their ids stay their own."""
    shown, left = [], []
    for path in (path for source in sources for path in source.pictures):
        encoded = base64.b64encode(path.read_bytes()).decode()
        if len(encoded) > room:
            left.append(path.name)
            continue
        room -= len(encoded)
        shown.append((_CAPTIONS.get(path.stem, path.stem.replace("-", " ").replace("_", " ")), encoded))
    return {"pictures": shown, "too_large": left}


def _run(source: RunFolder) -> dict[str, Any]:
    """How a run is reproduced: its command, what it was made with, and its recipe."""
    known = {key: source.study[key] for key in _FACTS if source.study.get(key)}
    known["machine"] = {key: value for key, value in source.study["machine"].items() if key != "host"}
    facts = {"total seconds" if key == "seconds" else key: _plain(value) for key, value in known.items()}
    recipe = json.dumps(source.recipe, indent=2, ensure_ascii=False)
    return {"name": source.recipe["name"], "command": source.study["command"], "facts": facts, "recipe": recipe}


def _plain(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items() if inner not in (None, "", [], {}))
    return ", ".join(map(_plain, value)) if isinstance(value, list | tuple) else str(value)


def _data(experiments: Sequence[Experiment], histories: "DataFrame") -> dict[str, Any]:
    criteria = in_order(c for e in experiments for c in e.criteria)
    return {
        "metrics": [
            {"key": m.key, "title": m.title, "name": _SHORT[m.key], "factor": m.factor, "digits": m.digits}
            for m in METRICS
        ],
        "methods": METHOD_NAMES,
        "trained": _TRAINED,
        "first": _most_telling(experiments),
        "stages": STAGE_NAMES,
        "criteria": {c: {"name": CRITERION_NAMES[c], "slot": _slot(c)} for c in criteria},
        "costs": COSTS,
        "quantities": QUANTITIES,
        "experiments": [_experiment_data(e, histories) for e in experiments],
    }


def _most_telling(experiments: Sequence[Experiment]) -> int:
    """The experiment that is shown first: the one in which SpaM is furthest ahead of MAP."""

    def lead(experiment: Experiment) -> float:
        found = {c.variant.method: c.values("accuracy") for c in reversed(main_curves(experiment))}
        ours, theirs = found.get("spam", {}), found.get("map", {})
        return sum(ours[s].mean - theirs[s].mean for s in ours if s in theirs)

    return max(range(len(experiments)), key=lambda i: (bool(experiments[i].curves), lead(experiments[i])), default=0)


def _experiment_data(experiment: Experiment, histories: "DataFrame") -> dict[str, Any]:
    costs = varying_costs(experiment)
    trained = training_curves(experiment, histories)
    return {
        "title": experiment.title,
        "main": experiment.main_criterion,
        "stages": experiment.stages,
        "several": len(experiment.variants) > len(experiment.main_variants()),
        "costs": costs,
        "curves": [_curve_data(curve, costs) for curve in experiment.curves],
        "histories": [
            {
                "label": variant.label(list(trained)),
                "method": variant.method,
                "y": {key: [[epoch, _round(value)] for epoch, value in curve] for key, curve in found.items()},
            }
            for variant, found in trained.items()
        ],
    }


def _curve_data(curve: Curve, costs: Sequence[str]) -> dict[str, Any]:
    spam = curve.variant.method == "spam"
    return {
        "method": curve.variant.method,
        "criterion": curve.criterion,
        "prior": curve.variant.prior_name if spam else "",
        "curvature": curve.variant.curvature_name if spam else "",
        "stage": curve.stage,
        "x": list(curve.points),
        "y": {
            key: [_pair(point.get(key)) for point in curve.points.values()]
            for key in (*(m.key for m in METRICS), *(key for key in costs if changes_cost(curve, key)))
            if curve.values(key)
        },
    }


def _pair(found: Estimate | None) -> list[float | None] | None:
    return None if found is None else [_round(found.mean), None if found.error is None else _round(found.error)]


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def _slot(kind: str) -> int:
    """The colour of a criterion or method."""
    return _METHOD_SLOTS.get(kind, list(COLOURS).index(kind) if kind in COLOURS else len(COLOURS))


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _json(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
