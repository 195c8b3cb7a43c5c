"""Tables show the means over seeds and mark the best of each column."""

import csv
import io

import pytest
from rich.console import Console

from shaver.study.figures import accuracy_figure
from shaver.study.tables import accuracy_table, cost_table, in_order, mean_over_seeds, write_rows


def row(method, criterion, sparsity, accuracy, seed=0, data="toy"):
    return {
        "data": data, "method": method, "seed": seed, "criterion": criterion, "sparsity": sparsity, "accuracy": accuracy
    }  # fmt: skip


ROWS = [
    row("map", "dense", 0.0, 0.90, seed=0), row("map", "dense", 0.0, 0.94, seed=1),
    row("map", "random", 0.5, 0.20, seed=0), row("map", "random", 0.5, 0.30, seed=1),
    row("map", "opd", 0.5, 0.80, seed=0), row("map", "opd", 0.5, 0.90, seed=1),
    row("map", "random", 0.9, 0.10, seed=0), row("map", "random", 0.9, 0.10, seed=1),
    row("map", "opd", 0.9, 1.00, seed=0), row("map", "opd", 0.9, 1.00, seed=1),
]  # fmt: skip


def shown(table, width=80, styled=False):
    console = Console(
        file=io.StringIO(), width=width, force_terminal=styled, color_system="truecolor" if styled else None
    )
    console.print(table)
    return console.file.getvalue()


def test_means_are_over_seeds_only():
    assert mean_over_seeds(ROWS, "accuracy")["map", "opd", 0.5] == pytest.approx(0.85)
    assert mean_over_seeds(ROWS, "accuracy")["map", "dense", 0.0] == pytest.approx(0.92)


def test_the_table_has_a_line_for_each_criterion_and_a_column_for_each_sparsity():
    lines = [line.split() for line in shown(accuracy_table(ROWS, "Toy")).splitlines() if line.strip()]
    assert ["trained,", "pruned", "by", "dense", "50", "90"] in lines
    assert ["MAP", "OPD", "92.0", "85.0", "100"] in lines
    assert ["MAP", "random", "92.0", "25.0", "10.0"] in lines
    assert "mean of 2 seeds" in shown(accuracy_table(ROWS, "Toy"))


def test_the_best_of_a_column_is_marked_and_the_rest_is_not():
    text = shown(accuracy_table(ROWS, "Toy"), styled=True)
    assert "\x1b[1;32m85.0\x1b[0m" in text
    assert "25.0" in text
    assert "\x1b[1;32m25.0" not in text


def test_eleven_columns_fit_a_terminal_of_eighty():
    sparsities = (0.2, 0.4, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99)
    rows = [row("spam", "dense", 0.0, 1.0), *(row("spam", "magnitude", s, 0.9876) for s in sparsities)]
    text = shown(accuracy_table(rows, "Toy"))
    assert "…" not in text
    assert text.count("98.8") == 10


def test_cost_has_a_line_for_each_network():
    numbers = {
        "parameters": 13402, "nonzeros": 13402, "bytes_dense": 53608, "bytes_sparse": 53608, "flops": 26400,
        "flops_sparse": 26400, "latency_1": 3e-5, "latency_128": 7e-5,
    }  # fmt: skip
    rows = [{"data": "toy", "method": "map", "seed": 4, "sparsity": s} | numbers for s in (0.0, 0.95)]
    text = shown(cost_table(rows))
    assert "…" not in text
    assert text.count("toy MAP") == 2
    assert ["toy", "MAP", "95.0", "13402", "13402", "53.6", "53.6", "26", "26", "0.03", "0.07"] in [
        line.split() for line in text.splitlines()
    ]


def test_a_criterion_of_a_users_own_comes_last():
    assert in_order(["mine", "random", "opd", "mine"]) == ["opd", "random", "mine"]


def test_rows_with_different_columns_share_one_header(tmp_path):
    write_rows(tmp_path / "rows.csv", [{"a": 1}, {"a": 2, "b": 0.1}])
    with open(tmp_path / "rows.csv") as file:
        assert list(csv.DictReader(file)) == [{"a": "1", "b": ""}, {"a": "2", "b": "0.1"}]


def test_the_same_rows_give_the_same_figure_file(tmp_path):
    for name in ("one", "two"):
        accuracy_figure(ROWS, {"toy": "Toy"}, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert (tmp_path / "one.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = (tmp_path / "one.svg").read_text()
    assert "Toy" in text
    assert "OPD" in text
