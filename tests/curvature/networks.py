"""Small networks that use their parameters in every way the curvature engine must get right."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Apply(nn.Module):
    """A function as a module, for layouts inside ``nn.Sequential``."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def pool_positions() -> nn.Module:
    """(batch, positions, features) → (batch, features)."""
    return Apply(lambda x: x.mean(1))


def pool_pixels() -> nn.Module:
    """(batch, channels, …) → (batch, channels)."""
    return Apply(lambda x: x.flatten(2).mean(-1))


class Conv1D(nn.Module):
    """The transformers library's linear layer: weight stored (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.nx = nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Bias(nn.Module):
    """x + b with one number b, as in Fixup networks."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Scale(nn.Module):
    """x · s with one number s, as in Fixup networks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class FixupBlock(nn.Module):
    """A residual block without normalisation: scalar biases around the convolutions, one scalar scale."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias1, self.bias2, self.bias3, self.scale = Bias(), Bias(), Bias(), Scale()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bias2(self.conv1(self.bias1(x))))
        out = self.bias3(self.scale(self.conv2(out)))
        out += x
        return F.relu(out)


class Attention(nn.Module):
    """Self-attention from Linear layers."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, dim = x.shape
        q, k, v = self.qkv(x).reshape(batch, positions, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / math.sqrt(dim // self.heads)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, positions, dim))


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP with residuals, in evaluation without dropout."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.5), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class MixerBlock(nn.Module):
    """Token mixing on the transposed layout, then channel mixing."""

    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Sequential(nn.Linear(tokens, 5), nn.GELU(), nn.Linear(5, tokens))
        self.channels = nn.Sequential(nn.Linear(dim, 6), nn.GELU(), nn.Linear(6, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).mT).mT
        return x + self.channels(self.norm2(x))


class NormResBlock(nn.Module):
    """Convolution, BatchNorm, in-place ReLU and an in-place residual sum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += x
        return self.relu(out)


class VisionTransformer(nn.Module):
    """Patches, a class token and a position embedding as raw parameters, one block."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, dim, 2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.zeros(1, 5, dim))
        self.block = TransformerBlock(dim)
        self.head = nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.block(x)[:, 0])


class TiedLanguageModel(nn.Module):
    """An embedding whose matrix is also the output head; positions are looked up once for the whole batch."""

    def __init__(self, vocabulary: int = 6, dim: int = 4, positions: int = 4, tied: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(positions, dim)
        self.block = TransformerBlock(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        return self.head(self.block(x))


class MultiHead(nn.Module):
    """torch's own attention: packed projections, batch second unless ``batch_first``."""

    def __init__(self, dim: int = 4, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=batch_first)
        self.head = nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.head(x.mean(1 if self.batch_first else 0))


class SequenceFirst(nn.Module):
    """(positions, batch, features) inside, as in recurrent networks; ``norm`` after the first layer."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.norm = nn.LayerNorm(5) if norm else nn.Identity()
        self.second = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x.transpose(0, 1))))
        return self.second(x).mean(0)


class Folded(nn.Module):
    """Positions folded into the batch, (B·T, D) or, with ``positions_major``, (T·B, D)."""

    def __init__(self, positions_major: bool = False) -> None:
        super().__init__()
        self.positions_major = positions_major
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, dim = x.shape
        rows = (x.transpose(0, 1) if self.positions_major else x).reshape(-1, dim)
        rows = self.second(torch.tanh(self.first(rows)))
        if self.positions_major:
            return rows.reshape(positions, batch, -1).mean(0)
        return rows.reshape(batch, positions, -1).mean(1)


class FoldedImages(nn.Module):
    """A convolution over frames folded into the batch, then a mean over frames."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 2)
        self.norm = nn.BatchNorm2d(2)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        frames = self.norm(self.conv(x.flatten(0, 1))).tanh().mean((2, 3))
        return self.head(frames.reshape(*x.shape[:2], -1).mean(1))


class OnTable(nn.Module):
    """A layer applied to a table that every sample shares: its rows are not samples, even where the counts agree."""

    def __init__(self, rows: int = 3) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, rows * 2).reshape(rows, 2))
        self.project = nn.Linear(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x + self.project(self.table)).mean(1))


class CalledTwice(nn.Module):
    """One layer called twice in a row, one norm called on two different widths of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.layer(x)))
        x = self.norm(torch.tanh(self.layer(x)))
        return self.head(x)


class Branches(nn.Module):
    """One convolution and one layer shared by two branches of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 2)
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.conv(x[:, :, :4]), self.conv(x[:, :, 2:])
        return self.layer(left.mean(-1)) * self.layer(right.tanh().mT).mean(1)


class Siblings(nn.Module):
    """Two different modules that hold the same weight, each with its own bias."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(torch.tanh(self.one(x))))


class Elsewhere(nn.Module):
    """A layer's weight also used outside the layer: W Wᵀ tanh(W x + b)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) @ self.layer.weight @ self.layer.weight.T


class HalfLinear(nn.Linear):
    """A Linear by inheritance only: its forward is its own, so Linear's rule does not hold."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.tanh(), self.bias) * 0.5


class Unused(nn.Module):
    """A layer that is never called, a parameter that nothing reads, and a branch whose output is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.spare = nn.Linear(4, 2)
        self.discarded = nn.Linear(4, 2)
        self.extra = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.discarded(x)
        return self.layer(x)


class Recurrent(nn.Module):
    """torch's LSTM, which has no rule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Quadratic(nn.Module):
    """A custom module: raw matrices used in a bilinear form, one of them used twice."""

    def __init__(self, dim: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.empty(classes, dim, dim))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * torch.einsum("bi,cij,bj->bc", x, self.left, torch.tanh(x @ self.left[0]))


class DictModel(nn.Module):
    """Takes tokens and a mask, as models of the transformers library do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 4, padding_idx=0)
        self.layer = nn.Linear(4, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = torch.tanh(self.tokens(tokens)) * mask.unsqueeze(-1)
        return self.layer(x.sum(1) / mask.sum(1, keepdim=True))


class Routed(nn.Module):
    """A mixture of experts: a router sends each token to one of several linear layers."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(width, experts), nn.Linear(width, 3)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        share = self.router(tokens).softmax(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows = (share.argmax(-1) == number).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(tokens[rows]) * share[rows, number, None])
        return self.head(torch.tanh(out.view_as(x)).mean(1))


class Experts(nn.Module):
    """Each row goes to one of two layers by the sign of its first feature, so a layer sees a part of the batch.

    With positions, the rows are all positions of all samples: a layer may see as many rows as there are samples,
    and still not one of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        chosen = rows[:, 0] > 0
        out = x.new_zeros(len(rows), 3)
        out[chosen] = self.left(rows[chosen])
        out[~chosen] = torch.tanh(self.right(rows[~chosen]))
        out = out.reshape(*x.shape[:-1], 3)
        return out if x.ndim == 2 else out.mean(1)
