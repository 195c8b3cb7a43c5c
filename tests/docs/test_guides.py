"""The code on the guides' pages runs, in order, on a small network; their lists leave nothing out."""

import re
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shaver
from shaver.lab import get_recipe, recipe_names
from shaver.lab.recipes.recipe import CRITERIA

DOCS = Path(__file__).parents[2] / "docs"


class MyNetwork(nn.Module):
    """A user's network: a convolution and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hidden, self.out = nn.Conv2d(1, 8, 3), nn.Linear(72, 16), nn.Linear(16, 10)

    def forward(self, x):
        pooled = F.max_pool2d(self.conv(x).relu(), 2)
        return self.out(self.hidden(pooled.flatten(1)).relu())


def run(page: str, names: dict[str, object]) -> dict[str, object]:
    """Run the code blocks of a page in order, with fewer epochs; tests/integrations runs the unusual loops."""
    text = (DOCS / page).read_text(encoding="utf-8").split("## Unusual loops")[0]
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        short = block.replace("range(30)", "range(2)").replace("progress=True", "progress=False")
        exec(compile(short, page, "exec"), names)
    return names


@pytest.fixture
def names(tmp_path, monkeypatch) -> dict[str, object]:
    """What a reader is taken to have: data, a trained network, an optimizer, SpaM."""
    monkeypatch.chdir(tmp_path)
    digits = shaver.data.load("digits")
    x, y = digits.train[:256]
    loader = [(x[i : i + 32], y[i : i + 32]) for i in range(0, 256, 32)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MyNetwork()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    spam = shaver.SpaM(model, data_size=256, total_steps=80, every=2, update=10)
    for _ in range(10):
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            spam.step(optimizer)
    assert spam.updates
    return {
        "shaver": shaver, "torch": torch, "F": F, "MyNetwork": MyNetwork, "model": model, "x": x[:2], "spam": spam,
        "optimizer": optimizer, "train_set": x, "loader": loader, "train": loader, "valid": loader[:2],
        "valid_batches": loader[:2], "total_steps": 80,
    }  # fmt: skip


def test_train_in_my_own_loop(names, tmp_path):
    run("guides/training.md", names)
    assert len(names["history"]) == 30
    assert (tmp_path / "curves.csv").read_text().startswith("epoch,")
    assert set(names["spam"].statistics()) >= {"log_evidence", "effective_parameters", "relevant", "mean_log_delta"}


def test_prune_a_trained_model(names):
    run("guides/pruning.md", names)
    assert names["history"].masks.sparsity == pytest.approx(0.99, abs=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(names["same"].parameters(), names["model"].parameters(), strict=True))


def test_prune_without_training_again(names):
    run("guides/repair.md", names)
    kept = names["pruned"].masks
    assert all((p[~kept[name]] == 0).all() for name, p in kept.parameters(names["model"]).items())
    assert names["small"].hidden.out_features == 8


def test_the_table_of_criteria_is_whole():
    page = (DOCS / "guides" / "pruning.md").read_text(encoding="utf-8")
    listed = re.findall(r'^\| `"(\w+)"` \|', page, re.MULTILINE)
    assert sorted(listed) == sorted(CRITERIA)  # other tests may have registered their own


def test_make_it_smaller(names, tmp_path):
    pytest.importorskip("onnxscript")
    run("guides/smaller.md", names)
    small, again = names["small"], names["again"]
    assert small.hidden.out_features == again.hidden.out_features == 8
    assert names["model"].hidden.out_features == 13  # in place: four fifths of 16
    assert (tmp_path / "small.onnx").is_file()


def test_other_tools(names, tmp_path):
    pytest.importorskip("onnxscript")
    x = names["x"]
    run("guides/ecosystem.md", names)
    assert float(names["masks"]["hidden.weight"].float().mean()) == 0.5
    assert float((names["masked"].hidden.weight == 0).float().mean()) > 0.5
    inference = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "small-int8.onnx")
    found = torch.from_numpy(inference.run(None, {inference.get_inputs()[0].name: x.numpy()})[0])
    exact = names["small"].eval()(x).detach()
    assert (found - exact).abs().max() < 0.1 * exact.abs().max()  # 8 bits are good for about 1 % per layer
    assert (tmp_path / "small-int8.onnx").stat().st_size < (tmp_path / "small.onnx").stat().st_size


def test_choose_a_prior(names):
    def by_filter(name, parameter):
        return name

    names = run("guides/priors.md", names | {"by_filter": by_filter})
    assert names["spam"].updates == 2  # one an epoch, with Kronecker factors


def test_the_page_about_curvature(names):
    run("curvature.md", names | {"model": shaver.zoo.build("digits_cnn", seed=0)})


def test_lightning(names):
    pl = pytest.importorskip("lightning.pytorch")

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = MyNetwork()

        def training_step(self, batch, _):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = partial(pl.Trainer, enable_model_summary=False, **quiet)
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*names["loader"], strict=True)))
    given = {"pl": SimpleNamespace(Trainer=trainer), "lit": Lit(), "loader": DataLoader(data, 32, shuffle=True)}
    names = run("guides/devices.md", names | given)
    assert set(names["scores"]) == {"conv.weight", "hidden.weight", "out.weight"}


def test_every_page_with_code_is_run():
    with_code = {
        path.relative_to(DOCS).as_posix()
        for path in DOCS.rglob("*.md")
        if "```python" in path.read_text(encoding="utf-8") and "_build" not in path.parts
    }
    run_here = set(re.findall(r'run\("([\w/]+\.md)"', Path(__file__).read_text(encoding="utf-8")))
    assert with_code == run_here | {"start.md"}  # that one has a test of its own


def test_language_models(names):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        words = torch.randint(0, 20, (8, 8))
    batch = {"input_ids": words, "labels": words}
    names |= {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01), "train_set": words}
    names |= {"loader": [batch] * 12, "batches": [batch]}
    run("guides/language.md", names)
    assert names["spam"].statistics()
    assert all((h >= 0).all() and h.isfinite().all() for h in names["curvature"].diagonal().values())
    torch.testing.assert_close(names["again"].eval()(words).logits, model.eval()(words).logits)


def test_the_list_of_recipes_is_whole_and_says_what_the_recipes_say():
    page = (DOCS / "guides" / "studies.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `([\w-]+)` \| .* \| (.*) \|$", page, re.MULTILINE))
    assert listed == {name: get_recipe(name).paper for name in recipe_names()}


def test_the_api_shows_every_public_name():
    pages = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    for name in shaver.__all__:
        if isinstance(getattr(shaver, name), ModuleType):  # the module, or what it holds
            assert re.search(rf"^\.\. auto\w+:: shaver\.{name}\b", pages, re.MULTILINE), name
        elif name != "__version__":
            assert f"`shaver.{name}`" in pages, name
