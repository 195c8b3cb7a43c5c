"""The report page: a template, a style sheet and a script from this folder, filled with numbers and tables."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shaver import __version__
from shaver.lab.report.figures import COLOURS, COSTS, changes_cost, main_curves, varying_costs
from shaver.lab.report.frame import QUANTITIES, Curve, Estimate, Experiment, training_curves
from shaver.lab.report.names import CRITERION_NAMES, METHOD_NAMES, METRICS, STAGE_NAMES, in_order
from shaver.lab.report.page.parts import bars, card, facts, html_table, panel, picture, section
from shaver.lab.report.tables import (
    failure_notes,
    kept,
    percent,
    quality_table,
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
#: The entries of a ``study.json`` that the page shows, and their names there.
_FACTS = {
    "seeds": "seeds", "versions": "versions", "machine": "machine", "started": "started", "seconds": "seconds in all",
    "code": "code",
}  # fmt: skip
_SHORT = {
    "accuracy": "accuracy", "nll": "negative log likelihood", "ece": "calibration error", "brier": "Brier score",
}  # fmt: skip
#: The methods in words a newcomer understands.
_TRAINED = {
    "map": "MAP (weight decay)",
    "l1": "L1",
    "spam": "SpaM (learned prior)",
    "vd": "Sparse VD",
    "l0": "L0 gates",
}


@dataclass(frozen=True)
class Source:
    """A run folder: where it is, what its ``study.json`` says, and the pictures in it."""

    folder: Path
    study: Mapping[str, Any] = field(default_factory=dict)
    pictures: Sequence[Path] = ()

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The recipe of the run; empty if the run does not say."""
        found = self.study.get("recipe")
        return found if isinstance(found, Mapping) else {"name": found} if found else {}

    @property
    def name(self) -> str:
        """The recipe's name, or the folder's."""
        return str(self.recipe.get("name") or self.folder.resolve().name)


def render_page(
    experiments: Sequence[Experiment], histories: "DataFrame", sources: Sequence[Source], scale: str
) -> str:
    """The whole page as text.

    Args:
        experiments: What was measured.
        histories: Training curves.
        sources: The runs behind it.
        scale: ``"cpu"`` or ``"paper"``.

    Returns:
        At most :data:`LIMIT` bytes: from a larger page, first the tables of all measures but accuracy are left out,
        then the pictures; the page says so.

    Raises:
        ValueError: Even so it is too large.
    """
    for fewer, bare in ((False, False), (True, False), (True, True)):
        page = _render(experiments, histories, sources, scale, fewer, bare)
        if len(page.encode()) <= LIMIT:
            return page
    raise ValueError(f"a page of {len(experiments)} experiments is larger than {LIMIT:,} bytes; report them apart.")


def _render(
    experiments: Sequence[Experiment],
    histories: "DataFrame",
    sources: Sequence[Source],
    scale: str,
    fewer_tables: bool,
    no_pictures: bool,
) -> str:
    assets = files("shaver.lab.report.page")
    parts = {
        "curves": ("Accuracy", _curves(experiments)),
        "size": ("Size and speed", _sizes(experiments)),
        "pareto": ("Cost", _pareto(experiments)),
        "training": ("Training", _training(experiments, histories)),
        "tables": ("Tables", _tables(experiments, fewer_tables)),
        "pictures": ("Filters", _pictures(sources, 0 if no_pictures else _PICTURES)),
        "times": ("Times", _times(experiments)),
        "reproduce": ("Reproduce", _reproduce(sources)),
    }
    shown = {key: part for key, part in parts.items() if part[1]}
    title = _heading(experiments, sources)
    values = {
        "title": escape(f"{title} · shaver"),
        "version": escape(__version__),
        "nav": "".join(f'<a href="#{key}">{name}</a>' for key, (name, _) in shown.items()),
        "header": _header(title, experiments, sources, scale),
        "sections": "\n".join(text for _, text in shown.values()),
        "sources": escape(", ".join(dict.fromkeys(source.folder.name or str(source.folder) for source in sources))),
        "data": _json(_data(experiments, histories)),
        "css": (assets / "page.css").read_text(encoding="utf-8"),
        "script": (assets / "page.js").read_text(encoding="utf-8"),
    }
    page = (assets / "template.html").read_text(encoding="utf-8")
    pieces = page.split("{{")  # once through the template: values that contain braces stay as they are
    out = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        out += [values[name], rest]
    return "".join(out)


def _heading(experiments: Sequence[Experiment], sources: Sequence[Source]) -> str:
    titles = list(dict.fromkeys(str(source.recipe.get("title") or "") for source in sources))
    if len(experiments) == 1:
        return experiments[0].title
    if len(titles) == 1 and titles[0]:
        return titles[0]
    return "How much of these networks can be removed?"


def _header(title: str, experiments: Sequence[Experiment], sources: Sequence[Source], scale: str) -> str:
    networks = sum(e.networks for e in experiments)
    methods = in_order((t.method for e in experiments for t in e.variants), METHOD_NAMES)
    criteria = in_order(c for e in experiments for c in e.criteria)
    sparsities = {s for e in experiments for s in e.sparsities()}
    trained = " and ".join(", ".join(_TRAINED.get(m, m) for m in methods).rsplit(", ", 1))
    lead = (
        f"{networks} networks, trained by {trained}, pruned by {_count(len(criteria), 'criterion', 'criteria')} to "
        f"{_count(len(sparsities), 'sparsity', 'sparsities')} of up to {percent(max(sparsities, default=0.0))} %, "
        "and measured on test data each time."
    )
    notes = [
        f"{task['title']}: {task['note']}"
        for source in sources
        for task in source.recipe.get("tasks") or ()
        if isinstance(task, Mapping) and task.get("note")
    ]
    listed = "".join(f"<li>{escape(note)}</li>" for note in dict.fromkeys(notes))
    about = {
        "cpu": "This is <b>cpu scale</b>: small enough for two cores, and not the paper’s setting.",
        "paper": "This is <b>paper scale</b>: the hyper-parameters of the paper.",
    }.get(scale, f"Scale: <b>{escape(scale)}</b>.")
    failed = [f"{e.title}: {note}" for e in experiments for note in failure_notes(e)]
    warning = ""
    if failed:
        items = "".join(f"<li>{escape(note)}</li>" for note in failed)
        warning = f'<div class="warning" role="alert"><p>Some networks did not learn.</p><ul>{items}</ul></div>'
    cards = [text for e in experiments if (text := _card(e))]
    summary = ""
    if cards:
        summary = (
            '<h3 class="of-cards">Share that can be removed before accuracy falls by more than one point</h3>'
            f'<div class="cards">{"".join(cards)}</div>'
        )
    return (
        f'<header id="top"><p class="eyebrow">shaver study</p><h1>{escape(title)}</h1>'
        f'<p class="lead">{escape(lead)}</p>'
        f'<div class="scale"><p>{about}</p>{f"<ul>{listed}</ul>" if listed else ""}</div>{warning}</header>{summary}'
    )


def _card(experiment: Experiment) -> str:
    reached = kept(experiment)
    criterion = experiment.main_criterion
    failures = {v.method: str(f) for v, f in experiment.failures.items() if v in experiment.main_variants()}
    if not reached and not failures:
        return ""
    return card(experiment.title, CRITERION_NAMES.get(criterion, criterion), reached, failures)


def _curves(experiments: Sequence[Experiment]) -> str:
    if not any(e.curves for e in experiments):
        return ""
    controls = [
        ("select", "experiment", "Network", "half"),
        ("chips", "method", "Trained by", "half"),
        ("chips", "metric", "Measure", ""),
        ("chips", "stage", "Pruned", "half"),
        ("chips", "criterion", "Ranked by", ""),
        ("chips", "prior", "SpaM’s prior", ""),
        ("chips", "curvature", "Curvature", ""),
        ("colour", "colour", "Colour by", "half"),
    ]
    hint = (
        "Bands are standard errors over seeds. Point at a curve, or focus the picture and use the arrow keys, to read "
        "values. The axis is logarithmic in the share that is kept."
    )
    return section(
        "curves",
        "Accuracy over sparsity",
        "Test accuracy after the given share of the weights was removed. A curve that stays high prunes well.",
        panel("curves", controls, hint),
    )


def _sizes(experiments: Sequence[Experiment]) -> str:
    found = [size_table(experiment) for experiment in experiments if experiment.criteria]
    tables = "".join(html_table(table) for table in found if table is not None)
    text = "Removing single weights makes the file smaller; removing whole units makes the network faster as well."
    return section("size", "Size and speed", text, tables) if tables else ""


def _pareto(experiments: Sequence[Experiment]) -> str:
    if not any(varying_costs(e) for e in experiments):
        return ""
    return section(
        "pareto",
        "Quality against cost",
        "Each mark is a pruned network; filled marks are trained by SpaM. Better networks are further up and left.",
        panel(
            "pareto",
            [
                ("select", "experiment", "Network", "half"),
                ("chips", "cost", "Cost", "half"),
                ("chips", "criterion", "Ranked by", ""),
            ],
            "Networks more than 15 points below the best accuracy are left out.",
        ),
    )


def _training(experiments: Sequence[Experiment], histories: "DataFrame") -> str:
    if not any(training_curves(e, histories) for e in experiments):
        return ""
    controls = [("select", "experiment", "Network", "half"), ("chips", "quantity", "Show", "")]
    return section(
        "training",
        "While training",
        "Means over seeds. SpaM learns from the log evidence how many weights the data need.",
        panel("training", controls, ""),
    )


def _tables(experiments: Sequence[Experiment], left_out: bool) -> str:
    out, more = [], []
    for experiment in experiments:
        for metric in METRICS:
            if (table := quality_table(experiment, metric)) is None:
                continue
            if metric is METRICS[0]:
                out.append(html_table(table))
            else:
                more.append(f"<details><summary>{escape(table.title)}</summary>{html_table(table)}</details>")
    if left_out:
        more = [f'<p class="note">{escape(", ".join(m.title for m in METRICS[1:]))}: too long for this page.</p>']
    text = "Bold is the best of a column, shaded the best training for a criterion. Below each mean its standard error."
    return section("tables", "Tables", text, "".join([*out, *more])) if out or more else ""


def _pictures(sources: Sequence[Source], room: int) -> str:
    shown, left, used = [], [], 0
    for path in (path for source in sources for path in source.pictures):
        size = path.stat().st_size
        if used + size * 4 // 3 > room:
            left.append(path.name)
            continue
        used += size * 4 // 3
        shown.append(picture(path))
    if not shown and not left:
        return ""
    rest = f'<p class="note">Too large for this page: {escape(", ".join(left))}.</p>' if left else ""
    text = "One network before and after pruning."
    return section("pictures", "Filters", text, f'<div class="pictures">{"".join(shown)}</div>{rest}')


def _times(experiments: Sequence[Experiment]) -> str:
    trained, scored = training_times(experiments), scoring_times(experiments)
    out = []
    if trained.bars:
        slots = {"map": 7, "l1": 2, "spam": 0, "vd": 3, "l0": 4}
        rows = [(label, found, slots.get(kind, 8)) for label, found, kind in trained.bars]
        out.append(f"<h3>{escape(trained.title)}</h3>{bars(rows, trained.show)}")
    if scored.bars:
        rows = [(label, found, _slot(kind)) for label, found, kind in scored.bars]
        out.append(f"<h3>{escape(scored.title)}</h3>{bars(rows, scored.show)}")
    tables = [training_table(experiments), scoring_table(experiments)]
    out += [html_table(table) for table in tables if table is not None]
    return section("times", "Times", "Measured on the machine named below.", "".join(out)) if out else ""


def _reproduce(sources: Sequence[Source]) -> str:
    out = []
    for source in sources:
        heading = f"<h3>{escape(source.name)}</h3>" if len(sources) > 1 else ""
        command = source.study.get("command")
        if isinstance(command, list | tuple) and command:
            command = shlex.join([Path(str(command[0])).name, *map(str, command[1:])])
        code = f"<pre><code>{escape(str(command))}</code></pre>" if command else ""
        known = {key: source.study[key] for key in _FACTS if source.study.get(key)}
        if isinstance(known.get("machine"), Mapping):
            known["machine"] = {key: value for key, value in known["machine"].items() if key != "host"}
        out.append(heading + code + facts({_FACTS[key]: value for key, value in known.items()}))
        if source.recipe:
            text = escape(json.dumps(source.recipe, indent=2, ensure_ascii=False, default=str))
            out.append(f"<details><summary>Every setting of {escape(source.name)}</summary><pre>{text}</pre></details>")
    text = "The same seeds give the same numbers on the same versions."
    return section("reproduce", "How to reproduce", text, "".join(out))


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
        "criteria": {c: {"name": CRITERION_NAMES.get(c, c), "slot": _slot(c)} for c in criteria},
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


def _slot(criterion: str) -> int:
    return list(COLOURS).index(criterion) if criterion in COLOURS else len(COLOURS)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _json(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
