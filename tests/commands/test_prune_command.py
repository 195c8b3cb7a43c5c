"""``shaver prune``: the same as in Python, asks for nothing it does not need, and fails without a trace."""

import copy
import errno
import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save
from torch import nn

import shaver
from shaver.commands.main import main
from shaver.commands.outcome import before_and_after
from shaver.criteria import registry
from shaver.io import load_state, save_state, save_tensors

QUICK = {"every": 2, "update": 5, "shrink": 0.0, "burn_in": 0.0}
OWN = """
import torch
from torch import nn
class Splits: pass
def build():
    return nn.Sequential(nn.Linear(30, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 2))
def needs_an_argument(size): ...
def gives_a_number(): return 7
def data():
    import shaver
    known, own = shaver.data.load("cancer"), Splits()
    own.train, own.test, own.valid = (list(part.batches(64)) for part in (known.train, known.test, known.train))
    return own
def untested():
    own = data(); del own.test
    return own
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A SpaM and a MAP run on the breast cancer data, as ``fit`` leaves them."""
    folder = tmp_path_factory.mktemp("runs")
    data = shaver.data.load("cancer")
    for method in ("spam", "map"):
        model = shaver.zoo.build("fcn", seed=0, inputs=30, hidden=[16], classes=2)
        settings = {"spam": QUICK} if method == "spam" else {}
        shaver.fit(model, data.train, method=method, epochs=4, lr=0.1, folder=folder / method, **settings)
    return folder


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's own module and weights, in the folder they are in."""
    name = f"own_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 2))
    return name, model


def trained(folder):
    state = load_state(max(folder.glob("checkpoint-*.safetensors")))
    model = shaver.zoo.build(**state["network"])
    model.load_state_dict(state["model"])
    return model.eval()


def same(model, other):
    ours, theirs = model.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def fails(capsys, *arguments):
    """The one-line complaint of a command that must fail."""
    capsys.readouterr()
    assert main(["prune", *map(str, arguments)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("shaver: ")
    assert "Traceback" not in error
    return error


def test_the_help_explains_every_option_without_importing_torch():
    code = "import sys; from shaver.commands.main import main\n"
    code += "try: main(['prune', '--help'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for option in ("CHECKPOINT", "--criterion", "--sparsity", "--max-drop", "--scope", "--data", "--factory", "--out"):
        assert option in done.stdout
    assert "{None}" not in done.stdout


def test_a_spam_run_is_pruned_by_its_own_posterior_without_data(runs, tmp_path, capsys):
    out = tmp_path / "small"
    before = {path: path.read_bytes() for path in (runs / "spam").iterdir()}
    assert main(["prune", str(runs / "spam"), "--sparsity", "0.8", "--out", str(out)]) == 0
    reference = trained(runs / "spam")
    posterior = shaver.Posterior.load(runs / "spam" / "posterior.safetensors")
    pruned = shaver.prune(reference, shaver.score(reference, "opd", posterior=posterior), 0.8, posterior=posterior)
    assert same(shaver.load(out), reference)
    masks = shaver.files.load_masks(out)
    assert all(torch.equal(masks[name], mask) for name, mask in pruned.masks.items())
    report = json.loads((out / "pruning.json").read_text())
    assert (report["criterion"], report["requested"], report["achieved"]) == ("opd", 0.8, pruned.achieved)
    assert report["evidence_change"] == pytest.approx(pruned.evidence_change)
    assert "accuracy" not in report["after"]
    assert str(pruned) in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in (runs / "spam").iterdir()}, "the run was changed"


def test_the_table_and_the_report_show_what_is_true(runs, tmp_path, capsys):
    out = tmp_path / "small"
    arguments = ["prune", str(runs / "spam"), "--sparsity", "0.9", "--data", "cancer", "--out", str(out)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    report = json.loads((out / "pruning.json").read_text())
    test = shaver.data.load("cancer").test
    for column, model in (("before", trained(runs / "spam")), ("after", shaver.load(out).eval())):
        row = report[column]
        with torch.no_grad():
            logits = model(test[:][0]).double()
        labels, p = test[:][1], logits.softmax(1)
        assert row["accuracy"] == pytest.approx(float((logits.argmax(1) == labels).double().mean()))
        assert row["nll"] == pytest.approx(float(nn.functional.cross_entropy(logits, labels)), rel=1e-5)
        assert row["brier"] == pytest.approx(float((p - nn.functional.one_hot(labels, 2)).square().sum(1).mean()))
        assert row["nonzeros"] == sum(int((q != 0).sum()) for q in model.parameters())
        assert row["bytes_dense"] == 4 * (30 * 16 + 16 + 16 * 2 + 2)
        assert row["flops_sparse"] <= row["flops"]
        assert row["latency_1"] > 0
    kept = [file for file in out.iterdir() if file.name != "pruning.json"]
    assert report["after"]["bytes_stored"] == pytest.approx(sum(f.stat().st_size for f in kept), rel=0.05)
    assert report["after"]["bytes_stored"] < report["before"]["bytes_stored"]
    for title in ("accuracy", "ECE", "Brier", "bytes on disk", "FLOPs", "milliseconds"):
        assert title in shown
    line = next(line for line in shown.splitlines() if "accuracy, %" in line)
    numbers = [float(number) for number in re.findall(r"\d+\.\d+", line)[:3]]
    columns = ("before", "unrepaired", "after")
    assert numbers == pytest.approx([100 * report[c]["accuracy"] for c in columns], abs=0.005)
    assert report["unrepaired"].keys() == report["after"].keys()
    assert re.search("dense +pruned +repaired +change", shown)


def test_each_column_of_the_table_shows_its_own_network():
    dense, pruned, repaired = ({"bytes_stored": n, "flops": 10 * n, "latency_1": n / 1000} for n in (300, 21, 22))
    table = before_and_after(dense, repaired, None, unrepaired=pruned)
    shown = [list(column.cells) for column in table.columns[1:4]]
    assert shown == [["300", "3,000", "300.000"], ["21", "210", "21.000"], ["22", "220", "22.000"]]


@pytest.mark.parametrize("command", ["prune", "compact"])
def test_ranked_by_damage_and_fitted_together(runs, tmp_path, capsys, command):
    arguments = [command, str(runs / "map"), "--criterion", "damage", "--sparsity", "0.5", "--passes", "30"]
    assert main([*arguments, "--input-shape", "30"]) != 0
    assert re.search("--passes 30 .* needs data", capsys.readouterr().err)
    assert main([*arguments[:-2], "--input-shape", "30"]) != 0
    assert "--criterion damage needs data" in capsys.readouterr().err
    assert main([*arguments, "--data", "cancer", "--out", str(tmp_path / "small")]) == 0
    shown = capsys.readouterr().out
    assert re.search("dense +pruned +repaired +change", shown)
    assert "Posterior" not in shown
    x = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    assert main([*arguments[:-2], "--data", "cancer", "--out", str(tmp_path / "alone")]) == 0
    assert not torch.allclose(shaver.load(tmp_path / "small")(x), shaver.load(tmp_path / "alone")(x))


def test_without_repair_the_weights_that_are_left_stay_as_they_are(runs, tmp_path, capsys):
    out = tmp_path / "small"
    arguments = ["prune", str(runs / "map"), "--criterion", "magnitude", "--sparsity", "0.5", "--data", "cancer"]
    assert main([*arguments, "--no-repair", "--out", str(out)]) == 0
    assert re.search("before +after +change", capsys.readouterr().out)
    reference = trained(runs / "map")
    shaver.prune(reference, shaver.score(reference, "magnitude"), 0.5)
    assert same(shaver.load(out), reference)


def test_a_network_of_the_demo_has_its_posterior_beside_it(runs, tmp_path):
    model = trained(runs / "map")
    arguments = shaver.zoo.arguments_of(model)
    save_state(tmp_path / "cancer-map-0.safetensors", {"network": arguments, "weights": model.state_dict()})
    curvature = shaver.curvature.estimate(model, shaver.data.load("cancer").train.batches(256))
    posterior = shaver.Posterior(curvature, 1.0, dict(model.named_parameters()))
    posterior.save(tmp_path / "cancer-map-0-posterior.safetensors")
    out = tmp_path / "small"
    assert main(["prune", str(tmp_path / "cancer-map-0.safetensors"), "--sparsity", "0.7", "--out", str(out)]) == 0
    shaver.prune(model, shaver.score(model, "opd", posterior=posterior), 0.7)
    assert same(shaver.load(out), model)


def test_auto_is_what_the_evidence_says(runs, tmp_path):
    out = tmp_path / "small"
    assert main(["prune", str(runs / "spam"), "--sparsity", "auto", "--out", str(out)]) == 0
    reference = trained(runs / "spam")
    posterior = shaver.Posterior.load(runs / "spam" / "posterior.safetensors")
    shaver.prune(reference, None, "auto", posterior=posterior)
    assert same(shaver.load(out), reference)


def test_a_map_run_gets_its_posterior_from_the_curvature(runs, tmp_path, capsys):
    out = tmp_path / "small"
    arguments = ["prune", str(runs / "map"), "--sparsity", "0.8", "--data", "cancer", "--prior-precision", "2"]
    assert main([*arguments, "--no-repair", "--out", str(out)]) == 0
    assert "an assumed prior precision of 2" in " ".join(capsys.readouterr().out.split())
    reference = trained(runs / "map")
    curvature = shaver.curvature.estimate(reference, shaver.data.load("cancer").train.batches(256))
    posterior = shaver.Posterior(curvature, 2.0, dict(reference.named_parameters()))
    shaver.prune(reference, shaver.score(reference, "opd", posterior=posterior), 0.8)
    assert same(shaver.load(out), reference)
    assert main(["prune", str(runs / "map"), "--sparsity", "0.8", "--data", "cancer"]) == 0
    assert "chosen by the evidence" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("criterion", shaver.criteria.names())
def test_a_criterion_is_asked_for_what_it_needs_and_no_more(runs, criterion, capsys):
    arguments = ["prune", str(runs / "map"), "--sparsity", "0.5", "--criterion", criterion]
    if shaver.criteria.needs(criterion):
        assert "--data NAME" in fails(capsys, *arguments[1:])
        if criterion == "synflow":
            assert main([*arguments, "--input-shape", "30"]) == 0
    else:
        assert main(arguments) == 0
    assert main([*arguments, "--data", "cancer", "--samples", "100"]) == 0


def test_a_tolerated_drop_is_kept_on_validation_data(runs, tmp_path):
    out = tmp_path / "small"
    data = shaver.data.load("cancer", valid_fraction=0.2)
    model = shaver.zoo.build("fcn", seed=0, inputs=30, hidden=[16], classes=2)
    shaver.fit(model, data.train, method="map", epochs=4, lr=0.1, folder=tmp_path / "held")
    arguments = ["prune", str(tmp_path / "held"), "--criterion", "magnitude", "--max-drop", "0.02", "--data", "cancer"]
    assert main([*arguments, "--valid-fraction", "0.2", "--out", str(out)]) == 0
    valid = data.valid.batches(256)
    dense = shaver.measure.quality(trained(tmp_path / "held"), valid).accuracy
    assert shaver.measure.quality(shaver.load(out), valid).accuracy >= dense - 0.02
    assert json.loads((out / "pruning.json").read_text())["achieved"] > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "needs samples that training did not see.*--valid-fraction"),
        (["--valid-fraction", "0.2"], r"trained on 455 samples, but --valid-fraction 0.2 of cancer leaves 364"),
    ],
)
def test_samples_that_were_trained_on_do_not_choose_a_sparsity(runs, capsys, given, message):
    arguments = (runs / "map", "--criterion", "magnitude", "--max-drop", "0.02", "--data", "cancer", *given)
    assert re.search(message, fails(capsys, *arguments))


def test_two_of_four_and_layers(runs, tmp_path):
    for scope, extra in (("2:4", []), ("layer", ["--sparsity", "0.5"])):
        out = tmp_path / scope.replace(":", "of")
        arguments = ["prune", str(runs / "map"), "--criterion", "magnitude", "--scope", scope, *extra]
        assert main([*arguments, "--out", str(out)]) == 0
        for name, mask in shaver.files.load_masks(out).items():
            assert float(mask.double().mean()) == pytest.approx(0.5, abs=0.03), name


@pytest.mark.parametrize("kind", ["torch", "nested", "safetensors"])
def test_a_users_own_network_comes_from_a_factory_and_a_state_dict(own, kind, tmp_path):
    name, model = own
    path = f"weights.{'safetensors' if kind == 'safetensors' else 'pt'}"
    if kind == "safetensors":
        save_tensors(path, model.state_dict())
    else:
        torch.save(model.state_dict() if kind == "torch" else {"epoch": 3, "state_dict": model.state_dict()}, path)
    arguments = ["prune", path, "--factory", f"{name}:build", "--data", f"{name}:data", "--max-drop", "0.5"]
    assert main([*arguments, "--criterion", "snip", "--no-repair", "--out", "small"]) == 0
    small = shaver.load("small", lambda: nn.Sequential(nn.Linear(30, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 2)))
    for (key, kept), (_, was) in zip(small.state_dict().items(), model.state_dict().items(), strict=True):
        assert torch.equal(kept, torch.where(kept == 0, torch.zeros_like(was), was)), key
    with pytest.raises(ValueError, match="not how to build their network"):
        shaver.load("small")


def test_a_safetensors_file_may_begin_like_a_pickle(own):
    """Its first byte is a length, and 0x80 is as good a length as any."""
    name, model = own
    pad = 0
    while (content := save(model.state_dict(), {"pad": "x" * pad}))[0] != 0x80:
        pad += 1
    with open("weights.safetensors", "wb") as file:
        file.write(content)
    arguments = ["prune", "weights.safetensors", "--factory", f"{name}:build", "--sparsity", "0.5"]
    assert main([*arguments, "--criterion", "magnitude", "--out", "small"]) == 0


def test_a_run_of_a_users_own_network_needs_its_factory(own, capsys):
    name, model = own
    shaver.fit(model, shaver.data.load("cancer").train, epochs=2, spam=QUICK, folder="run")
    assert "pass --factory" in fails(capsys, "run", "--sparsity", "0.5")
    assert main(["prune", "run", "--sparsity", "0.5", "--factory", f"{name}:build"]) == 0


def test_a_saved_network_is_pruned_further(runs, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    start = ["prune", str(runs / "map"), "--criterion", "magnitude"]
    assert main([*start, "--sparsity", "0.5", "--out", str(first)]) == 0
    again = ["prune", str(first), "--criterion", "magnitude", "--sparsity", "0.9", "--input-shape", "30"]
    assert main([*again, "--out", str(second)]) == 0
    reference = trained(runs / "map")
    shaver.prune(reference, shaver.score(reference, "magnitude"), 0.9)
    assert same(shaver.load(second), reference)
    assert json.loads((second / "pruning.json").read_text())["after"]["flops"] == 2 * (30 * 16 + 16 * 2)
    assert main([*again, "--out", str(first)]) == 0, "an earlier result may be replaced"
    assert same(shaver.load(first), reference)


def test_an_earlier_checkpoint_is_not_judged_by_a_later_posterior(runs, capsys):
    earlier = min((runs / "spam").glob("checkpoint-*"))
    assert "call shaver.fit again to finish" in fails(capsys, earlier, "--sparsity", "0.5")
    estimated = ["prune", str(earlier), "--sparsity", "0.5", "--data", "cancer", "--prior-precision", "1"]
    assert main(estimated) == 0


def test_a_regression_is_measured_as_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wavy.py").write_text(
        "import torch\nclass Splits: pass\ndef data():\n    x = torch.randn(64, 6); own = Splits()\n"
        "    own.train = own.test = [(x, x[:, :1])]\n    return own\n"
    )
    model = shaver.zoo.build("fcn", seed=0, inputs=6, hidden=[8], classes=1)
    x = torch.randn(64, 6)
    shaver.fit(model, [(x, x[:, :1])], method="map", likelihood="regression", epochs=2, folder="run")
    arguments = ["prune", "run", "--data", "wavy:data", "--sparsity", "0.5"]
    assert main(arguments) == 0
    assert "root mean squared error" in capsys.readouterr().out
    assert "regression does not have" in fails(capsys, "run", "--data", "wavy:data", "--max-drop", "0.1")


def test_bad_input_is_answered_and_nothing_is_written(runs, own, tmp_path, capsys):
    name, model = own
    torch.save(model.state_dict(), "weights.pt")
    torch.save(model, "pickled.pt")
    torch.save({"epoch": 3}, "empty.pt")
    (tmp_path / "notes.txt").write_text("not a network")
    whole = (tmp_path / "weights.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    checkpoint = max((runs / "map").glob("checkpoint-*")).read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(checkpoint[: len(checkpoint) // 2])
    run, out = runs / "map", ["--out", "never"]
    magnitude, factory = ["--criterion", "magnitude", "--sparsity", "0.9"], ["--factory", f"{name}:build"]
    for arguments, message in [
        ([run, "--criterion", "magnitude", "--sparsity", "95"], "95 % is 0.95"),
        ([run, "--criterion", "magnitude", "--sparsity", "1.0"], r"in \[0, 1\)"),
        ([run, "--criterion", "magnitud", "--sparsity", "0.9"], "did you mean 'magnitude'"),
        ([run, "--criterion", "magnitude"], "say how much to remove: --sparsity 0.95"),
        ([run, "--criterion", "snip", "--sparsity", "auto"], "leave out --criterion snip"),
        ([run, "--max-drop", "0.1"], "--max-drop needs validation data: give --data NAME"),
        ([run, *magnitude, "--data", "digits"], "--data digits does not fit FCN"),
        ([run, *magnitude, "--data", "digit"], "did you mean 'digits'"),
        ([run, *magnitude, "--data", "imdb"], "imdb is text"),
        ([run, *magnitude, "--input-shape", "7"], "--input-shape does not fit FCN"),
        ([run, *magnitude, "--scope", "4:2"], "must keep fewer"),
        ([run, *magnitude, "--scope", "units"], "--scope units is for causal language models: give --calibration"),
        ([run, *magnitude, "--windows", "8"], "--windows is for causal language models: give --calibration"),
        ([run, *magnitude, "--factory", f"{name}:build"], "does not fit Sequential"),
        ([run, *magnitude, "--cap", "2"], "cap is the largest share"),
        ([run, "--sparsity", "0.9", "--data", "cancer", "--prior-precision", "-1"], "must be positive"),
        ([run, "--sparsity", "0.9", "--data", "cancer", "--samples", "0"], "--samples must be an integer"),
        ([runs, *magnitude], "no run of shaver.fit .* There is .*checkpoint"),
        (["nowhere", *magnitude], "nowhere does not exist"),
        (["notes.txt", *magnitude], "damaged or another kind of file"),
        (["cut.safetensors", *magnitude], "damaged or another kind of file"),
        (["cut.pt", *magnitude, *factory], "cut.pt cannot be read as plain tensors"),
        (["pickled.pt", *magnitude, *factory], "holds pickled objects, which are not loaded"),
        (["empty.pt", *magnitude, *factory], "holds no state dict"),
        ([runs / "spam" / "posterior.safetensors", *magnitude], "does not hold a network"),
        (["weights.pt", *magnitude], "pass --factory package.module:function"),
        (["weights.pt", *magnitude, "--factory", "shaver.zoo:LeNet"], "does not fit LeNet: .*missing in the file"),
        (["weights.pt", *magnitude, "--factory", "build"], "must have the form package.module:function, not 'build'"),
        (["weights.pt", *magnitude, "--factory", f"{name}:biuld"], "did you mean 'build'"),
        (["weights.pt", *magnitude, "--factory", "nowhere.else:build"], "No module named 'nowhere'"),
        (["weights.pt", *magnitude, "--factory", f"{name}:needs_an_argument"], "called without arguments"),
        (["weights.pt", *magnitude, "--factory", f"{name}:gives_a_number"], "returned a int, not a torch"),
        (["weights.pt", *magnitude, *factory, "--data", f"{name}:untested"], r"without \.test"),
    ]:
        assert re.search(message, fails(capsys, *arguments, *out)), message
        assert not (tmp_path / "never").exists(), message
    assert not list(tmp_path.glob(".*part"))


def test_a_folder_with_something_else_in_it_is_left_alone(runs, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("precious")
    run = [runs / "map", "--criterion", "magnitude", "--sparsity", "0.9"]
    assert "holds something else" in fails(capsys, *run, "--out", tmp_path)
    assert "holds something else" in fails(capsys, *run, "--out", tmp_path / "thesis.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    assert main(["prune", *map(str, run), "--out", str(tmp_path / "empty")]) == 0
    assert shaver.load(tmp_path / "empty")


def test_a_full_disk_leaves_the_old_network_or_none(runs, tmp_path, capsys, monkeypatch):
    out = tmp_path / "small"
    run = ["prune", str(runs / "map"), "--criterion", "magnitude", "--out", str(out), "--sparsity"]

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shaver.commands.outcome.write_json", full)
        assert "No space left" in fails(capsys, *run[1:], "0.5")
        assert list(tmp_path.iterdir()) == []
    assert main([*run, "0.5"]) == 0
    half = shaver.load(out)
    with monkeypatch.context() as patch:
        patch.setattr("shaver.files.saved.save_tensors", full)
        with pytest.raises(OSError, match="No space"):
            shaver.save(half, out)
    assert same(shaver.load(out), half)


def test_a_criterion_of_the_users_own_comes_with_the_factory(own, capsys):
    name, model = own
    with open(f"{name}.py", "a") as file:
        file.write(
            "import shaver\n@shaver.criteria.criterion('largest-first')\ndef largest_first(given):\n"
            "    return {n: -w.detach().abs() for n, w in given.weights.items()}\n"
        )
    torch.save({f"module.{key}": value for key, value in model.state_dict().items()}, "weights.pt")  # DDP's names
    arguments = ["prune", "weights.pt", "--factory", f"{name}:build", "--criterion", "largest-first"]
    assert main([*arguments, "--sparsity", "0.5", "--out", "small"]) == 0
    del registry._REGISTER["largest-first"]
    small = shaver.load("small", factory=lambda: copy.deepcopy(model))
    assert float(small[0].weight.detach().abs().max()) < float(model[0].weight.detach().abs().max())


def test_auto_with_an_assumed_prior_is_refused(runs, capsys):
    asked = [runs / "map", "--sparsity", "auto", "--data", "cancer", "--prior-precision", "1"]
    assert "δ was not learned with these weights" in fails(capsys, *asked)


def test_the_network_is_measured_on_the_same_inputs_whether_or_not_some_are_held_out(runs, capsys):
    found = []
    for how in ([], ["--valid-fraction", "0.2"]):
        capsys.readouterr()
        assert main(["prune", str(runs / "spam"), "--data", "cancer", "--sparsity", "0.5", *how]) == 0
        lines = capsys.readouterr().out.splitlines()
        found.append(next(line.split()[3] for line in lines if "negative log likelihood" in line))
    assert found[0] == found[1]
