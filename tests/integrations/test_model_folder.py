"""From model folder to model folder: plain transformers opens it, a killed call continues, bad input is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shaver.commands.main import main
from shaver.integrations.calibration_text import read_windows
from shaver.integrations.model_folder import prune_folder
from shaver.integrations.oneshot import OneShot
from tests.integrations.causal_models import FAMILIES, folder, text, tokenizer, transformers, windows

_HALF = OneShot(sparsity=0.5)
_SMALLER = OneShot(sparsity=0.5, units=True)
_SHALLOWER = OneShot(sparsity=0.5, layers=True)
#: Opens every folder with plain transformers, and generates with a cache from a padded batch.
_SCRIPT = """
import sys
sys.modules["shaver"] = None
import torch, transformers
from pathlib import Path
from safetensors.torch import save_file
torch.set_num_threads(1)
for folder in map(Path, sys.argv[1:]):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([[5, 6, 7, 8, 9], [0, 0, 0, 11, 12]])  # the second text is padded on the left
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    with torch.no_grad():
        logits = model(**batch).logits[:, -1]
    words = model.generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    save_file({"logits": logits.contiguous(), "words": words.contiguous()}, folder / "outputs.safetensors")
"""


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(text())
    return path


def test_plain_transformers_opens_every_family_and_generates(tmp_path: Path) -> None:
    folders = []
    for name in FAMILIES:
        source = folder(tmp_path / name / "dense", name)
        found = prune_folder(source, tmp_path / name / "sparse", windows(8), _HALF)
        assert found.sparsity == pytest.approx(0.5, abs=0.02)
        small = prune_folder(source, tmp_path / name / "small", windows(8), _SMALLER)
        sizes = [(place / "model.safetensors").stat().st_size for place in (source, small.folder)]
        assert sizes[1] < 0.8 * sizes[0]
        shallow = prune_folder(source, tmp_path / name / "shallow", windows(8), _SHALLOWER)
        assert shallow.sparsity == 0.5
        folders += [found.folder, small.folder, shallow.folder]
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT, *map(str, folders)]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=600)
    for place in folders:
        model = transformers.AutoModelForCausalLM.from_pretrained(place).eval()
        outputs = load_file(place / "outputs.safetensors")
        with torch.no_grad():
            for row, ids in enumerate(([5, 6, 7, 8, 9], [11, 12])):
                if row and model.config.model_type == "gpt2":
                    continue  # its learned positions are shifted by the padding
                expected = model(torch.tensor([ids])).logits[0, -1]
                torch.testing.assert_close(outputs["logits"][row], expected, rtol=1e-4, atol=1e-4)
        assert outputs["words"].shape == (2, 9)
        assert (place / "generation_config.json").exists()
        if place.name == "shallow":
            assert model.config.num_hidden_layers == 1
            continue
        report = json.loads((place / "pruning.json").read_text())
        nonzero = [int((model.get_parameter(row["name"]) != 0).sum()) for row in report["matrices"]]
        assert nonzero == [row["kept"] for row in report["matrices"]]
        if place.name == "small":
            assert nonzero == [model.get_parameter(row["name"]).numel() for row in report["matrices"]]


@pytest.mark.parametrize("settings", [_HALF, OneShot(pattern=(2, 4), dense_target=True), _SMALLER, _SHALLOWER])
def test_an_interrupted_call_continues_to_the_same_weights(
    tmp_path: Path, calibration: Path, settings: OneShot
) -> None:
    source = folder(tmp_path / "dense", dtype=torch.bfloat16)

    def killed(done: int, total: int) -> None:
        if not settings.layers or done == total:  # layers are tried first
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune_folder(source, tmp_path / "a", calibration, settings, windows=8, length=16, progress=killed)
    assert not (tmp_path / "a").exists()
    again = prune_folder(source, tmp_path / "a", calibration, settings, windows=8, length=16)
    whole = prune_folder(source, tmp_path / "b", calibration, settings, windows=8, length=16)
    repaired = 1 if not settings.layers else int(again.matrices[0].kept == 0)  # those after a removed layer
    assert (again.resumed, whole.resumed) == (repaired, 0)
    assert not list(tmp_path.glob(".*.partial"))
    first, second = (load_file(place.folder / "model.safetensors") for place in (again, whole))
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(value, second[key], rtol=0.02, atol=1e-3)


def test_blocks_of_another_call_are_not_used(tmp_path: Path, calibration: Path) -> None:
    source = folder(tmp_path / "dense")

    def killed(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune_folder(source, tmp_path / "a", calibration, _HALF, windows=8, length=16, progress=killed)
    other = prune_folder(source, tmp_path / "a", calibration, OneShot(sparsity=0.7), windows=8, length=16)
    assert other.resumed == 0
    assert other.sparsity == pytest.approx(0.7, abs=0.02)


def test_text_parquet_and_token_ids_give_the_same_windows(tmp_path: Path, calibration: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    lines = text().splitlines()
    parquet.write_table(arrow.table({"review": lines}), tmp_path / "text.parquet")
    ids = windows(1, 400)[0]
    np.save(tmp_path / "ids.npy", ids.numpy().astype(np.int32))
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    expected = ids[:128].reshape(8, 16)
    own = tokenizer()
    assert torch.equal(read_windows(calibration, own, length=16, count=8), expected)
    assert torch.equal(read_windows(tmp_path / "text.parquet", own, length=16, count=8, column="review"), expected)
    for name in ("ids.npy", "ids.safetensors"):
        assert torch.equal(read_windows(tmp_path / name, length=16, count=8), expected)
    assert len(read_windows(calibration, own, length=16, count=1000)) == 25  # as many as there are
    with pytest.raises(ValueError, match="no column 'text'; its columns are review"):
        read_windows(tmp_path / "text.parquet", own)
    with pytest.raises(ValueError, match="no tokenizer"):
        read_windows(calibration)


def _no_folder(place: Path) -> dict[str, Any]:
    return {"folder": place / "missing", "said": "not a folder"}


def _no_model(place: Path) -> dict[str, Any]:
    (place / "empty").mkdir()
    return {"folder": place / "empty", "said": "config.json is missing"}


def _no_weights(place: Path) -> dict[str, Any]:
    source = folder(place / "dense")
    (source / "model.safetensors").unlink()
    return {"said": "no safetensors weights"}


def _damaged(place: Path) -> dict[str, Any]:
    source = folder(place / "dense")
    (source / "model.safetensors").write_bytes(b"nothing")
    return {"said": "cannot be read"}


def _unknown(place: Path) -> dict[str, Any]:
    source = folder(place / "dense")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "martian"}))
    return {"said": "family 'martian'.*Llama, Qwen2, Mistral and GPT-2"}


def _no_language(place: Path) -> dict[str, Any]:
    config = transformers.ViTConfig(
        hidden_size=32, num_attention_heads=4, intermediate_size=24, num_hidden_layers=1, image_size=8, patch_size=4
    )
    transformers.ViTForImageClassification(config).save_pretrained(place / "dense")
    return {"said": "family 'vit', which has no causal"}


def _short(place: Path) -> dict[str, Any]:
    folder(place / "dense")
    (place / "text.txt").write_text("w1 w2 w3")
    return {"said": "3 tokens, fewer than one window of 16"}


def _vocabulary(place: Path) -> dict[str, Any]:
    folder(place / "dense")
    np.save(place / "ids.npy", np.full(64, 77))
    return {"calibration": place / "ids.npy", "said": "token 77, but the model's vocabulary has 50"}


def _exists(place: Path) -> dict[str, Any]:
    folder(place / "dense")
    (place / "out").mkdir()
    return {"said": "exists already", "error": FileExistsError}


@pytest.mark.parametrize(
    "spoil",
    [_no_folder, _no_model, _no_weights, _damaged, _unknown, _no_language, _short, _vocabulary, _exists],
)
def test_bad_input_is_refused_and_nothing_is_written(tmp_path: Path, spoil: Any) -> None:
    (tmp_path / "text.txt").write_text(text())
    given = spoil(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(given.get("error", ValueError), match=given["said"]):
        prune_folder(
            given.get("folder", tmp_path / "dense"),
            tmp_path / "out",
            given.get("calibration", tmp_path / "text.txt"),
            _HALF,
            length=16,
        )
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_prunes_a_folder(tmp_path: Path, calibration: Path, capsys: Any) -> None:
    source, out = folder(tmp_path / "dense"), tmp_path / "sparse"
    common = ["prune", str(source), "--calibration", str(calibration), "--length", "16", "--windows", "8"]
    assert main([*common, "--scope", "2:4", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "mlp.down_proj" in shown
    assert "50.00%" in shown
    weight = load_file(out / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert bool(((weight != 0).reshape(32, -1, 4).sum(2) == 2).all())
    assert main([*common, "--scope", "layers", "--sparsity", "0.5", "--out", str(tmp_path / "shallow")]) == 0
    shown = capsys.readouterr().out
    assert "removed layers" in shown
    assert "num_hidden_layers 2 → 1" in shown
    assert main([*common, "--scope", "units", "--sparsity", "0.25", "--out", str(tmp_path / "small")]) == 0
    assert "48 → 36" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "small" / "config.json").read_text())["intermediate_size"] == 36
    for wrong, said in (
        (["--scope", "units"], "--sparsity 0.25"),
        (["--scope", "units", "--sparsity", "0.001"], "nothing would be removed"),
        (["--scope", "layers", "--sparsity", "0.1"], "nothing would be removed"),
        (["--sparsity", "auto"], "SpaM"),
        ([], "--sparsity 0.5 or --scope 2:4"),
        (["--sparsity", "0.5", "--data", "digits"], "--data does not apply"),
        (["--sparsity", "0.5", "--cap", "0.9", "--minimum", "2"], "--cap, --minimum does not apply"),
        (["--sparsity", "0.5", "--seed", "1", "--data-seed", "1"], "--data-seed, --seed does not apply"),
        (["--sparsity", "0.5", "--scope", "global"], "--scope global does not apply"),
        (["--sparsity", "0.5", "--criterion", "snip"], "opd"),
        (["--sparsity", "0.5", "--scope", "row"], "unknown scope"),
    ):
        assert main([*common, *wrong, "--out", str(tmp_path / "no")]) == 1
        assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "no").exists()
