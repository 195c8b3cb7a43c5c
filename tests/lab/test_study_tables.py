"""Tables show means with standard errors over seeds, mark the best, and say the same in every format."""

import csv
import io
import math
import statistics

import pandas
import pytest
from rich.console import Console

from shaver.io import write_csv
from shaver.lab.report import frame as frames
from shaver.lab.report.formats import comma_separated, latex, markdown, terminal
from shaver.lab.report.frame import Estimate
from shaver.lab.report.names import METRICS, in_order
from shaver.lab.report.tables import (
    kept,
    quality_table,
    removable,
    scoring_table,
    size_table,
    summary_table,
    training_table,
)

ACCURACY, NLL = METRICS[:2]


def row(method, criterion, sparsity, accuracy, seed=0, **more):
    prior = {"prior": "parameter", "structure": "diag", "source": "mc"} if method == "spam" else {}
    return {
        "recipe": "toy", "scale": "cpu", "task": "toy", "network": "fcn", "data": "cancer", "method": method,
        "prior": "", "structure": "", "source": "", "seed": seed, "stage": "posthoc", "criterion": criterion,
        "sparsity": sparsity, "accuracy": accuracy, **prior, **more,
    }  # fmt: skip


ROWS = [
    row("map", "dense", 0.0, 0.90, seed=0), row("map", "dense", 0.0, 0.94, seed=1),
    row("map", "random", 0.5, 0.20, seed=0), row("map", "random", 0.5, 0.30, seed=1),
    row("map", "opd", 0.5, 0.80, seed=0), row("map", "opd", 0.5, 0.90, seed=1),
    row("map", "random", 0.9, 0.10, seed=0), row("map", "random", 0.9, 0.10, seed=1),
    row("map", "opd", 0.9, 1.00, seed=0), row("map", "opd", 0.9, 1.00, seed=1),
]  # fmt: skip
BOTH = [
    *ROWS,
    row("spam", "dense", 0.0, 0.90), row("spam", "opd", 0.5, 0.89), row("spam", "opd", 0.9, 0.50),
    row("spam", "random", 0.5, 0.25), row("spam", "random", 0.9, 0.30),
]  # fmt: skip


def experiments(rows, titles=None):
    return frames.experiments(pandas.DataFrame(rows), titles)


def accuracy_table(rows):
    (experiment,) = experiments(rows)
    return quality_table(experiment, ACCURACY)


def shown(table, width=80, styled=False):
    console = Console(
        file=io.StringIO(), width=width, force_terminal=styled, color_system="truecolor" if styled else None
    )
    console.print(table)
    return console.file.getvalue()


def words(text):
    return [line.split() for line in text.splitlines() if line.strip()]


def test_an_estimate_is_the_mean_and_its_standard_error():
    values = [0.2, 0.5, 0.8, 0.9]
    found = Estimate.of(values)
    spread = math.sqrt(sum((v - 0.6) ** 2 for v in values) / 3)
    assert found.mean == pytest.approx(0.6)
    assert found.error == pytest.approx(spread / 2)
    assert Estimate.of([0.3]).error is None


def test_means_are_over_seeds_only():
    (experiment,) = experiments(ROWS)
    (opd, random) = experiment.curves
    assert opd.points[0.5]["accuracy"].mean == pytest.approx(0.85)
    assert opd.points[0.5]["accuracy"].error == pytest.approx(statistics.stdev([0.8, 0.9]) / math.sqrt(2))
    assert opd.points[0.0]["accuracy"] == random.points[0.0]["accuracy"] == experiment.dense[opd.variant]["accuracy"]


def test_a_dense_network_measured_before_each_stage_counts_once():
    again = [row("map", "dense", 0.0, a, seed=s, stage="finetuned") for s, a in ((0, 0.90), (1, 0.94))]
    (experiment,) = experiments([*ROWS, *again])
    assert experiment.dense[experiment.variants[0]]["accuracy"].count == 2


def test_the_same_measurement_twice_is_no_second_seed():
    assert len(experiments([*ROWS, *ROWS])[0].frame) == len(ROWS)
    with pytest.raises(ValueError, match=r"measure the same thing and differ .*criterion opd, sparsity 0.5"):
        experiments([*ROWS, row("map", "opd", 0.5, 0.81)])


def test_lines_are_criterion_by_training_and_columns_sparsities():
    lines = words(shown(terminal(accuracy_table(BOTH), 80)))
    assert ["criterion", "training", "dense", "50", "90"] in lines
    assert ["OPD", "MAP", "92.00", "±2.00", "85.00", "±5.00", "100.00", "±0.00"] in lines
    assert ["SpaM", "90.00", "89.00", "50.00"] in lines


def test_a_narrow_terminal_has_the_means_and_a_narrower_one_the_high_sparsities():
    sparsities = (0.2, 0.4, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99)
    many = [row("spam", "dense", 0.0, 1.0, seed=s) for s in (0, 1)]
    many += [row("spam", "magnitude", s, 0.9876, seed=n) for s in sparsities for n in (0, 1)]
    at_80 = shown(terminal(accuracy_table(many), 80))
    assert "…" not in at_80
    assert at_80.count("98.8") == 10
    assert "The files have the standard errors." in at_80
    at_40 = shown(terminal(accuracy_table(many), 40), 40)
    assert max(map(len, at_40.splitlines())) <= 40
    assert " 99" in at_40
    assert "Columns up to" in at_40


def test_the_best_of_a_column_is_marked_and_so_is_the_best_training_of_a_criterion():
    by_label = {line.labels: line.entries for line in accuracy_table(BOTH).lines}
    dense, half, ninety = (by_label["OPD", "SpaM"][i] for i in range(3))
    assert (half.best, half.leads) == (True, True)
    assert (ninety.best, ninety.leads) == (False, False)
    assert (by_label["random", "SpaM"][2].best, by_label["random", "SpaM"][2].leads) == (False, True)
    assert (dense.best, by_label["OPD", "MAP"][0].best) == (False, True)
    tie = by_label["random", "MAP"][1], by_label["random", "SpaM"][1]
    assert [entry.leads for entry in tie] == [False, False]  # both print 25.00: nobody leads


def test_lower_is_better_for_nll():
    rows = [row("map", "opd", 0.5, 0.5, nll=0.4), row("map", "random", 0.5, 0.5, nll=2.3)]
    table = quality_table(experiments(rows)[0], NLL)
    assert [(line.labels[0], line.entries[0].best) for line in table.lines] == [("OPD", True), ("random", False)]


def test_priors_curvatures_and_stages_get_columns_only_where_they_differ():
    assert accuracy_table(BOTH).heads == ("criterion", "training")
    kron = row("spam", "opd", 0.5, 0.7) | {"structure": "kron", "source": "ggn", "prior": "layer"}
    table = accuracy_table([*BOTH, kron])
    assert table.heads == ("criterion", "training", "prior", "curvature")
    assert ("OPD", "SpaM", "layer-wise", "KFAC GGN") in [line.labels for line in table.lines]
    assert ("OPD", "MAP", "–", "–") in [line.labels for line in table.lines]
    assert accuracy_table([*BOTH, row("map", "opd", 0.5, 0.7, stage="finetuned")]).heads[-1] == "stage"


def test_markdown_has_the_same_cells():
    text = markdown(accuracy_table(BOTH))
    assert "| criterion | training | dense | 50 | 90 |" in text
    assert "| OPD | MAP | ***92.00*** ± 2.00 | 85.00 ± 5.00 | ***100.00*** ± 0.00 |" in text
    assert "|  | SpaM | 90.00 | ***89.00*** | 50.00 |" in text
    assert text.rstrip().endswith("Best of a column: bold. Best within its criterion: in italics.")


def test_csv_has_the_unrounded_numbers():
    lines = list(csv.reader(io.StringIO(comma_separated(accuracy_table(BOTH)))))
    assert lines[0] == ["criterion", "training", "dense", "dense se", "50", "50 se", "90", "90 se"]
    by_label = {tuple(line[:2]): line[2:] for line in lines[1:]}
    assert float(by_label["OPD", "MAP"][2]) == pytest.approx(0.85)
    assert float(by_label["OPD", "MAP"][3]) == pytest.approx(0.05)
    assert by_label["OPD", "SpaM"][3] == ""


def test_latex_is_a_booktabs_table_with_balanced_braces():
    text = latex(accuracy_table([*BOTH, row("map", "my_crit & 50%", 0.5, 0.3)]))
    assert r"& & \multicolumn{3}{c}{sparsity, \%} \\" in text
    assert r"my\_crit \& 50\% & MAP" in text
    assert r"\underline{89.00}" in text
    assert r"\textbf{\underline{89.00}}" in text
    assert text.count("{") == text.count("}")
    body = text[text.index("\\midrule") : text.index("\\bottomrule")].replace(r"\&", "")
    assert {line.count("&") for line in body.splitlines() if line.endswith("\\\\")} == {4}


def test_kept_is_the_sparsity_before_the_first_fall():
    rows = [row("map", "dense", 0.0, 0.90), *(row("map", "opd", s, a) for s, a in
            ((0.2, 0.91), (0.5, 0.89), (0.8, 0.70), (0.9, 0.90)))]  # fmt: skip
    assert kept(experiments(rows)[0]) == {"map": 0.5}
    (line,) = summary_table(experiments(rows)).lines
    assert (line.labels, line.entries[0].text) == (("toy", "OPD"), "50 %")


def test_repaired_networks_have_a_line_of_their_own():
    rows = [row("map", "dense", 0.0, 0.90), *(row("map", "opd", s, a, stage=stage) for stage, s, a in
            (("posthoc", 0.5, 0.85), ("repaired", 0.5, 0.90), ("repaired", 0.8, 0.89)))]  # fmt: skip
    assert removable(experiments(rows)[0]) == {"OPD": {"map": 0.0}, "OPD, repaired": {"map": 0.8}}
    pruned, repaired = summary_table(experiments(rows)).lines
    assert [pruned.labels, repaired.labels] == [("toy", "OPD"), ("toy", "OPD, repaired")]
    assert (pruned.entries[0].text, repaired.entries[0].text) == ("0 %", "80 %")


def test_times_compare_with_map_and_sizes_stand_side_by_side():
    rows = [
        row("map", "dense", 0.0, 0.9, train_seconds=10.0, epochs=5, bytes=400, nonzeros=100, parameters=100),
        row("spam", "dense", 0.0, 0.8, train_seconds=13.0, epochs=5, bytes=400, nonzeros=100, parameters=100),
        row("spam", "opd", 0.95, 0.8, score_seconds=0.25, bytes=30, nonzeros=5, parameters=100),
    ]
    found = experiments(rows)
    training = training_table(found)
    assert [line.entries[-1].text for line in training.lines] == ["1.00", "1.30"]
    assert scoring_table(found).lines[0].entries[0].text == "250 ms"
    sizes = size_table(found[0])
    assert [line.labels for line in sizes.lines] == [("MAP", "dense"), ("SpaM", "dense"), ("SpaM", "95 %, post hoc")]
    assert sizes.lines[2].entries[sizes.columns.index("bytes")].text == "30"


def test_two_recipes_for_the_same_network_keep_their_names():
    found = experiments(
        [*ROWS, *(r | {"recipe": "other"} for r in ROWS)], {("toy", "toy"): "Toy", ("other", "toy"): "Toy"}
    )
    assert [e.title for e in found] == ["Toy (toy)", "Toy (other)"]
    assert experiments(ROWS)[0].title == "toy", "a task without a title is called by its name"


def test_a_criterion_of_a_users_own_comes_last():
    assert in_order(["mine", "random", "opd", "mine"]) == ["opd", "random", "mine"]


@pytest.mark.parametrize("cell", ["", "nan", float("inf"), None])
def test_what_is_no_number_is_missing(cell):
    (experiment,) = experiments([row("map", "opd", 0.5, 0.8, nll=cell), row("map", "opd", 0.5, 0.6, seed=1, nll="0.5")])
    assert experiment.curves[0].points[0.5]["nll"] == Estimate(0.5, None, 1)


DEAD = [
    row("map", "dense", 0.0, 0.07, seed=2, learned="no"), row("map", "opd", 0.5, 0.07, seed=2, learned="no"),
    row("map", "opd", 0.9, 0.07, seed=2, learned="no"),
]  # fmt: skip


def test_a_network_that_did_not_learn_is_in_no_mean_and_on_every_table():
    (experiment,), (without,) = experiments([*BOTH, *DEAD]), experiments(BOTH)
    assert [curve.points for curve in experiment.curves] == [curve.points for curve in without.curves]
    words = "MAP: 1 of 3 did not learn; they are no better than guessing (test accuracy of seed 2: 7.0 %)"
    table = quality_table(experiment, ACCURACY)
    assert ("OPD", "MAP (1 of 3 did not learn)") in [line.labels for line in table.lines]
    for text in (markdown(table), latex(table).replace("\\%", "%"), shown(terminal(table, 200), 200)):
        assert words in text.replace("\n", " ")
    assert "1 of 3 did not learn" in comma_separated(table)
    assert words in summary_table([experiment]).note
    assert kept(experiment) == kept(without)


def test_a_method_of_which_nothing_learned_has_no_summary():
    rows = [row("map", c, s, 0.1, learned="no") for c, s in (("dense", 0.0), ("opd", 0.5))]
    (experiment,) = experiments(rows)
    assert kept(experiment) == {}
    assert quality_table(experiment, ACCURACY).lines[0].labels == ("OPD", "MAP (1 of 1 did not learn)")
    assert "say nothing about the method" in quality_table(experiment, ACCURACY).note


def test_speed_is_measured_where_units_are_removed_and_one_where_weights_are_masked():
    def measured(criterion, sparsity, accuracy, flops, latency, stage="posthoc"):
        more = {"latency_ms": latency} if latency else {}
        return row("spam", criterion, sparsity, accuracy, flops=flops, bytes=10, stage=stage, **more)

    rows = [
        measured("dense", 0.0, 0.9, 100, 2.0), measured("opd", 0.95, 0.9, 100, None),
        measured("opd", 0.5, 0.9, 50, 1.0, "structured"), measured("opd", 0.7, 0.895, 30, 0.8, "structured"),
        measured("opd", 0.8, 0.5, 20, 0.5, "structured"),
    ]  # fmt: skip
    table = size_table(experiments(rows)[0])
    assert table.columns[-1] == "speed"
    assert [(line.labels[-1], line.entries[-1].text) for line in table.lines] == [
        ("dense", "× 1.0"), ("95 %, post hoc", "× 1.0"), ("70 %, structured", "× 2.5"),
    ]  # fmt: skip


def test_rows_with_different_columns_share_one_header(tmp_path):
    write_csv(tmp_path / "rows.csv", [{"a": 1}, {"a": 2, "b": 0.1}])
    with open(tmp_path / "rows.csv") as file:
        assert list(csv.DictReader(file)) == [{"a": "1", "b": ""}, {"a": "2", "b": "0.1"}]
