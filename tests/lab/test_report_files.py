"""``shaver report`` writes tables, figures and a page from a run folder, and refuses what it cannot show honestly."""

import csv
import io
import json
import math
import re
import shutil
import statistics
from xml.etree import ElementTree

import pandas
import pytest
from rich.console import Console

from shaver.commands.main import main
from shaver.lab.report.canvas import place
from shaver.lab.report.figures import front, write_figures
from shaver.lab.report.frame import Variant, experiments, training_curves
from shaver.lab.report.output import read_runs, write_report
from shaver.lab.report.page import LIMIT
from shaver.lab.report.times import duration, scoring_times, training_times


def silent():
    return Console(file=io.StringIO(), width=100)


@pytest.fixture(scope="module")
def written(toy_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    console = silent()
    files = write_report([toy_run], out, console=console)
    return out, files, console.file.getvalue()


def data_of(page):
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def rows_of(folder):
    with open(folder / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_every_format_is_written_and_listed(written):
    out, files, shown = written
    assert {path.suffix for path in files} == {".md", ".csv", ".tex", ".svg", ".png", ".html"}
    assert all(path.stat().st_size > 0 for path in files)
    assert not list(out.rglob("*.part"))
    names = {path.name for path in files}
    slug = "tiny-fcn-on-breast-cancer"
    assert {f"{slug}-{kind}.md" for kind in ("accuracy", "nll", "ece", "brier", "size")} <= names
    assert {"summary.tex", "training.csv", "scoring.md"} <= names
    figures = ("accuracy", f"{slug}-quality", f"{slug}-priors", f"{slug}-pareto", f"{slug}-training", "costs")
    assert {f"{name}.{kind}" for name in figures for kind in ("svg", "png")} <= names
    assert "Tiny FCN on breast cancer: test accuracy" in shown
    assert "Share of weights that can be removed" in shown


def test_the_table_has_the_mean_and_error_of_the_rows(written, toy_run):
    out, _, _ = written
    values = [
        float(row["accuracy"]) for row in rows_of(toy_run)
        if (row["method"], row["prior"], row["criterion"], row["sparsity"]) == ("spam", "parameter", "opd", "0.95")
    ]  # fmt: skip
    assert len(values) == 2
    with open(out / "tables" / "tiny-fcn-on-breast-cancer-accuracy.csv", newline="") as file:
        table = list(csv.DictReader(file))
    (line,) = [r for r in table if (r["criterion"], r["training"], r["prior"]) == ("OPD", "SpaM", "parameter-wise")]
    assert float(line["95"]) == pytest.approx(statistics.fmean(values))
    assert float(line["95 se"]) == pytest.approx(statistics.stdev(values) / math.sqrt(2))


def test_the_page_carries_the_same_numbers(written, toy_run):
    out, _, _ = written
    (experiment,) = data_of(out / "report.html")["experiments"]
    (curve,) = [c for c in experiment["curves"] if (c["method"], c["criterion"]) == ("map", "grasp")]
    for sparsity in ("0.0", "0.9"):
        values = [
            float(row["nll"]) for row in rows_of(toy_run)
            if (row["method"], row["sparsity"]) == ("map", sparsity) and row["criterion"] in ("grasp", "dense")
        ]  # fmt: skip
        mean, error = curve["y"]["nll"][curve["x"].index(float(sparsity))]
        assert mean == pytest.approx(statistics.fmean(values), rel=1e-4)
        assert error == pytest.approx(statistics.stdev(values) / math.sqrt(2), rel=1e-4, abs=1e-6)


def test_the_page_says_what_was_run_and_names_no_host(written):
    out, _, _ = written
    text = (out / "report.html").read_text(encoding="utf-8")
    assert "cpu scale" in text
    assert "2 epochs, 8 units" in text
    assert "<code>shaver run toy --note &#39;a b&#39;</code>" in text
    trained = "6 networks, trained by MAP (weight decay) and SpaM (learned prior)"
    assert f"{trained}, pruned by 4 criteria to 4 sparsities of up to 99 %" in text
    assert "secret-host" not in text
    assert len(text.encode()) < LIMIT == 3_000_000
    assert not re.search(r"""(?:src|href)=(?!"(?:#|data:))""", text)
    assert "@import" not in text
    assert "url(" not in text


def test_figures_are_drawings_and_the_same_every_time(written, toy_run, tmp_path):
    out, files, _ = written
    again = read_runs([toy_run])
    drawn = write_figures(again.experiments, again.histories, tmp_path, ["svg"])
    for path in drawn:
        ElementTree.parse(path)
        assert path.read_bytes() == (out / "figures" / path.name).read_bytes()
    assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for path in files if path.suffix == ".png")
    assert not list(tmp_path.glob("*.png"))


def test_only_the_formats_asked_for(toy_run, tmp_path):
    files = write_report([toy_run], tmp_path, formats=["latex"], console=silent())
    assert {path.suffix for path in files} == {".tex"}
    with pytest.raises(ValueError, match="unknown format 'pdf'"):
        write_report([toy_run], tmp_path, formats=["pdf"], console=silent())


def test_names_from_data_are_text_and_not_markup(toy_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(toy_run, folder)
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    study = json.loads((folder / "study.json").read_text())
    study["recipe"]["tasks"][0] |= {"title": evil, "note": evil}
    study["recipe"]["title"] = study["command"] = evil
    (folder / "study.json").write_text(json.dumps(study))
    results = (folder / "results.csv").read_text()
    (folder / "results.csv").write_text(results.replace(",magnitude,", f",{evil},"))
    (page,) = write_report([folder], formats=["html"], console=silent())
    assert page == folder / "report.html"
    text = page.read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert evil in data_of(page)["criteria"]


def test_pictures_become_images_and_too_large_ones_are_named(toy_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(toy_run, folder)
    (folder / "pictures").mkdir()
    (folder / "pictures" / "conv1-spam.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"><script/></svg>')
    (folder / "pictures" / "huge.svg").write_text("<svg>" + " " * 2_000_000 + "</svg>")
    (page,) = write_report([folder], formats=["html"], console=silent())
    text = page.read_text(encoding="utf-8")
    assert 'alt="conv1 spam" src="data:image/svg+xml;base64,' in text
    assert "Too large for this page: huge.svg" in text
    assert page.stat().st_size < LIMIT


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda run: (run / "results.csv").unlink(), "has no results yet"),
        (lambda run: (run / "study.json").unlink(), "holds no study.json"),
        (lambda run: _only_header(run / "results.csv"), "without a single row"),
        (lambda run: shutil.rmtree(run), "is not a folder"),
    ],
    ids=["no results", "no study", "empty", "missing"],
)
def test_a_folder_without_results_is_a_message(toy_run, tmp_path, capsys, break_it, message):
    folder = tmp_path / "run"
    shutil.copytree(toy_run, folder)
    break_it(folder)
    assert main(["report", str(folder)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert str(folder) in error


def test_two_scales_are_not_mixed(toy_run, tmp_path, capsys):
    other = tmp_path / "paper"
    shutil.copytree(toy_run, other)
    results = (other / "results.csv").read_text()
    (other / "results.csv").write_text(results.replace("toy,cpu,", "toy,paper,"))
    assert main(["report", str(toy_run), str(other), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "runs of different scales do not belong in one table" in error
    assert str(other) in error
    assert not (tmp_path / "out").exists()


def test_the_same_run_twice_changes_nothing(toy_run, tmp_path):
    once = read_runs([toy_run])
    twice = read_runs([toy_run, toy_run / "."])
    assert len(twice.experiments[0].frame) == len(once.experiments[0].frame)


def test_two_recipes_share_a_page(toy_run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(toy_run, other)
    for name in ("results.csv", "study.json"):
        text = (other / name).read_text()
        (other / name).write_text(text.replace("toy,cpu", "twin,cpu").replace('"name": "toy"', '"name": "twin"'))
    assert main(["report", str(toy_run), str(other), "--out", str(tmp_path / "out"), "--formats", "html"]) == 0
    data = data_of(tmp_path / "out" / "report.html")
    assert [e["title"] for e in data["experiments"]] == [
        "Tiny FCN on breast cancer (toy)", "Tiny FCN on breast cancer (twin)",
    ]  # fmt: skip
    assert all(len(e["histories"]) == 3 for e in data["experiments"])


def test_networks_that_are_not_pruned_yet_make_a_report_too(toy_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(toy_run, folder)
    lines = (folder / "results.csv").read_text().splitlines(keepends=True)
    (folder / "results.csv").write_text("".join([lines[0], *(line for line in lines if ",dense," in line)]))
    files = write_report([folder], console=silent())
    assert {"training.csv", "costs.svg", "report.html"} <= {path.name for path in files}
    assert 'id="curves-plot"' not in (folder / "report.html").read_text(encoding="utf-8")


def test_histories_are_means_where_every_seed_has_arrived():
    labels = {"recipe": "r", "task": "t", "method": "map", "prior": "", "structure": "", "source": ""}
    row = {**labels, "network": "fcn", "data": "cancer", "criterion": "dense", "sparsity": 0.0, "seed": 0}
    (experiment,) = experiments(pandas.DataFrame([row]))
    steps = [(0, 1, 4.0), (0, 2, 2.0), (1, 1, 2.0)]
    rows = [labels | {"seed": seed, "epoch": epoch, "loss": loss} for seed, epoch, loss in steps]
    assert training_curves(experiment, pandas.DataFrame(rows)) == {Variant("map"): {"loss": [(1.0, 3.0)]}}
    assert training_curves(experiment, pandas.DataFrame([{**rows[0], "task": "other"}])) == {}


def test_networks_pruned_while_training_have_no_curve_here(toy_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(toy_run, folder)
    config = min((folder / "cells").iterdir()) / "config.json"
    settings = json.loads(config.read_text())
    settings["training"]["online"] = 0.9
    config.write_text(json.dumps(settings))
    assert len(read_runs([folder]).histories) == len(read_runs([toy_run]).histories) - 2, "two epochs"


def test_cells_of_an_earlier_study_have_no_curve_here(toy_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(toy_run, folder)
    shutil.copytree(min((folder / "cells").iterdir()), folder / "cells" / "earlier")
    config = folder / "cells" / "earlier" / "config.json"
    config.write_text(config.read_text().replace('"seed": 0', '"seed": 9'))
    assert len(read_runs([folder]).histories) == len(read_runs([toy_run]).histories)


def test_the_front_is_what_nothing_cheaper_matches():
    points = [(3.0, 0.9), (1.0, 0.5), (2.0, 0.4), (2.0, 0.7), (4.0, 0.9), (3.0, 0.8)]
    assert front(points) == [(1.0, 0.5), (2.0, 0.7), (3.0, 0.9)]


def test_sparsities_stand_by_the_logarithm_of_what_is_kept():
    assert place(0.0) == 0.0
    assert place(0.99) - place(0.9) == pytest.approx(place(0.9) - place(0.0))
    assert math.isfinite(place(1.0))


def test_times_have_units_people_compare(toy_run):
    assert [duration(s) for s in (0.0000042, 0.293, 13.14, 4321.0)] == ["4.2 µs", "293 ms", "13.1 s", "4,321 s"]
    (experiment,) = read_runs([toy_run]).experiments
    assert len(training_times([experiment]).bars) == 3
    many = training_times([experiment] * 9)
    assert many.title.startswith("Training, relative to MAP")
    assert [label for label, _, _ in many.bars] == ["MAP", "SpaM Diag MC"]
    assert many.bars[0][1].mean == pytest.approx(1.0)
    assert min(found.mean for _, found, _ in scoring_times([experiment] * 9).bars) >= 1.0


def _only_header(path):
    path.write_text(path.read_text().splitlines()[0] + "\n")
