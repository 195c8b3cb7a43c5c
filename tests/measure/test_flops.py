"""FLOPs equal hand-computed values, 2 per multiply-add, for one sample."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from shaver import zoo
from shaver.measure import Flops, flops


def dense(model, *shape):
    """Dense FLOPs of a model whose weights have no zeros, so that both counts agree."""
    found = flops(model, torch.zeros(3, *shape))
    assert found.sparse == found.dense
    return found.dense


def test_lenet_by_hand():
    convolutions = 24 * 24 * (6 * 1 * 25) + 10 * 10 * (16 * 6 * 9) + 1 * 1 * (120 * 16 * 25)
    linear = 120 * 84 + 84 * 10
    assert dense(zoo.build("lenet", seed=0), 1, 28, 28) == 2 * (convolutions + linear) == 463_440


@pytest.mark.parametrize("backend", ["fused", "math"])
def test_an_attention_block_by_hand_also_on_the_cpu(backend):
    model = zoo.build("vit", seed=0).blocks[0]
    tokens, dim, mlp = 17, 128, 256
    projections = tokens * (dim * 3 * dim + dim * dim)
    attention = 2 * tokens * tokens * dim  # scores, and the weighted mean of values, over all heads
    expected = 2 * (projections + attention + 2 * tokens * dim * mlp)
    if backend == "fused":
        assert dense(model, tokens, dim) == expected
    else:
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            assert dense(model, tokens, dim) == expected


def test_grouped_queries_count_the_heads_of_the_query():
    class Grouped(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    q, k = torch.randn(1, 8, 5, 16), torch.randn(1, 2, 7, 16)
    for backend in [nn.attention.SDPBackend.MATH, nn.attention.SDPBackend.FLASH_ATTENTION]:
        with nn.attention.sdpa_kernel(backend):
            assert flops(Grouped(), (q, k, k)).dense == 2 * 8 * 5 * 7 * (16 + 16)


@pytest.mark.parametrize(
    ("conv", "shape", "uses", "weights"),
    [
        (nn.Conv2d(8, 12, 3, groups=4), (8, 10, 9), 8 * 7, 12 * 2 * 9),
        (nn.Conv2d(8, 8, 3, groups=8, padding=1, stride=2), (8, 10, 10), 5 * 5, 8 * 9),
        (nn.Conv2d(3, 4, 3, dilation=2, bias=False), (3, 9, 9), 5 * 5, 4 * 3 * 9),
        (nn.Conv1d(3, 4, 5), (3, 11), 7, 4 * 3 * 5),
        (nn.Conv3d(2, 3, 2), (2, 4, 4, 4), 3**3, 3 * 2 * 8),
        (nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2), (6, 5, 7), 5 * 7, 6 * 2 * 9),
    ],
)
def test_convolutions_by_hand(conv, shape, uses, weights):
    assert conv.weight.numel() == weights
    assert dense(conv, *shape) == 2 * uses * weights
    with torch.no_grad():
        conv.weight.flatten()[: weights // 3] = 0
    found = flops(conv, torch.zeros(2, *shape))
    assert found == Flops(2 * uses * weights, 2 * uses * (weights - weights // 3))


def test_recurrent_and_encoder_layers_hide_nothing_in_fused_kernels():
    lstm = nn.LSTM(5, 7, batch_first=True, bidirectional=True)
    assert dense(lstm, 3, 5) == 2 * 2 * 3 * (4 * 7 * 5 + 4 * 7 * 7)
    assert dense(nn.GRU(5, 7, batch_first=True), 3, 5) == 2 * 3 * (3 * 7 * 5 + 3 * 7 * 7)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    before = torch.backends.mha.get_fastpath_enabled()
    assert dense(encoder, 3, 8) == 2 * (4 * 3 * 8 * 8 + 2 * 3 * 3 * 8 + 2 * 3 * 8 * 16)
    assert torch.backends.mha.get_fastpath_enabled() == before


def test_einsum_and_batched_products_of_activations():
    class Outer(nn.Module):
        def forward(self, x):
            return torch.einsum("bik,bjk->bij", x, x)

    assert dense(Outer(), 4, 6) == 2 * 4 * 4 * 6


@pytest.mark.parametrize(
    ("product", "expected"),
    [
        (lambda w, x: w @ x[0], 2 * 5),  # matrix and vector
        (lambda w, x: torch.addmv(x[0, :2], w, x[0]), 2 * 5),
        (lambda w, x: w[0] @ x[0], 5),  # two vectors
        (lambda w, x: torch.addmm(x[:, :2], x, w.t()), 2 * 5),
        (lambda w, x: torch.baddbmm(x[None, :, :2], x[None], w.t()[None]), 2 * 5),
        (lambda w, x: torch.addbmm(x[:, :2], torch.stack([x, x]), w.t().expand(2, 5, 2)), 2 * 2 * 5),
    ],
)
def test_every_kind_of_product(product, expected):
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 5))

        def forward(self, x):
            return product(self.weight, x)

    model = Product()
    assert dense(model, 5) == 2 * expected
    with torch.no_grad():
        model.weight[:, :2] = 0  # three fifths are left of every row
    assert flops(model, torch.zeros(1, 5)).sparse == 2 * expected * 3 // 5


class TestZeros:
    """Only multiply-adds with a non-zero weight count as sparse ones."""

    def test_a_weight_counts_once_for_each_use(self):
        model = nn.Linear(6, 4)
        nn.init.ones_(model.weight)
        with torch.no_grad():
            model.weight[1:, 2:] = 0  # 4·6 − 3·4 = 12 left
        assert flops(model, torch.zeros(1, 6)) == Flops(48, 24)
        assert flops(model, torch.zeros(2, 5, 6)) == Flops(5 * 48, 5 * 24)  # five tokens a sample

    def test_zero_activations_are_work(self):
        assert dense(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)), 3) == 2 * (9 + 6)

    def test_a_mask_applied_in_the_call(self):
        model = nn.Linear(6, 4)
        prune.l1_unstructured(model, "weight", amount=18)
        assert flops(model, torch.zeros(1, 6)) == Flops(48, 12)

    def test_a_slice_of_a_packed_weight(self):
        attention = nn.MultiheadAttention(8, 2, batch_first=True)
        with torch.no_grad():
            attention.in_proj_weight[8:16] = 0  # all keys

        class Cross(nn.Module):
            def __init__(self):
                super().__init__()
                self.attention = attention

            def forward(self, q, k):
                return self.attention(q, k, k, need_weights=False)

        found = flops(Cross(), (torch.zeros(1, 3, 8), torch.zeros(1, 5, 8)))
        keys, rest = 5 * 64, 3 * 64 + 5 * 64 + 3 * 64 + 2 * 3 * 5 * 8
        assert found == Flops(2 * (keys + rest), 2 * rest)

    def test_a_product_of_two_weights_counts_pairs_of_non_zeros(self):
        class LowRank(nn.Module):
            def __init__(self):
                super().__init__()
                self.u = nn.Parameter(torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 0.0]]))
                self.v = nn.Parameter(torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]))

            def forward(self, x):
                return x @ (self.u @ self.v)

        # u @ v: 3·2·4 in all, 3·2 + 1·1 non-zero pairs; u @ v has 6 non-zeros of 12.
        assert flops(LowRank(), torch.zeros(1, 3)) == Flops(2 * (24 + 12), 2 * (7 + 6))

    def test_a_cache_filled_with_activations_is_not_a_weight(self):
        class Cached(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("cache", torch.zeros(4, 6))

            def forward(self, x):
                self.cache.copy_(x[0])
                return self.cache @ self.cache.t()

        assert flops(Cached(), torch.zeros(1, 4, 6)) == Flops(2 * 4 * 6 * 4, 2 * 4 * 6 * 4)


def test_an_example_without_samples_is_refused():
    with pytest.raises(ValueError, match=r"at least one sample.*not a tensor of shape \(0, 6\)"):
        flops(nn.Linear(6, 4), torch.zeros(0, 6))


def test_a_dict_example_leaves_the_labels_out():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, *, x):
            return self.linear(x)

    assert flops(Named(), {"labels": torch.zeros(2), "x": torch.zeros(2, 6)}).dense == 48
