"""Compact networks in torch.compile, torch.export and ONNX compute what they do in Python."""

import pytest
import torch
from torch import nn

from shaver.structure import export_onnx, find_groups, remove_units
from tests.structure.compact_cases import Encoder, case, draw, numbers, outputs, shaken


def encoder():
    model, example = shaken(Encoder()), numbers(4, 5, 24)
    groups = find_groups(model, example)
    return remove_units(model, groups, draw(groups, 1), example).model, example


def of(name):
    def build():
        model, groups, example = case(name)
        return remove_units(model, groups, draw(groups, 1), example).model, example

    return build


SMALL = {"lenet": of("lenet"), "depthwise": of("depthwise"), "encoder": encoder}


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", SMALL)
def test_torch_compile_and_torch_export(name):
    model, example = SMALL[name]()
    model, example = model.float(), example.float()
    expected = outputs(model, example)
    compiled = torch.compile(model, backend="aot_eager")
    assert_close(outputs(compiled, example), expected)
    exported = torch.export.export(model, (example,))
    assert_close(exported.module()(example).detach(), expected)


@pytest.mark.parametrize("name", ["lenet", "encoder"])
def test_onnx_in_onnxruntime_at_another_batch_size(tmp_path, name, capfd):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, example = SMALL[name]()
    model, example = model.float().train(), example.float()
    file = export_onnx(model, example, tmp_path / "small.onnx")
    assert model.training
    assert [path.name for path in tmp_path.iterdir()] == ["small.onnx"]
    assert capfd.readouterr() == ("", "")
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    inputs = torch.cat([example, example.flip(0), example[:1] + 1])
    found = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0]
    assert_close(torch.from_numpy(found), outputs(model.eval(), inputs))


def test_an_example_of_one_sample_leaves_the_batch_size_open(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, example = of("lenet")()
    model, example = model.float(), example.float()
    file = export_onnx(model, example[:1], tmp_path / "small.onnx")
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for inputs in (example, example[:1]):
        found = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0]
        assert_close(torch.from_numpy(found), outputs(model, inputs))


def test_a_network_for_one_batch_size_is_refused_or_written_for_that_size(tmp_path):
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x.reshape(1, 3))

    pytest.importorskip("onnxscript")
    with pytest.raises(ValueError, match=r"One does not run on 2 samples .*dynamic_batch=False"):
        export_onnx(One(), torch.randn(1, 3), tmp_path / "one.onnx")
    assert export_onnx(One(), torch.randn(1, 3), tmp_path / "one.onnx", dynamic_batch=False).is_file()


def test_a_file_that_computes_something_else_is_not_written(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    file = tmp_path / "net.onnx"
    file.write_text("the older file")
    model = nn.Linear(3, 2)
    monkeypatch.setattr("shaver.structure.export._run", lambda path, inputs: model(inputs[0]).detach() + 1e-3)
    with pytest.raises(ValueError, match=r"differs from the network by .* was not written"):
        export_onnx(model, torch.randn(4, 3), file)
    assert file.read_text() == "the older file"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_exported_says_why(tmp_path, monkeypatch):
    class Chooses(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else x.numpy()

    pytest.importorskip("onnxscript")
    with pytest.raises(ValueError, match="Chooses cannot be exported to ONNX"):
        export_onnx(Chooses(), torch.ones(2, 3), tmp_path / "no.onnx")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("shaver.structure.export.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "shaver\[onnx\]"'):
        export_onnx(nn.Linear(3, 2), torch.ones(2, 3), tmp_path / "no.onnx")


@pytest.mark.parametrize("named", [True, False])
def test_onnx_of_a_network_that_returns_more_than_a_tensor(tmp_path, named):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x, scale=None):
            return {"logits": self.layer(x) * scale, "input": x} if named else (x, self.layer(x))

    model = Pair()
    x, scale = torch.randn(4, 3), torch.rand(4, 1)
    example = {"x": x, "scale": scale} if named else x
    pick = {} if named else {"outputs": lambda result: result[1]}
    file = export_onnx(model, example, tmp_path / "pair.onnx", **pick)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    values = [x[:3].numpy(), scale[:3].numpy()]
    names = [wanted.name for wanted in session.get_inputs()]
    assert names == ["x", "scale"] if named else len(names) == 1
    found = session.run(None, dict(zip(names, values, strict=False)))[0]
    expected = model.layer(x[:3]) * (scale[:3] if named else 1)
    torch.testing.assert_close(torch.from_numpy(found), expected.detach())
    if not named:
        with pytest.raises(TypeError, match="returned a tuple"):
            export_onnx(model, example, tmp_path / "no.onnx")
