"""The runner: cells in processes of their own that fail, stop and continue without touching each other."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
from rich.console import Console

import shaver
from shaver.commands.main import main
from shaver.files import load_trained
from shaver.lab import get_recipe, load_runs, run_study
from shaver.lab.recipes.grid import cells_of
from shaver.lab.recipes.recipe import Recipe, Stage, Task
from shaver.lab.run.cell import run_cell
from shaver.lab.run.engines import LocalEngine, SlurmEngine
from shaver.lab.run.progress import Progress
from shaver.lab.run.results import DENSE
from shaver.lab.run.runner import is_done
from tests.lab.conftest import InProcess

CANCER = {"name": "fcn", "inputs": 30, "hidden": [8], "classes": 2}
TINY = Task("tiny", "Tiny FCN", "cpu", "tiny", CANCER, "cancer", epochs=1, batch_size=64)
FEW = Stage(criteria=("opd", "magnitude"), sparsities=(0.5, 0.9))


def recipe(**changed):
    settings = {"seeds": 1, "stages": (FEW,), "tasks": (TINY,), **changed}
    return Recipe("tiny", "A tiny study", "nothing", "cpu", **settings)


def in_process(tmp_path, cell, any_code=False):
    """Run one cell here, as a cluster's job would."""
    folder = tmp_path / "run" / "cells" / cell.key
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(cell.as_dict()))
    run_cell(str(folder), str(tmp_path / "networks"), any_code)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A study of two cells."""
    folder = tmp_path_factory.mktemp("runs") / "tiny-cpu"
    console = Console(file=io.StringIO(), width=120)
    outcome = run_study(recipe(), folder, engine=InProcess(), console=console)
    return folder, outcome, console.file.getvalue()


def test_a_study_leaves_every_promised_file(finished):
    folder, outcome, text = finished
    assert (outcome.done, outcome.ran, outcome.failed) == (2, 2, {})
    study = json.loads((folder / "study.json").read_text())
    assert study["recipe"]["name"] == "tiny"
    assert study["versions"]["torch"].startswith(__import__("torch").__version__.split("+")[0])
    assert study["machine"]["cores"] >= 1
    assert study["command"]
    assert study["seconds"] > 0
    for key in study["cells"]:
        names = {path.name for path in (folder / "cells" / key).iterdir()}
        promised = {"config.json", "status.json", "rows.csv", "history.csv", "model.safetensors"}
        assert promised | {"model-posterior.safetensors"} <= names
    assert "tiny, map, seed 0" in text
    assert "smaller than in the paper: tiny" in text


def test_a_row_for_each_cell_criterion_and_sparsity(finished):
    frame = load_runs(finished[0])
    assert len(frame) == 2 * (1 + 2 * 2)
    assert pandas.read_parquet(finished[0] / "results.parquet").equals(frame)
    assert set(frame.criterion) == {DENSE, "opd", "magnitude"}
    spam = frame[frame.method == "spam"].iloc[0]
    assert (spam.prior, spam.structure, spam.source) == ("parameter", "diag", "mc")
    assert (frame[frame.method == "map"].prior == "").all()


def test_the_numbers_are_those_of_the_saved_network(finished):
    folder, _, _ = finished
    frame = load_runs(folder)
    test = shaver.data.load("cancer", seed=0).test
    for key in json.loads((folder / "study.json").read_text())["cells"]:
        trained = load_trained(folder / "cells" / key / "model.safetensors")
        labels = json.loads((folder / "cells" / key / "config.json").read_text())["training"]["labels"]
        scores = shaver.score(trained.model, "opd", posterior=trained.posterior)
        shaver.prune(trained.model, scores, 0.9)
        accuracy = float((trained.model(test[:][0]).argmax(1) == test[:][1]).double().mean())
        (row,) = frame[
            (frame.method == labels["method"]) & (frame.criterion == "opd") & (frame.sparsity == 0.9)
        ].itertuples()
        assert row.accuracy == pytest.approx(accuracy)
        assert row.nonzeros == sum(int(p.count_nonzero()) for p in trained.model.parameters())


def test_finished_cells_are_not_run_again(finished):
    folder, _, _ = finished
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.parent.parent.name == "cells"}
    engine = InProcess()
    outcome = run_study(recipe(), folder, engine=engine)
    assert (outcome.done, outcome.ran, engine.started) == (2, 0, [])
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_another_recipe_takes_over_the_cells_and_networks_that_are_the_same(finished):
    folder, _, _ = finished
    engine = InProcess()
    other = replace(recipe(stages=(FEW, replace(FEW, criteria=("random",)))), name="other")
    outcome = run_study(other, folder.parent / "other-cpu", engine=engine)
    assert (outcome.done, outcome.ran) == (4, 2), "two taken over, two new"
    assert set(load_runs(folder.parent / "other-cpu").recipe) == {"other"}
    networks = list((folder.parent / "networks").glob("*/training.json"))
    assert len(networks) == 2, "nothing was trained again"


def test_other_code_is_run_again_unless_told_otherwise(finished, monkeypatch):
    folder, _, _ = finished
    (cell, _) = cells_of(recipe())
    place = folder / "cells" / cell.key
    assert is_done(place)
    monkeypatch.setattr("shaver.lab.run.runner.code_version", lambda of: "newer")
    assert not is_done(place)
    assert is_done(place, any_code=True)


def test_a_failed_cell_does_not_stop_the_others(tmp_path):
    wrong = replace(TINY, name="wrong", network={**CANCER, "inputs": 31})
    outcome = run_study(recipe(tasks=(wrong, TINY), methods=("map",)), tmp_path / "run", engine=LocalEngine(2))
    assert (outcome.done, outcome.ran) == (1, 1)
    ((label, error),) = outcome.failed.items()
    assert label == "wrong, map, seed 0"
    assert "expected samples of 31 numbers" in error
    (trace,) = (tmp_path / "run" / "cells").glob("*/error.txt")
    assert "Traceback" in trace.read_text()
    assert set(load_runs(tmp_path / "run").task) == {"tiny"}


def test_a_cell_whose_process_dies_is_listed(tmp_path, monkeypatch):
    class Dying(LocalEngine):
        def _poll(self, process, folder):
            process.kill()
            process.wait()
            return super()._poll(process, folder)

    outcome = run_study(recipe(methods=("map",)), tmp_path / "run", engine=Dying(1))
    assert list(outcome.failed.values()) == ["the process was ended by signal 9 (out of memory?)"]


def test_failed_cells_make_the_command_fail_and_name_the_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shaver.commands.run.LocalEngine", InProcess)
    arguments = ["run", "fcn-cancer", "--seeds", "1", "--epochs", "1", "--methods", "map", "--lr", "1e30"]
    assert main([*arguments, "--out", str(tmp_path / "run"), "--criteria", "magnitude"]) == 1
    captured = capsys.readouterr()
    assert "1 cells failed" in captured.err
    assert "fcn-cancer, map, seed 0" in captured.err
    assert "Diverged" in captured.err


LONG = replace(TINY, epochs=12, batch_size=32)
SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started with Ctrl-C ignored
sys.path.insert(0, {tests!r})
from pathlib import Path
from tests.lab.test_runner import LONG, recipe
from shaver.lab import run_study
from shaver.lab.run.engines import LocalEngine
try:
    run_study(recipe(tasks=(LONG,), methods=("spam",)), Path({out!r}), engine=LocalEngine(1))
except KeyboardInterrupt:
    sys.exit(130)
"""


#: Stops the process that is about to put its third checkpoint in place, and says so: the signal always comes in time.
PAUSE = """
import sys, time

def pause(event, arguments):
    if event == "os.rename" and "checkpoint-00003" in str(arguments[1]):
        open({paused!r}, "w").close()
        while True:
            time.sleep(1)

sys.addaudithook(pause)
sys.path.insert(0, {tests!r})
import tests  # the cell's process gets the draws of this one
"""


def start_long(out):
    """A study whose cell waits in the middle of its training."""
    place = out.parent.parent / "pause"
    place.mkdir()
    tests = str(Path(__file__).parents[2])
    (place / "sitecustomize.py").write_text(PAUSE.format(paused=str(place / "paused"), tests=tests))
    code = SCRIPT.format(tests=tests, out=str(out))
    path = os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    until = time.monotonic() + 300
    while not (place / "paused").exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < until, "no third checkpoint after five minutes"
        time.sleep(0.05)
    return process


def cell_process(out):
    """The number of the process that runs the only cell."""
    (status,) = (out / "cells").glob("*/status.json")
    return json.loads(status.read_text())["pid"]


def is_alive(pid):
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until_gone(pid):
    until = time.monotonic() + 120
    while is_alive(pid):
        assert time.monotonic() < until, "the cell outlived its study"
        time.sleep(0.05)


def uninterrupted(tmp_path):
    """The same cell, trained without a break, in this process."""
    (cell,) = cells_of(recipe(tasks=(LONG,), methods=("spam",)))
    folder = in_process(tmp_path, cell)
    return (folder / "rows.csv").read_text(), (folder / "history.csv").read_text()


def numbers(text, without):
    """The columns of a table but those that are times."""
    header, *lines = [line.split(",") for line in text.strip().splitlines()]
    keep = [i for i, name in enumerate(header) if name not in without]
    return [[line[i] for i in keep] for line in [header, *lines]]


TIMES = ("train_seconds", "score_seconds", "latency_ms", "seconds")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return uninterrupted(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_an_interrupted_study_goes_on_to_the_same_numbers(tmp_path, whole, how):
    out = tmp_path / "runs" / "tiny-cpu"
    process = start_long(out)
    cell = cell_process(out)
    process.send_signal(how)
    code = process.wait(120)
    wait_until_gone(cell)
    assert not list((out.parent / "networks").glob("*/training.json")), "it was stopped before the end"
    (status,) = (out / "cells").glob("*/status.json")
    if how == signal.SIGINT:
        assert code == 130
        assert json.loads(status.read_text())["state"] == "interrupted"
    engine = InProcess()
    outcome = run_study(recipe(tasks=(LONG,), methods=("spam",)), out, engine=engine)
    assert (outcome.done, len(engine.started)) == (1, 1)
    (folder,) = (out / "cells").iterdir()
    assert numbers((folder / "rows.csv").read_text(), TIMES) == numbers(whole[0], TIMES)
    assert numbers((folder / "history.csv").read_text(), TIMES) == numbers(whole[1], TIMES)


def test_a_cell_stopped_while_pruning_measures_only_what_is_missing(tmp_path, monkeypatch):
    (cell,) = cells_of(recipe(methods=("map",)))
    folder = in_process(tmp_path, cell)
    complete = (folder / "rows.csv").read_text()
    kept = [line for line in complete.splitlines() if "magnitude" not in line]
    (folder / "rows.csv").write_text("\n".join(kept) + "\n")
    scored = []
    monkeypatch.setattr(
        "shaver.lab.run.stage_rows.score",
        lambda model, name, **given: scored.append(name) or shaver.score(model, name, **given),
    )
    in_process(tmp_path, cell)
    assert scored == ["magnitude"]
    assert numbers((folder / "rows.csv").read_text(), TIMES) == numbers(complete, TIMES)


def test_two_studies_do_not_work_in_one_folder(tmp_path, monkeypatch):
    class Nosy(InProcess):
        def start(self, folder, store, any_code):
            with pytest.raises(ValueError, match="another shaver run is at work in"):
                run_study(recipe(), tmp_path / "run", engine=InProcess())
            return super().start(folder, store, any_code)

    assert run_study(recipe(methods=("map",)), tmp_path / "run", engine=Nosy()).done == 1


def test_a_damaged_study_is_named_and_kept(tmp_path):
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(ValueError, match=r"study\.json is not valid JSON"):
        run_study(recipe(), tmp_path, engine=InProcess())
    assert (tmp_path / "study.json").read_text() == "{"


@pytest.mark.parametrize(
    ("stage", "methods", "rows"),
    [
        (Stage("finetuned", ("opd",), (0.9,), epochs=1), ("map",), 2),
        (Stage("repaired", ("opd",), (0.5, 0.9), methods=("map",)), ("map", "spam"), 3),
        (Stage("online", ("opd", "magnitude"), (0.5, 0.9)), ("map", "spam"), 4),
        (Stage("structured", ("opd", "random"), (0.5,)), ("spam",), 3),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_every_stage_gives_its_rows(tmp_path, stage, methods, rows):
    outcome = run_study(recipe(methods=methods, stages=(stage,)), tmp_path / "run", engine=InProcess())
    assert outcome.failed == {}
    frame = load_runs(tmp_path / "run")
    assert len(frame) == rows
    assert set(frame.stage) == {stage.name}
    assert frame.accuracy.between(0, 1).all()
    pruned = frame[frame.criterion != DENSE]
    assert (pruned.achieved - pruned.sparsity).abs().max() < 0.07
    if stage.name == "structured":
        assert (pruned.parameters < frame.parameters.max()).all()
        assert (pruned.flops < frame.flops.max()).all()
        assert pruned.latency_ms.notna().all()
    else:
        assert (pruned.nonzeros < pruned.parameters).all()
    if stage.name == "finetuned":
        assert (pruned.tuning_epochs == 1).all()
    if stage.name == "online":
        assert set(zip(pruned.method, pruned.criterion, strict=True)) == {("spam", "opd"), ("map", "magnitude")}


def test_repaired_networks_are_nearer_to_the_dense_one(tmp_path):
    stages = (Stage("posthoc", ("magnitude",), (0.9,)), Stage("repaired", ("magnitude",), (0.9,)))
    assert run_study(recipe(methods=("map",), stages=stages), tmp_path / "run", engine=InProcess()).failed == {}
    frame = load_runs(tmp_path / "run")
    dense, pruned = frame[frame.criterion == DENSE], frame[frame.criterion != DENSE].set_index("stage")
    assert pruned.nonzeros["repaired"] == pruned.nonzeros["posthoc"]
    rise = pruned.nll - dense.nll.iloc[0]
    assert rise["repaired"] < rise["posthoc"]
    assert pruned.log_evidence.isna().to_dict() == {"posthoc": False, "repaired": True}


@pytest.mark.parametrize("curvature", ["diag-ef", "diag-ggn", "kron-mc", "kron-ggn"])
@pytest.mark.parametrize("prior", ["unit", "scalar"])
def test_every_prior_and_curvature_is_trained(tmp_path, prior, curvature):
    study = recipe(methods=("spam",), priors=(prior,), curvatures=(curvature,))
    assert run_study(study, tmp_path / "run", engine=InProcess()).failed == {}
    frame = load_runs(tmp_path / "run")
    assert set(frame.prior + " " + frame.structure + "-" + frame.source) == {f"{prior} {curvature}"}
    assert frame.log_evidence.notna().all()


def test_l1_searches_its_coefficient_first(tmp_path):
    assert run_study(recipe(methods=("l1",)), tmp_path / "run", engine=InProcess()).failed == {}
    (facts,) = (tmp_path / "networks").glob("*/training.json")
    assert json.loads(facts.read_text())["l1"] in (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)


def test_the_papers_algorithm_runs_at_the_papers_scale(tmp_path):
    tiny = replace(TINY, scale="paper", note="")
    study = replace(recipe(tasks=(tiny,), methods=("spam",), curvatures=("diag-ggn",)), scale="paper")
    assert run_study(study, tmp_path / "run", engine=InProcess()).failed == {}


def test_part_of_the_data_is_used_for_training_alone(tmp_path):
    from shaver.lab.run.networks import load_data

    (cell,) = cells_of(recipe(tasks=(replace(TINY, samples=100),), methods=("map",)))
    part, whole = load_data(cell.training), shaver.data.load("cancer", seed=0)
    assert (len(part.train), len(part.test)) == (100, len(whole.test))
    x, _ = part.train[:]
    everything = {tuple(row) for row in whole.train[:][0].tolist()}
    assert {tuple(row) for row in x.tolist()} <= everything, "normalised as the whole data are"


def test_the_same_grid_goes_through_submitit(tmp_path):
    engine = SlurmEngine(tmp_path / "jobs", {"timeout_min": 5}, cluster="local")
    outcome = run_study(recipe(methods=("map",)), tmp_path / "run", engine=engine)
    assert (outcome.done, outcome.failed) == (1, {})
    assert len(load_runs(tmp_path / "run")) == 5


def test_an_option_that_submitit_does_not_know_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"submitit did not take the options .*minutes"):
        SlurmEngine(tmp_path, {"minutes": 5}, cluster="local")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "0"], "processes must be an integer of at least 1, not 0"),
        (["--slurm", "mem_gb=8"], "only with --engine slurm"),
        (["--engine", "slurm", "--slurm", "mem_gb"], "KEY=VALUE"),
    ],
)
def test_impossible_options_of_a_run_are_explained(tmp_path, capsys, arguments, message):
    assert main(["run", "fcn-cancer", "--out", str(tmp_path / "run"), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_results_of_other_settings_are_kept_and_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shaver.commands.run.LocalEngine", InProcess)
    arguments = ["run", "fcn-cancer", "--out", str(tmp_path / "run"), "--seeds", "1", "--methods", "map"]
    arguments += ["--criteria", "magnitude", "--sparsities", "0.5"]
    assert main([*arguments, "--epochs", "2"]) == 0
    before = (tmp_path / "run" / "results.csv").read_text()
    assert main([*arguments, "--epochs", "2", "--seeds", "2"]) == 0, "more seeds take nothing away"
    assert not list((tmp_path / "run").glob("results-*.csv"))
    more = (tmp_path / "run" / "results.csv").read_text()
    assert set(before.splitlines()) <= set(more.splitlines())
    capsys.readouterr()
    assert main([*arguments, "--epochs", "1"]) == 0
    (kept,) = (tmp_path / "run").glob("results-*.csv")
    assert kept.read_text() == more
    shown = capsys.readouterr().out
    assert "results of other settings" in shown
    assert kept.name in shown


def test_a_network_that_did_not_learn_is_named_and_marked(tmp_path):
    """Two passes with hardly any step leave the network where it began: it always gives one answer."""
    stuck = replace(TINY, lr=1e-9, epochs=1)
    console = Console(file=io.StringIO(), width=120)
    outcome = run_study(recipe(tasks=(stuck,), methods=("map",), seeds=1, first_seed=1), tmp_path / "run",
                        engine=InProcess(), console=console)  # fmt: skip
    frame = load_runs(tmp_path / "run")
    assert set(frame.learned) == {"no"}, "every row of it says so"
    ((label, accuracy),) = outcome.unlearned.items()
    assert label == "tiny, map, seed 1"
    assert accuracy == frame.accuracy[frame.criterion == DENSE].item()
    assert "did not learn tiny, map, seed 1" in console.file.getvalue()
    again = run_study(recipe(tasks=(stuck,), methods=("map",), first_seed=1), tmp_path / "run", engine=InProcess())
    assert again.unlearned == outcome.unlearned, "also when it was done earlier"


def test_progress_tells_the_time_that_is_left_also_in_a_file(monkeypatch):
    monkeypatch.setattr("shaver.lab.run.progress._SECONDS", 0.0)
    cells = cells_of(recipe(seeds=2))
    console = Console(file=io.StringIO(), width=120)
    progress = Progress(console, recipe(seeds=2), cells)
    progress._began -= 40
    with progress:
        progress.refresh()  # nothing has begun: this time does not count
        progress._idle -= 30
        progress.set(cells[0], {"state": "done", "seconds": 20})
        progress.set(cells[1], {"state": "running", "note": "training, loss 0.1", "share": 0.2, "done": 1, "of": 3})
        progress.refresh()
    assert progress.share_done() == pytest.approx(1.2 / 4)
    lines = console.file.getvalue().splitlines()
    assert "1/4 tiny, map, seed 0, 0:20, about 1:30 left" in lines
    assert (
        "1 of 4 cells done, 0:40, about 1:10 left; tiny, spam, parameter, diag mc, seed 0: training, loss 0.1" in lines
    )


def test_the_recipe_of_a_run_is_saved_with_what_was_changed(tmp_path):
    recipe_ = get_recipe("fcn-cancer").override(epochs=1, seeds=1, methods=("map",), criteria=("magnitude",))
    run_study(recipe_, tmp_path / "run", engine=InProcess())
    study = json.loads((tmp_path / "run" / "study.json").read_text())
    assert study["recipe"] == json.loads(json.dumps(recipe_.as_dict()))
    assert study["note"] == "SGD instead of Adam, epochs 1 instead of 100"
