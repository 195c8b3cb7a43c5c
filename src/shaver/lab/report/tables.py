"""The tables of a report: their labels, columns and entries, in the layout of the paper."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shaver.lab.report.frame import Curve, Estimate, Experiment, Variant
from shaver.lab.report.names import CRITERION_NAMES, METHOD_NAMES, STAGE_NAMES, Metric, in_order
from shaver.lab.report.times import duration, numbers_of, scoring_seconds, time_over_map


@dataclass(frozen=True)
class Entry:
    """A number in a table."""

    text: str  # as it is printed
    short: str = ""  # the same for a narrow terminal
    error: str = ""  # the standard error as it is printed; empty for a single seed
    value: float | None = None  # the number itself, for programs; None in an empty cell
    spread: float | None = None  # the standard error itself
    best: bool = False  # nothing in its column prints better
    leads: bool = False  # the best training for its criterion, where there are several


EMPTY = Entry("–", "–")
_VARIANT = ("training", "prior", "curvature")
#: The columns of numbers that stand side by side: their titles, and how a value is written.
_MEASURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "accuracy": ("accuracy, %", lambda v: f"{100 * v:.2f}"),
    "nll": ("NLL", "{:.3f}".format),
    "log_evidence": ("log evidence", "{:,.0f}".format),
    "epochs": ("epochs", "{:.0f}".format),
    "train_seconds": ("training", duration),
    "parameters": ("parameters", "{:,.0f}".format),
    "nonzeros": ("non-zero", "{:,.0f}".format),
    "bytes": ("bytes", "{:,.0f}".format),
    "flops": ("FLOPs", "{:,.0f}".format),
    "latency_ms": ("latency, ms", "{:.3f}".format),
}


@dataclass(frozen=True)
class Line:
    """One line: its labels, then an entry for each column."""

    labels: tuple[str, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Table:
    """Labels and numbers, for every format."""

    name: str  # for file names
    title: str  # says what the numbers are
    note: str  # how to read them
    heads: tuple[str, ...]  # titles of the label columns; lines that share the first label belong together
    columns: tuple[str, ...]  # titles of the entries
    lines: tuple[Line, ...]
    over: str = ""  # what the columns have in common, such as “sparsity, %”


#: Labels of a line, its measures, and its entry in the last column.
_Row = tuple[tuple[str, ...], Mapping[str, Estimate], Entry]


def percent(share: float) -> str:
    """A sparsity as the head of a column: 0.995 → “99.5”."""
    return f"{round(100 * share, 2):g}"


def quality_table(experiment: Experiment, metric: Metric) -> Table | None:
    """Lines for criterion × training (× prior × curvature × stage), columns for sparsities, as in the paper.

    Labels that are the same on every line are left out. Returns ``None`` if nothing has the metric.
    """
    found = [curve for curve in experiment.curves if curve.values(metric.key)]
    if not found:
        return None
    curves = sorted(found, key=lambda c: experiment.criteria.index(c.criterion))  # stable: one group per criterion
    sparsities = sorted({s for curve in curves for s in curve.values(metric.key)})
    lines = [
        Line(
            (
                CRITERION_NAMES[curve.criterion],
                *_training_labels(experiment, curve.variant),
                STAGE_NAMES[curve.stage],
            ),
            tuple(_entry(curve.values(metric.key).get(s), metric) for s in sparsities),
        )
        for curve in curves
    ]
    table = Table(
        name=f"{experiment.slug}-{metric.key}",
        title=f"{experiment.title}: {metric.title}",
        note=_note(
            _averaged(sorted({e.count for curve in curves for e in curve.values(metric.key).values()})), [experiment]
        ),
        heads=("criterion", *_VARIANT, "stage"),
        columns=tuple("dense" if s == 0 else percent(s) for s in sparsities),
        over="sparsity, %",
        lines=tuple(_marked(lines, metric)),
    )
    return _without_constant_labels(table, keep=2)


def kept(experiment: Experiment, stage: str | None = None, drop: float = 0.01) -> dict[str, float]:
    """By method, the highest sparsity up to which accuracy stays within ``drop`` of the dense network's.

    The networks are pruned by the main criterion, in the given stage or the first one. A curve that rises again after
    a fall does not count.
    """
    found: dict[str, float] = {}
    for variant in experiment.main_variants():
        if variant in experiment.failures and experiment.failures[variant].is_total:
            continue
        wanted = (variant, experiment.main_criterion)
        own = [c for c in experiment.curves if (c.variant, c.criterion) == wanted and stage in (None, c.stage)]
        if values := next((values for curve in own if 0.0 in (values := curve.values("accuracy"))), {}):
            least = values[0.0].mean - drop - 1e-9
            fall = next((place for place, point in enumerate(values.values()) if point.mean < least), len(values))
            found[variant.method] = list(values)[fall - 1]
    return found


def removable(experiment: Experiment) -> dict[str, dict[str, float]]:
    """How the networks were pruned → :func:`kept`. Networks that were also repaired come last."""
    criterion = CRITERION_NAMES[experiment.main_criterion]
    found = {criterion: kept(experiment)}
    if "repaired" in experiment.stages[1:]:
        found[f"{criterion}, {STAGE_NAMES['repaired']}"] = kept(experiment, "repaired")
    return {how: reached for how, reached in found.items() if reached}


def summary_table(experiments: Sequence[Experiment]) -> Table | None:
    """One line per experiment and way of pruning: how much can be removed."""
    found = [(e.title, how, reached) for e in experiments for how, reached in removable(e).items()]
    methods = in_order((method for _, _, reached in found for method in reached), METHOD_NAMES)
    if not methods:
        return None
    lines = tuple(
        Line(
            (title, how),
            tuple(Entry(f"{percent(reached[m])} %", value=reached[m]) if m in reached else EMPTY for m in methods),
        )
        for title, how, reached in found
    )
    return Table(
        name="summary",
        title="Share of weights that can be removed before accuracy falls by more than one point",
        note=_note(
            "The highest measured sparsity at which mean accuracy stays within one point of the dense network’s.",
            experiments,
        ),
        heads=("experiment", "pruned by"),
        columns=tuple(METHOD_NAMES[m] for m in methods),
        lines=lines,
    )


def training_table(experiments: Sequence[Experiment]) -> Table | None:
    """Each training with its time, its evidence and the quality of the dense network."""
    rows: list[_Row] = []
    for experiment, variant in ((e, v) for e in experiments for v in e.variants):
        ratio = time_over_map(experiment, variant)
        entry = EMPTY if ratio is None else Entry(f"{ratio:.2f}", value=ratio)
        labels = (experiment.title, *_training_labels(experiment, variant))
        rows.append((labels, numbers_of(experiment, variant), entry))
    if not any("train_seconds" in numbers for _, numbers, _ in rows):
        return None
    table = _side_by_side(
        rows,
        ("accuracy", "nll", "log_evidence", "epochs", "train_seconds"),
        last="time / MAP",
        name="training",
        title="Training: quality before pruning, and time",
        note=_note("Means over seeds. The last column is the time relative to MAP on the same data.", experiments),
        heads=("experiment", *_VARIANT),
    )
    return _without_constant_labels(table, keep=2)


def scoring_table(experiments: Sequence[Experiment]) -> Table | None:
    """How long each criterion takes to score a network."""
    criteria = in_order(c for e in experiments for c in e.criteria)
    lines = []
    for experiment in experiments:
        found = {c: scoring_seconds(experiment, c) for c in criteria}
        if any(found.values()):
            lines.append(Line((experiment.title,), tuple(_plain(found[c], duration) for c in criteria)))
    if not lines:
        return None
    return Table(
        name="scoring",
        title="Pruning: time to score a network",
        note="Means over networks. Each network is scored once for all sparsities.",
        heads=("experiment",),
        columns=tuple(CRITERION_NAMES[c] for c in criteria),
        over="criterion",
        lines=tuple(lines),
    )


def size_table(experiment: Experiment) -> Table | None:
    """Dense and pruned networks side by side: what is left, how large it is, how fast it runs.

    Single weights are shown at 95 % sparsity. Of a structured stage the highest sparsity is shown that costs at most
    one point of accuracy, or the lowest.
    """
    chosen = experiment.main_criterion
    rows: list[_Row] = []
    for variant in experiment.variants:
        labels = _training_labels(experiment, variant)
        dense = experiment.dense.get(variant, {})
        if dense:
            rows.append(((*labels, "dense"), dense, _speed(dense, dense)))
        for curve in experiment.curves:
            if (curve.variant, curve.criterion) != (variant, chosen):
                continue
            shown = _harmless(curve) if curve.stage == "structured" else 0.95
            if shown in curve.points:
                what = f"{percent(shown)} %, {STAGE_NAMES[curve.stage]}"
                rows.append(((*labels, what), curve.points[shown], _speed(dense, curve.points[shown])))
    if not any({"bytes", "flops", "latency_ms", "nonzeros"} & numbers.keys() for _, numbers, _ in rows):
        return None
    table = _side_by_side(
        rows,
        ("accuracy", "parameters", "nonzeros", "bytes", "flops", "latency_ms"),
        last="speed",
        name=f"{experiment.slug}-size",
        title=f"{experiment.title}: size and speed, pruned by {CRITERION_NAMES[chosen]}",
        note="Means over seeds. Speed is relative to the dense network. It is measured if units were removed, and 1 if "
        "single weights were removed: zeros in a dense tensor are multiplied like any other number.",
        heads=(*_VARIANT, "network"),
    )
    return _without_constant_labels(table, keep=1)


def _side_by_side(rows: Sequence[_Row], keys: Sequence[str], *, last: str, **rest: Any) -> Table:
    """A table of those measures that some row has, and of one more column."""
    shown = [key for key in keys if any(key in numbers for _, numbers, _ in rows)]
    lines = tuple(
        Line(labels, (*(_plain(numbers.get(key), _MEASURES[key][1]) for key in shown), entry))
        for labels, numbers, entry in rows
    )
    return Table(columns=(*(_MEASURES[key][0] for key in shown), last), lines=lines, **rest)


def _harmless(curve: Curve) -> float:
    """The highest sparsity that costs at most one point of accuracy, or the lowest there is."""
    values = curve.values("accuracy")
    least = values[0.0].mean - 0.01 - 1e-9 if 0.0 in values else 0.0
    pruned = [s for s in values if s > 0]
    return max((s for s in pruned if values[s].mean >= least), default=min(pruned, default=0.0))


def _speed(dense: Mapping[str, Estimate], pruned: Mapping[str, Estimate]) -> Entry:
    if "latency_ms" in dense and "latency_ms" in pruned:
        ratio = dense["latency_ms"].mean / pruned["latency_ms"].mean
        return Entry(f"× {ratio:.1f}", value=ratio)
    same = dense.get("flops") is not None and dense["flops"] == pruned.get("flops")
    return Entry("× 1.0", value=1.0) if same else EMPTY


def _training_labels(experiment: Experiment, variant: Variant) -> tuple[str, str, str]:
    """The name of the method; prior and curvature only where the method comes with more than one of them.

    The name also says if some networks did not learn.
    """
    own = [v for v in experiment.variants if v.method == variant.method]
    several = len(own) > 1 or variant.method == "spam"
    failure = experiment.failures.get(variant)
    return (
        variant.method_name + ("" if failure is None else f" ({failure})"),
        variant.prior_name or "–" if several else "–",
        variant.curvature_name or "–" if several else "–",
    )


def failure_notes(experiment: Experiment) -> list[str]:
    """One sentence for each variant of which some networks did not learn."""
    notes = []
    for variant, failure in experiment.failures.items():
        listed = ", ".join(f"seed {seed}: {100 * found:.1f} %" for seed, found in failure.accuracies.items())
        counted = "These numbers say nothing about the method" if failure.is_total else "They are left out of the means"
        name = variant.label(experiment.variants)
        notes.append(f"{name}: {failure}; they are no better than guessing (test accuracy of {listed}). {counted}.")
    return notes


def _note(text: str, experiments: Sequence[Experiment]) -> str:
    """A note, followed by the networks that did not learn."""
    return " ".join([text, *(note for experiment in experiments for note in failure_notes(experiment))])


def _without_constant_labels(table: Table, keep: int) -> Table:
    """Drop label columns that say the same on every line, the first ``keep`` apart."""

    def informative(i: int) -> bool:
        return i < keep or len({line.labels[i] for line in table.lines} - {"–"}) > 1

    kept = [i for i in range(len(table.heads)) if informative(i)]
    lines = tuple(replace(line, labels=tuple(line.labels[i] for i in kept)) for line in table.lines)
    return replace(table, heads=tuple(table.heads[i] for i in kept), lines=lines)


def _entry(found: Estimate | None, metric: Metric) -> Entry:
    if found is None:
        return EMPTY
    short = metric.text(found.mean, 1 if metric.factor == 100 else 2)
    short = short.split(".")[0] if len(short) > 4 else short  # four characters per column
    error = "" if found.error is None else metric.text(found.error)
    return Entry(metric.text(found.mean), short, error, found.mean, found.error)


def _plain(found: Estimate | None, show: Callable[[float], str]) -> Entry:
    return EMPTY if found is None else Entry(show(found.mean).replace("-", "−"), value=found.mean, spread=found.error)


def _marked(lines: Sequence[Line], metric: Metric) -> list[Line]:
    """Mark the best of each column and of each group; what prints the same is equally good."""
    sign = -1 if metric.lower_is_better else 1
    groups: dict[str, list[int]] = {}
    for i, line in enumerate(lines):
        groups.setdefault(line.labels[0], []).append(i)
    marked = [list(line.entries) for line in lines]
    for column in range(len(lines[0].entries)):
        best = _top([line.entries[column] for line in lines], sign)
        for indices in groups.values():
            leader = _top([lines[i].entries[column] for i in indices], sign) if len(indices) > 1 else None
            if all(lines[i].entries[column].text == leader for i in indices):
                leader = None  # nobody leads
            for i in indices:
                entry = marked[i][column]
                if entry.value is not None:
                    marked[i][column] = replace(entry, best=entry.text == best, leads=entry.text == leader)
    return [replace(line, entries=tuple(entries)) for line, entries in zip(lines, marked, strict=True)]


def _top(entries: Sequence[Entry], sign: int) -> str | None:
    """How the best of some entries is printed."""
    filled = [(sign * entry.value, entry.text) for entry in entries if entry.value is not None]
    return max(filled)[1] if filled else None


def _averaged(counts: Sequence[int]) -> str:
    if counts == [1]:
        return "One seed."
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"Mean ± standard error over {seeds} seeds."
