"""``shaver compact`` and ``shaver export``: the same as in Python, and nothing is left behind where it fails."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import shaver
from shaver.commands.main import main
from shaver.structure import Gradual, compact_with_report

QUICK = {"every": 2, "update": 5, "prior": "unit", "burn_in": 0.0}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A SpaM and a MAP run on the breast cancer data, as ``fit`` leaves them."""
    folder = tmp_path_factory.mktemp("runs")
    data = shaver.data.load("cancer")
    example = next(iter(data.train.batches(2)))[0]
    for method, options in (
        ("spam", {"spam": QUICK}),
        ("map", {}),
        ("gradual", {"online": Gradual(0.5, example=example)}),
    ):
        model = shaver.zoo.build("fcn", seed=0, inputs=30, hidden=[16, 8], classes=2)
        how = "spam" if method == "spam" else "map"
        shaver.fit(model, data.train, method=how, epochs=6, lr=0.1, folder=folder / method, **options)
    return folder


def fails(capsys, *arguments):
    assert main([str(a) for a in arguments]) == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err


def test_a_spam_run_is_made_smaller_measured_and_written(runs, tmp_path, capsys):
    out = tmp_path / "small"
    assert main(["compact", str(runs / "spam"), "--sparsity", "0.5", "--data", "cancer", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "the one saved with the network" in text
    for line in ("accuracy, %", "calibration error", "Brier", "parameters", "FLOPs per sample", "milliseconds for 128"):
        assert line in text
    small = shaver.load(out)
    assert [layer.out_features for layer in small.layers if hasattr(layer, "out_features")] == [8, 4, 2]
    report = json.loads((out / "compact.json").read_text())
    assert report["widths"] == {"layers.0": {"before": 16, "after": 8}, "layers.2": {"before": 8, "after": 4}}
    assert (report["requested"], report["achieved"], report["input_shape"]) == (0.5, 0.5, [30])
    assert report["after"]["flops"] == 2 * (30 * 8 + 8 * 4 + 4 * 2)
    x = torch.randn(4, 30)
    model = shaver.zoo.build("fcn", inputs=30, hidden=[16, 8], classes=2)
    state = shaver.io.load_state(sorted((runs / "spam").glob("checkpoint-*"))[-1])
    model.load_state_dict(state["model"])
    posterior = shaver.Posterior.load(runs / "spam" / "posterior.safetensors")
    same = shaver.compact(model, torch.randn(2, 30), posterior=posterior, sparsity=0.5)
    assert not torch.allclose(same(x), small(x))  # repaired
    arguments = ["compact", runs / "spam", "--sparsity", "0.5", "--data", "cancer", "--no-repair", "--out", out]
    assert main([str(a) for a in arguments]) == 0
    torch.testing.assert_close(same(x), shaver.load(out)(x))


def test_fine_tuning_and_a_flops_target(runs, tmp_path, capsys):
    arguments = ["compact", runs / "map", "--sparsity", "0.8", "--target", "flops", "--criterion", "magnitude"]
    arguments += ["--spread", "global", "--data", "cancer", "--finetune", "3", "--lr", "0.05", "--out", tmp_path / "s"]
    assert main([str(a) for a in arguments]) == 0
    assert "Before fine-tuning the accuracy was" in capsys.readouterr().out
    report = json.loads((tmp_path / "s" / "compact.json").read_text())
    assert 1 - report["after"]["flops"] / report["before"]["flops"] >= 0.8
    assert report["after"]["nll"] < report["removed"]["nll"]
    assert shaver.measure.quality(
        shaver.load(tmp_path / "s"), shaver.data.load("cancer").test.batches(256)
    ).accuracy == pytest.approx(report["after"]["accuracy"])


def test_units_that_fell_while_training_go_without_a_sparsity(runs, tmp_path, capsys):
    before = {path: path.read_bytes() for path in (runs / "gradual").iterdir()}
    assert main(["compact", str(runs / "gradual"), "--input-shape", "30", "--out", str(tmp_path / "g")]) == 0
    text = capsys.readouterr().out
    assert "give --data to measure accuracy" in text
    report = json.loads((tmp_path / "g" / "compact.json").read_text())
    assert {name: w["after"] for name, w in report["widths"].items()} == {"layers.0": 8, "layers.2": 4}
    assert before == {path: path.read_bytes() for path in (runs / "gradual").iterdir()}


def test_the_exported_file_computes_the_same(runs, tmp_path, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    out = tmp_path / "small"
    common = ["--criterion", "magnitude", "--input-shape", "30", "--round-to", "4", "--out", str(out)]
    assert main(["compact", str(runs / "map"), "--sparsity", "0.5", *common]) == 0
    assert main(["export", str(out), "--onnx"]) == 0
    assert f"written to {out / 'network.onnx'}" in capsys.readouterr().out.replace("\n", "")
    x = np.random.default_rng(0).normal(size=(5, 30)).astype(np.float32)
    session = onnxruntime.InferenceSession(out / "network.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x})
    np.testing.assert_allclose(found, shaver.load(out)(torch.from_numpy(x)).detach().numpy(), atol=1e-5)
    assert "say what to write" in fails(capsys, "export", out)
    assert "--onnx takes one path" in fails(capsys, "export", out, "--onnx", "a", "b")
    assert "give --input-shape" in fails(capsys, "export", runs / "map", "--onnx", tmp_path / "x.onnx")


def test_the_python_report_is_what_is_printed(runs, capsys):
    model = shaver.zoo.build("fcn", seed=3, inputs=30, hidden=[16, 8], classes=2)
    text = str(compact_with_report(model, torch.randn(2, 30), criterion="random", sparsity=0.25, seed=5))
    options = ["--sparsity", "0.25", "--criterion", "random", "--seed", "5", "--input-shape", "30"]
    assert main(["compact", str(runs / "map"), *options]) == 0
    assert text in capsys.readouterr().out  # random scores do not depend on the weights


def test_without_a_posterior_units_are_ranked_as_in_python(runs, tmp_path, capsys):
    network = shaver.files.load_trained(runs / "map").model
    train = list(shaver.data.load("cancer").train.batches(256))
    small = shaver.compact(network, torch.zeros(2, 30), sparsity=0.5, calibration=train)
    assert main(["compact", str(runs / "map"), "--sparsity", "0.5", "--data", "cancer", "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "compact.json").read_text())["criterion"] == "damage"
    x = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(shaver.load(tmp_path)(x), small(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sparsity", "80", "--input-shape", "30"], "80 % is 0.8"),
        (["--sparsity", "0.5"], "give --input-shape, such as 1 28 28, or give --data NAME"),
        (["--sparsity", "0.5", "--finetune", "2", "--input-shape", "30"], "--finetune needs data"),
        (["--sparsity", "0.5", "--finetune", "-1", "--data", "cancer"], "0 or more epochs, not -1"),
        (["--sparsity", "0.5", "--round-to", "0", "--data", "cancer"], "round_to must be"),
        (["--sparsity", "0.5", "--input-shape", "30"], "--criterion opd needs a posterior"),
        (["--sparsity", "0.5", "--criterion", "snip", "--input-shape", "30"], "--criterion snip needs data"),
        (["--sparsity", "0.5", "--criterion", "opdd", "--input-shape", "30"], "did you mean 'opd'"),
        (["--sparsity", "0.99", "--criterion", "magnitude", "--input-shape", "30"], "out of reach"),
        (["--sparsity", "0.5", "--criterion", "magnitude", "--input-shape", "31"], "--input-shape does not fit FCN"),
    ],
)
def test_errors_are_one_line_and_nothing_is_written(runs, tmp_path, capsys, arguments, message):
    assert message in fails(capsys, "compact", runs / "map", "--out", tmp_path / "out", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_the_help_comes_without_torch():
    code = "import sys\nfrom shaver.commands.main import main\n"
    code += "for c in ('compact', 'export'):\n  try: main([c, '--help'])\n  except SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for option in ("--sparsity", "--target", "--round-to", "--finetune", "--criterion", "--data", "--out", "--onnx"):
        assert option in done.stdout


def test_a_network_written_over_another_leaves_nothing_that_was_made_from_that(runs, tmp_path, capsys):
    out = tmp_path / "small"
    assert main(["compact", str(runs / "map"), "--input-shape", "30", "--out", str(out)]) == 0
    for name in ("network.onnx", "network.onnx.data"):
        (out / name).write_bytes(b"other weights" * 1000)
    (out / "notes.txt").write_text("mine")
    arguments = ["prune", str(runs / "map"), "--criterion", "magnitude", "--sparsity", "0.5", "--out", str(out)]
    assert main(arguments) == 0
    names = {path.name for path in out.iterdir()}
    assert not {"network.onnx", "network.onnx.data", "compact.json"} & names
    assert {"pruning.json", "notes.txt"} <= names


def test_a_missing_folder_is_named_before_anything_else(tmp_path, capsys):
    assert "nowhere does not exist" in fails(capsys, "export", tmp_path / "nowhere", "--onnx")
