"""A run killed at any moment continues to the same numbers, bit by bit."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shaver.data import InMemory
from shaver.io import load_state
from shaver.likelihoods import Classification, Regression
from shaver.settings import PAPER
from shaver.training import Options, fit
from tests.training.problems import batches, blobs, identical, network, noisy_forward, weights

KILLER = '''
"""Train in child processes that kill themselves at set moments, until one run is complete."""
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
import torch
from tests.training.problems import batches, network, noisy_forward
from shaver.training import fit
torch.set_num_threads(1)
fit(network(), batches(), method="map", epochs=1)  # what is imported on first use is imported here, once
folder, settings, moments = sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
left = None  # moments until death: a moment is a forward pass, or a file in the folder being opened, moved or removed

def count():
    global left
    if left is not None:
        left -= 1
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

def hook(event, arguments):
    if event in ("open", "os.rename", "os.remove") and str(arguments[0]).startswith(folder):
        count()

sys.addaudithook(hook)

def counted(model, batch):
    count()
    return noisy_forward(model, batch)

def newest():
    names = [n for n in os.listdir(folder) if n.startswith("checkpoint-")] if os.path.exists(folder) else []
    return max(names, default="")

epochs_at_kill = []
for moment in [*moments, None]:
    pid = os.fork()
    if pid == 0:
        left = moment
        try:
            fit(network(dropout=0.2), batches(), batches(seed=2), folder=folder, forward=counted, **settings)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status):
        print(json.dumps({"epochs_at_kill": epochs_at_kill, "exit": os.WEXITSTATUS(status)}))
        break
    epochs_at_kill.append(newest())
'''
#: An epoch has some twenty moments, the first few of them forward passes, the last few its files.
MOMENTS = [3, 21, 22, 47, 23, 24, 9, 58]

SETTINGS = [
    {"method": "map", "epochs": 12, "optimizer": "sgd"},
    {"method": "l1", "epochs": 12, "optimizer": "adamw"},
    {"method": "spam", "epochs": 12, "optimizer": "adam", "spam": {"every": 3, "update": 12, "shrink": 0.5}},
]


@pytest.fixture
def one_thread():
    """As many threads as the killed processes have: another number adds up in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def final(folder: Path) -> dict:
    return load_state(max(folder.glob("checkpoint-*.safetensors")))


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs os.fork to start many processes quickly")
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s["method"])
@pytest.mark.usefixtures("one_thread")
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path, settings):
    through = network(dropout=0.2)
    undisturbed = fit(through, batches(), batches(seed=2), folder=tmp_path / "whole", forward=noisy_forward, **settings)
    command = [sys.executable, "-c", KILLER, str(Path(__file__).parents[2]), str(tmp_path / "killed")]
    command += [json.dumps(settings), json.dumps(MOMENTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    report = json.loads(done.stdout or "{}")
    assert report.get("exit") == 0, done.stderr
    assert len(report["epochs_at_kill"]) == len(MOMENTS), "every child but the last was killed"
    assert len(set(report["epochs_at_kill"])) >= 4, "the kills came in different epochs"
    whole, killed = final(tmp_path / "whole"), final(tmp_path / "killed")
    assert identical(whole["model"], killed["model"])
    assert torch.equal(whole["random"]["torch"], killed["random"]["torch"])
    for one, other in zip(undisturbed, killed["history"], strict=True):
        assert {k: v for k, v in one.items() if k != "seconds"} == {k: v for k, v in other.items() if k != "seconds"}


def _stop_after(epoch: int):
    class Stop:
        def log(self, row, step):
            if step == epoch:
                raise KeyboardInterrupt

    return Stop()


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adam"},
        {"optimizer": "sgd", "options": Options(amp="float16", clip=1.0)},
        {"optimizer": "adamw", "options": Options(accumulate=2, schedule="constant")},
        {"method": "spam", "spam": {"every": 2, "update": 6, "shrink": 0.5}},
        {"method": "spam", "spam": {"settings": PAPER, "structure": "kron"}},
    ],
    ids=["adam", "float16", "accumulate", "spam", "paper"],
)
def test_an_interrupted_run_continues_to_the_same_numbers(tmp_path, settings):
    settings = {"method": "map", "epochs": 5, "forward": noisy_forward} | settings
    whole, broken, continued = network(dropout=0.2), network(dropout=0.2), network(dropout=0.2)
    fit(whole, batches(), **settings)
    with pytest.raises(KeyboardInterrupt):
        fit(broken, batches(), folder=tmp_path, logger=_stop_after(2), **settings)
    history = fit(continued, batches(), folder=tmp_path, **settings)
    assert identical(weights(whole), weights(continued))
    assert history.column("epoch") == [1, 2, 3, 4, 5]


def test_a_shuffling_loader_with_its_own_generator_continues_in_step(tmp_path):
    def loader():
        return DataLoader(
            TensorDataset(*blobs()), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3)
        )

    whole, continued = network(), network()
    fit(whole, loader(), method="map", epochs=4)
    with pytest.raises(KeyboardInterrupt):
        fit(network(), loader(), method="map", epochs=4, folder=tmp_path, logger=_stop_after(2))
    fit(continued, loader(), method="map", epochs=4, folder=tmp_path)
    assert identical(weights(whole), weights(continued))


def test_data_in_memory_are_shuffled_and_augmented_by_the_epoch(tmp_path):
    def jitter(x, generator):
        return x + 0.1 * torch.randn(x.shape, generator=generator)

    data = InMemory(*blobs(), augment=jitter)
    settings = {"method": "map", "epochs": 4, "batch_size": 20}
    whole, continued = network(), network()
    fit(whole, data, **settings)
    with pytest.raises(KeyboardInterrupt):
        fit(network(), data, folder=tmp_path, logger=_stop_after(2), **settings)
    fit(continued, data, folder=tmp_path, **settings)
    assert identical(weights(whole), weights(continued))


class _Warming(Classification):
    """A likelihood with a number of its own that training changes, and that changes the loss."""

    steps = 0

    def nll(self, outputs, targets):
        self.steps += outputs.requires_grad
        return super().nll(outputs, targets) * (1 - 0.5**self.steps)

    def state(self):
        return {"steps": float(self.steps)}

    def load_state(self, state):
        self.steps = int(state["steps"])


def test_what_the_likelihood_learned_comes_back(tmp_path):
    settings = {"method": "map", "epochs": 4}
    whole, continued, last = network(), network(), _Warming()
    fit(whole, batches(), likelihood=_Warming(), **settings)
    with pytest.raises(KeyboardInterrupt):
        fit(network(), batches(), likelihood=_Warming(), folder=tmp_path, logger=_stop_after(1), **settings)
    fit(continued, batches(), likelihood=last, folder=tmp_path, **settings)
    assert identical(weights(whole), weights(continued))
    assert last.steps == 24


def test_a_finished_run_is_read_back_and_not_trained_again(tmp_path):
    model, again = network(), network()
    history = fit(model, batches(), method="map", epochs=2, folder=tmp_path)

    def forbidden(model, batch):
        raise AssertionError("trained again")

    assert fit(again, batches(), method="map", epochs=2, folder=tmp_path, forward=forbidden) == history
    assert identical(weights(model), weights(again))


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, monkeypatch):
    whole, broken, continued = network(), network(), network()
    fit(whole, batches(), method="map", epochs=4)
    real = Path.write_bytes
    written = []

    def full(self, content):
        if ".checkpoint-00003" in self.name:
            real(self, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(self.name)
        return real(self, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            fit(broken, batches(), method="map", epochs=4, folder=tmp_path)
    assert written
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["checkpoint-00001.safetensors", "checkpoint-00002.safetensors", "history.csv"]
    fit(continued, batches(), method="map", epochs=4, folder=tmp_path)
    assert identical(weights(whole), weights(continued))


def test_the_last_two_checkpoints_are_kept_and_a_damaged_one_is_passed_over(tmp_path):
    whole, continued = network(), network()
    fit(whole, batches(), method="map", epochs=4, folder=tmp_path)
    assert sorted(p.name for p in tmp_path.glob("checkpoint*")) == [
        "checkpoint-00003.safetensors",
        "checkpoint-00004.safetensors",
    ]
    last = tmp_path / "checkpoint-00004.safetensors"
    last.write_bytes(last.read_bytes()[:1000])
    fit(continued, batches(), method="map", epochs=4, folder=tmp_path)
    assert identical(weights(whole), weights(continued))
    for path in tmp_path.glob("checkpoint*"):
        path.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="no checkpoint can be read"):
        fit(network(), batches(), method="map", epochs=4, folder=tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.2}, r"lr: 0.1 there, 0.2 here"),
        ({"epochs": 3}, r"epochs: 2 there, 3 here"),
        ({"method": "l1"}, r"method: 'map' there, 'l1' here"),
        ({"options": Options(clip=1.0)}, r"clip: None there, 1.0 here"),
        (
            {"train": batches(samples=64)},
            r"data: '96 samples in 6 batches, contents \w+' there, '64 samples in 4 batches, contents",
        ),
    ],
)
def test_a_checkpoint_of_another_configuration_is_refused(tmp_path, change, message):
    settings = {"train": batches(), "method": "map", "epochs": 2, "lr": 0.1, "folder": tmp_path}
    fit(network(), **settings)
    with pytest.raises(ValueError, match=message):
        fit(network(), **(settings | change))
    fit(network(), **(settings | change), resume=False)  # starts anew instead
    fit(network(), **(settings | change))


def test_a_checkpoint_of_another_network_is_refused_and_the_network_untouched(tmp_path):
    fit(network(), batches(), method="map", epochs=1, folder=tmp_path)
    other = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    before = weights(other)
    with pytest.raises(ValueError, match=r"network\['0.weight'\]: '12×6' there, '5×6' here"):
        fit(other, batches(), method="map", epochs=1, folder=tmp_path)
    assert identical(before, weights(other))


def test_leftovers_of_a_killed_write_are_swept_away(tmp_path):
    (tmp_path / ".checkpoint-00001.safetensors.abc.part").write_bytes(b"half")
    fit(network(), batches(), method="map", epochs=1, folder=tmp_path)
    assert not list(tmp_path.glob(".checkpoint*"))


def _settings(**change):
    return {"train": batches(), "method": "map", "epochs": 2, "lr": 0.1} | change


def _sgd(momentum):
    return lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=momentum)


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ({}, {"train": batches(seed=5)}, r"data: '96 samples in 6 batches, contents (\w+)' there, .* contents (?!\1)"),
        (
            {"train": DataLoader(TensorDataset(*blobs()), 16)},
            {"train": DataLoader(TensorDataset(*blobs(seed=5)), 16)},
            "data: ",
        ),
        ({"train": InMemory(*blobs())}, {"train": InMemory(*blobs(), mean=0.5)}, "data: "),
        ({"valid": batches(seed=2)}, {"valid": batches(seed=3)}, "validation data: "),
        ({}, {"model": network(seed=1)}, r"initial weights: .*torch\.manual_seed"),
        (
            {"optimizer": _sgd(0.9), "lr": None},
            {"optimizer": _sgd(0.5), "lr": None},
            r"optimizer\['group 0'\]: .*'momentum': 0.9.* there, .*'momentum': 0.5",
        ),
        ({}, {"optimizer": "adam"}, "optimizer: 'sgd' there, 'adam' here"),
        (
            {"likelihood": Regression(0.5), "train": [(x, x[:, :3]) for x, _ in batches()]},
            {"likelihood": Regression(0.1), "train": [(x, x[:, :3]) for x, _ in batches()]},
            r"noise\['noise'\]: 0.5 there, 0.1 here",
        ),
    ],
    ids=["batches", "loader", "in memory", "validation", "weights", "optimizer", "name", "noise"],
)
def test_another_run_of_the_same_size_is_not_mistaken_for_this_one(tmp_path, first, then, message):
    fit(**_settings(model=network(), folder=tmp_path, **first))
    asked = _settings(model=network(), folder=tmp_path) | first | then
    before = weights(asked["model"])
    with pytest.raises(ValueError, match=f"belongs to another run: {message}"):
        fit(**asked)
    assert identical(before, weights(asked["model"]))


def test_one_may_insist_on_continuing_with_other_weights_and_data(tmp_path):
    """A script without a seed makes another network each time; its run need not be lost."""
    whole = network()
    fit(**_settings(model=whole, epochs=4))
    with pytest.raises(KeyboardInterrupt):
        fit(**_settings(model=network(), epochs=4, folder=tmp_path, logger=_stop_after(2)))
    stranger = network(seed=7)
    with pytest.raises(ValueError, match=r'resume="anyway"'):
        fit(**_settings(model=stranger, epochs=4, folder=tmp_path))
    fit(**_settings(model=stranger, epochs=4, folder=tmp_path, resume="anyway"))
    assert identical(weights(whole), weights(stranger))
    with pytest.raises(ValueError, match=r"lr: 0\.1 there"):
        fit(**_settings(model=network(), epochs=4, folder=tmp_path, resume="anyway", lr=0.2))
    with pytest.raises(ValueError, match=r"resume is True, False or .*, not 'always'"):
        fit(**_settings(model=network(), folder=tmp_path, resume="always"))


def test_a_cell_of_a_notebook_may_be_run_again(tmp_path):
    """The network is where the finished run left it: there is nothing to confuse."""
    model = network()
    history = fit(**_settings(model=model, folder=tmp_path))
    assert fit(**_settings(model=model, folder=tmp_path)) == history


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path):
    whole, continued = network(), network()
    fit(whole, batches(), method="map", epochs=3, folder=tmp_path)
    newest = tmp_path / "checkpoint-00003.safetensors"
    content = newest.read_bytes()
    for damage in (content[:-20], content[:-20] + bytes([content[-20] ^ 1]) + content[-19:]):
        newest.write_bytes(damage)
        with pytest.warns(UserWarning, match=r"checkpoint-00003.* damaged.*checkpoint-00002.* is used instead"):
            fit(continued, batches(), method="map", epochs=3, folder=tmp_path)
        assert identical(weights(whole), weights(continued))
        continued = network()


def test_a_folder_that_is_a_file_is_refused_before_training(tmp_path):
    (tmp_path / "run").write_text("notes")

    def forbidden(model, batch):
        raise AssertionError("trained")

    with pytest.raises(NotADirectoryError, match=r"this is a file, but a folder is needed.*run"):
        fit(network(), batches(), method="map", epochs=1, folder=tmp_path / "run", forward=forbidden)
