"""Cost: bytes as stored, measured time and memory, and a model left as it was."""

import time
import weakref

import pytest
import torch
from torch import nn

from shaver import zoo
from shaver.measure import cost, latency, peak_memory


def test_lenet_costs_what_it_should():
    found = cost(zoo.build("lenet", seed=0), torch.zeros(2, 1, 28, 28))
    assert (found.parameters, found.nonzeros) == (60_170, 60_170)
    assert found.bytes_dense == found.bytes_sparse == 4 * 60_170
    assert (found.flops, found.flops_sparse) == (463_440, 463_440)


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        (800, 4 * 800),  # nothing is zero: as it is
        (400, 4 * 400 + 100),  # a bit for each weight
        (10, 4 * 10 + 4 * 10),  # an index for each non-zero
        (0, 0),
    ],
)
def test_sparse_bytes_take_the_smallest_of_three_ways(left, expected):
    model = nn.Linear(40, 20, bias=False)
    with torch.no_grad():
        model.weight.fill_(1).view(-1)[left:] = 0
    found = cost(model, torch.zeros(1, 40))
    assert (found.nonzeros, found.bytes_dense, found.bytes_sparse) == (left, 3200, expected)
    assert found.flops_sparse == 2 * left


def test_shared_weights_count_once_and_saved_buffers_are_bytes():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 3)
            self.norm = nn.BatchNorm1d(3)
            self.head = nn.Linear(3, 7, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("scratch", torch.zeros(100), persistent=False)

        def forward(self, x):
            return self.head(self.norm(self.embed(x)))

    found = cost(Tied(), torch.zeros(2, dtype=torch.long))
    assert found.parameters == 21 + 6
    assert found.bytes_dense == 4 * (21 + 6) + 4 * 6 + 8  # running mean and variance, and a 64-bit counter


def test_latency_is_measured_for_one_and_many_samples():
    threads = torch.get_num_threads()
    model, x = zoo.build("lenet", seed=0), torch.zeros(1, 1, 28, 28)
    one, many = (latency(model, x, batch_size=size, repeats=7) for size in (1, 128))
    assert torch.get_num_threads() == threads
    for size, measured in ((1, one), (128, many)):
        assert measured.batch_size == size
        assert measured.repeats == 7
        assert measured.spread >= 0
    assert one.median < many.median


class Sleeper(nn.Module):
    """Takes the times it is told, then a millisecond."""

    def __init__(self, *times):
        super().__init__()
        self.times = list(times)
        self.threads = []

    def forward(self, x):
        self.threads.append(torch.get_num_threads())
        self.batch = len(x)
        time.sleep(self.times.pop(0) if self.times else 0.001)
        return x


def test_the_median_ignores_the_warm_up():
    model = Sleeper(0.05, 0.05, 0.05)
    found = latency(model, torch.zeros(1, 2), batch_size=5, repeats=9)
    assert 0.001 <= found.median < 0.025
    assert model.batch == 5
    assert set(model.threads) == {1}


def test_a_slow_network_is_timed_three_times_at_least():
    found = latency(Sleeper(*[0.02] * 10), torch.zeros(1, 2), repeats=100, seconds=0.01)
    assert found.repeats == 3
    assert found.median >= 0.02


def test_threads_are_given_back_after_an_error():
    class Fails(nn.Module):
        def forward(self, x):
            raise RuntimeError("no")

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="no"):
            latency(Fails(), torch.zeros(1, 2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_impossible_measurements_are_refused():
    with pytest.raises(ValueError, match="repeats must be at least 3"):
        latency(nn.Identity(), torch.zeros(1), repeats=2)
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1, not 0"):
        latency(nn.Identity(), torch.zeros(1), batch_size=0)
    with pytest.raises(ValueError, match=r"at least one sample.*not a list"):
        cost(nn.Identity(), [torch.zeros(1)])


class TestPeakMemory:
    def test_weights_input_and_output(self):
        assert peak_memory(nn.Linear(10, 5), torch.zeros(3, 10)) == 4 * (55 + 30 + 15)

    def test_freed_results_are_not_counted(self):
        chain = nn.Sequential(*(nn.ReLU() for _ in range(6)))
        x = torch.zeros(1000)
        assert peak_memory(chain, x) == 3 * 4000  # the input, which the caller holds, and one result read, one written

    def test_kept_results_are_counted(self):
        class Keeps(nn.Module):
            def forward(self, x):
                kept = [x.relu() for _ in range(6)]
                return sum(kept)

        assert peak_memory(Keeps(), torch.zeros(1000)) >= 7 * 4000

    def test_views_and_in_place_results_cost_nothing(self):
        chain = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (10, 100)))
        assert peak_memory(chain, torch.zeros(1, 1000)) == 4000
        assert peak_memory(nn.ReLU(inplace=True), torch.zeros(1, 1000)) == 4000

    def test_a_second_call_says_the_same_and_no_callback_stays_behind(self):
        model, x = zoo.build("lenet", seed=0), torch.zeros(2, 1, 28, 28)
        before = len(weakref.finalize._registry)
        assert peak_memory(model, x) == peak_memory(model, x)
        assert len(weakref.finalize._registry) == before


def test_the_model_is_left_as_found():
    model = zoo.build("resnet18", seed=0, planes=4).train()
    model.blocks[0].norm1.eval()
    modes = [module.training for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    cost(model, x)
    latency(model, x, repeats=3)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
