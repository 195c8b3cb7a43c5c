"""The command line: help a newcomer can read, errors without tracebacks, and a demo whose files hold its numbers."""

import csv
import json
import math
import re
import subprocess
import sys

import pytest
import torch

import shaver
from shaver.commands.main import main
from shaver.files import load_trained
from shaver.lab import get_recipe

TASKS, METHODS = [task for task in get_recipe("demo").tasks if not task.own], ("map", "spam")


def test_help_names_the_commands_without_importing_torch():
    code = "import sys; from shaver.commands.main import main\n"
    code += "try: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
    assert "--version" in done.stdout


def test_no_arguments_show_the_help(capsys):
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 0
    assert "demo" in capsys.readouterr().out


def test_help_of_the_demo_explains_every_option(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["demo", "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for option in ("--out", "--seed", "--repeats", "--epochs", "--processes"):
        assert option in text


def test_the_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"shaver {shaver.__version__}\n"


def test_an_impossible_setting_is_a_message_and_not_a_traceback(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path), "--epochs", "0"]) == 1
    assert capsys.readouterr().err == ("shaver: epochs must be an integer of at least 1, not 0.\n")


def test_an_unknown_command_gets_the_nearest_name(capsys):
    assert main(["lsit"]) == 1
    assert "unknown command 'lsit'; did you mean 'list'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["prune", "x", "--sparsity", "foo"], "'foo' is not a share such as 0.95 or auto."),
        (["run", "demo", "--epochs", "some"], "'some' is not an integer."),
        (["run", "demo", "--sparsities", "0.5", "b"], "'b' is not a share such as 0.95."),
        (["compact", "x", "--input-shape", "a"], "'a' is not an integer."),
    ],
)
def test_a_value_of_another_kind_is_explained_without_types_of_python(capsys, arguments, words):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    text = capsys.readouterr().err
    assert words in " ".join(text.replace("│", " ").split())
    assert "class" not in text
    assert "None" not in text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One epoch, one seed: the files of a real run."""
    out = tmp_path_factory.mktemp("beside") / "demo"
    assert main(["demo", "--out", str(out), "--epochs", "1", "--repeats", "1", "--seed", "3"]) == 0
    with open(out / "results.csv") as file:
        rows = list(csv.DictReader(file))
    return out, [row for row in rows if row["stage"] == "posthoc"], [row for row in rows if row["stage"] != "posthoc"]


def test_the_demo_writes_what_it_promises(run):
    out, rows, _ = run
    criteria = shaver.criteria.names()
    assert len(rows) == len(TASKS) * len(METHODS) * (1 + 11 * len(criteria))
    assert {(r["data"], r["method"], r["criterion"]) for r in rows if r["criterion"] != "dense"} == {
        (task.data, method, name) for task in TASKS for method in METHODS for name in criteria
    }
    for column in ("accuracy", "nll", "ece", "brier", "achieved", "nonzeros", "bytes"):
        assert all(math.isfinite(float(row[column])) for row in rows), column
    study = json.loads((out / "study.json").read_text())
    assert study["seeds"] == [3]
    assert study["versions"]["torch"] == torch.__version__
    for name in ("figures/accuracy.svg", "tables/summary.md", "compact/plan.json", "report.html"):
        assert (out / name).stat().st_size > 0
    page, pictures = (out / "report.html").read_text(encoding="utf-8"), list((out / "pictures").glob("*.svg"))
    assert page.count('<img alt="') == len(pictures) > 0


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.data)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("criterion", ["magnitude", "opd"])
def test_the_numbers_in_the_file_are_those_of_the_saved_networks(run, task, method, criterion):
    out, rows, _ = run
    test = shaver.data.load(task.data, seed=3).test
    for sparsity in ("0.4", "0.95"):
        trained = load_trained(out / "models" / f"{task.data}-{method}-3.safetensors")
        model = trained.model
        scores = shaver.score(model, criterion, posterior=trained.posterior)
        shaver.prune(model, scores, float(sparsity))
        with torch.no_grad():
            logits = model.eval()(test[:][0]).double()
        labels = test[:][1]
        (row,) = [
            r for r in rows
            if (r["data"], r["method"], r["criterion"], r["sparsity"]) == (task.data, method, criterion, sparsity)
        ]  # fmt: skip
        assert float(row["accuracy"]) == pytest.approx(float((logits.argmax(1) == labels).double().mean()))
        assert float(row["nll"]) == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)
        assert int(row["nonzeros"]) == sum(int(p.count_nonzero()) for p in model.parameters())
        weights = [p for p in model.parameters() if p.ndim >= 2]
        zeros = sum(int((p == 0).sum()) for p in weights) / sum(p.numel() for p in weights)
        assert float(row["achieved"]) == pytest.approx(float(sparsity), abs=1e-3)
        assert zeros >= float(row["achieved"]) - 1e-9


def test_the_compact_network_is_in_the_results_and_smaller(run):
    out, _, rows = run
    (small,) = [r for r in rows if (r["criterion"], r["sparsity"]) == ("opd", "0.7")]
    assert int(small["parameters"]) == sum(p.numel() for p in shaver.load(out / "compact").parameters())
    assert int(small["flops"]) < 0.5 * int(rows[0]["flops"])
    assert float(small["latency_ms"]) > 0


def test_nothing_is_written_beside_the_folder_and_nothing_is_done_twice(run, capsys):
    out, _, _ = run
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert main(["demo", "--out", str(out), "--epochs", "1", "--repeats", "1", "--seed", "3"]) == 0
    assert re.search(r"(\d+) cells, \1 of them done earlier", capsys.readouterr().out)
