"""Random networks, examples and options for compaction, and what became of each: equal, refused, wrong or crashed."""

import traceback
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from shaver.structure import compact_with_report, find_groups, mask_units

#: ``inputs(batch, seed)``: inputs of a network.
Inputs = Callable[[int, int], Tensor]
_ACTIVATIONS = (nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.LeakyReLU, nn.Identity)


@dataclass(frozen=True)
class Outcome:
    """What became of one draw.

    Attributes:
        seed: Of the draw.
        kind: ``"equal"``, ``"refused"``, ``"wrong"`` or ``"crashed"``.
        family: Of the network.
        detail: The error, or the relative difference.
    """

    seed: int
    kind: str
    family: str
    detail: str


def numbers(*shape: int) -> Inputs:
    def draw(batch: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, *shape, generator=generator, dtype=torch.float64)

    return draw


def tokens(length: int, vocabulary: int) -> Inputs:
    def draw(batch: int, seed: int) -> Tensor:
        return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))

    return draw


def activation(rng: Random, width: int = 1) -> nn.Module:
    return nn.PReLU(width) if rng.random() < 0.15 else rng.choice(_ACTIVATIONS)()


def mlp(rng: Random) -> tuple[nn.Module, Inputs]:
    inputs = width = rng.randint(1, 9)
    layers: list[nn.Module] = []
    for _ in range(rng.randint(1, 4)):
        new = rng.randint(1, 14)
        layers.append(nn.Linear(width, new, bias=rng.random() < 0.8))
        norm = rng.choice([None, None, nn.BatchNorm1d, nn.LayerNorm, nn.Dropout])
        if norm is not None:
            layers.append(norm(0.3 if norm is nn.Dropout else new))
        layers.append(activation(rng, new))
        width = new
    return nn.Sequential(*layers, nn.Linear(width, rng.randint(1, 4))), numbers(inputs)


class ConvolutionBlock(nn.Module):
    """A convolution with norm and activation, and a residual sum, a concatenation or a gate around it."""

    def __init__(self, rng: Random, inputs: int) -> None:
        super().__init__()
        self.way = rng.choice(["plain", "plain", "sum", "concatenate", "gate", "depthwise", "grouped", "shuffle"])
        outputs = inputs if self.way in ("sum", "depthwise") else 2 * rng.randint(1, 6)
        groups = {"depthwise": inputs, "grouped": 2 if inputs % 2 == 0 else 1}.get(self.way, 1)
        options: dict[str, Any] = {"groups": groups, "bias": rng.random() < 0.7}
        self.conv = nn.Conv2d(inputs, outputs, rng.choice([1, 3]), padding="same", **options)
        norms = [nn.Identity(), nn.BatchNorm2d(outputs), nn.InstanceNorm2d(outputs, affine=True)]
        self.norm = rng.choice([*norms, nn.GroupNorm(2 if outputs % 2 == 0 else 1, outputs)])
        self.act = activation(rng, outputs)
        self.gate = nn.Linear(outputs, outputs) if self.way == "gate" else None
        self.width = inputs + outputs if self.way == "concatenate" else outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.norm(self.conv(x)))
        if self.way == "sum":
            return x + y
        if self.way == "concatenate":
            return torch.cat([x, y], 1)
        if self.gate is not None:
            return y * torch.sigmoid(self.gate(y.mean((2, 3))))[:, :, None, None]
        if self.way == "shuffle":
            return y.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return y


def cnn(rng: Random) -> tuple[nn.Module, Inputs]:
    width, size = rng.randint(1, 3), rng.choice([4, 6])
    shape = (width, size, size)
    layers: list[nn.Module] = []
    for _ in range(rng.randint(1, 4)):
        block = ConvolutionBlock(rng, width)
        layers.append(block)
        width = block.width
    if rng.random() < 0.2:
        layers.append(nn.ConvTranspose2d(width, 4, 1))
        width = 4
    if rng.random() < 0.5:
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    else:
        layers += [rng.choice([nn.MaxPool2d, nn.AvgPool2d])(2), nn.Flatten()]
        width *= (size // 2) ** 2
    if rng.random() < 0.5:
        layers += [nn.Linear(width, 6), activation(rng, 6)]
        width = 6
    return nn.Sequential(*layers, nn.Linear(width, 3)), numbers(*shape)


class Attention(nn.Module):
    """Attention as users write it: heads fixed or inferred, packed or separate projections, grouped queries."""

    def __init__(self, rng: Random, width: int) -> None:
        super().__init__()
        self.head, self.fixed = rng.choice([2, 3, 4]), rng.random() < 0.4
        self.keys, repeats = rng.randint(1, 3), rng.randint(1, 2)
        self.heads = self.keys * repeats
        self.packed = repeats == 1 and rng.random() < 0.5
        inner, kv = self.heads * self.head, self.keys * self.head
        if self.packed:
            self.qkv = nn.Linear(width, 3 * inner)
        else:
            self.q, self.k, self.v = nn.Linear(width, inner), nn.Linear(width, kv), nn.Linear(width, kv)
        self.o = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1) if self.packed else (self.q(x), self.k(x), self.v(x))
        shapes = [(self.heads, -1), (self.keys, -1), (self.keys, -1)] if self.fixed else [(-1, self.head)] * 3
        q, k, v = (part.unflatten(-1, shape).transpose(1, 2) for part, shape in zip(parts, shapes, strict=True))
        if q.shape[1] != k.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        out: Tensor = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """Plain, gated, gated in one layer, or experts to which tokens are routed."""

    def __init__(self, rng: Random, width: int) -> None:
        super().__init__()
        self.way, hidden = rng.choice(["plain", "gated", "chunked", "experts"]), 2 * rng.randint(1, 5)
        self.up = nn.Linear(width, 2 * hidden if self.way == "chunked" else hidden)
        self.gate = nn.Linear(width, hidden) if self.way == "gated" else None
        self.down = nn.Linear(hidden, width)
        self.act = activation(rng)
        if self.way == "experts":
            self.router = nn.Linear(width, 2)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
                                         for _ in range(2))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "experts":
            chosen, out = self.router(x).argmax(-1), torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                out[chosen == number] = expert(x[chosen == number])
            return out + self.down(self.act(self.up(x)))
        if self.way == "chunked":
            a, b = self.up(x).chunk(2, -1)
            return self.down(self.act(a) * b)  # type: ignore[no-any-return]
        hidden = self.act(self.up(x))
        return self.down(hidden if self.gate is None else hidden * self.gate(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Blocks on tokens or on vectors; the output layer may be tied to the embedding."""

    def __init__(self, rng: Random, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width) if vocabulary else None
        self.blocks = nn.ModuleList()
        for _ in range(rng.randint(1, 2)):
            if rng.random() < 0.3:
                options = {"batch_first": True, "norm_first": rng.random() < 0.5}
                self.blocks.append(nn.TransformerEncoderLayer(width, 2, 6, **options))
                continue
            parts = [Attention(rng, width), FeedForward(rng, width)]
            self.blocks.extend(nn.ModuleDict({"norm": nn.LayerNorm(width), "part": part}) for part in parts)
        tied = vocabulary and rng.random() < 0.4
        self.head = nn.Linear(width, vocabulary if tied else 3, bias=not tied)
        if tied and self.embed is not None:
            self.head.weight = self.embed.weight
        self.mean = rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = x + block["part"](block["norm"](x)) if isinstance(block, nn.ModuleDict) else block(x)
        return self.head(x.mean(1) if self.mean else x)  # type: ignore[no-any-return]


def transformer(rng: Random) -> tuple[nn.Module, Inputs]:
    vocabulary, width, length = rng.choice([0, 11]), 2 * rng.randint(2, 5), rng.choice([1, 2, 5])
    model = Transformer(rng, vocabulary, width)
    return model, tokens(length, vocabulary) if vocabulary else numbers(length, width)


class Recurrent(nn.Module):
    """A recurrent layer between linear ones."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.body = rng.choice([nn.LSTM, nn.GRU])(6, 5, batch_first=True)
        self.second, self.last = nn.Linear(5, 7), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.second(self.body(torch.relu(self.first(x)))[0][:, -1])))  # type: ignore[no-any-return]


class Pair(nn.Module):
    """Two branches that meet in a bilinear layer."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, rng.randint(2, 6)), nn.Linear(4, rng.randint(2, 6))
        self.meet = nn.Bilinear(self.a.out_features, self.b.out_features, 5)
        self.last = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.meet(torch.relu(self.a(x)), torch.relu(self.b(x)))))  # type: ignore[no-any-return]


def unusual(rng: Random) -> tuple[nn.Module, Inputs]:
    """Recurrent, bilinear, or with weights that are computed from other tensors."""
    way = rng.choice(["recurrent", "bilinear", "computed", "computed"])
    if way == "recurrent":
        return Recurrent(rng), numbers(4, 3)
    if way == "bilinear":
        return Pair(rng), numbers(4)
    model, inputs = rng.choice([mlp, cnn, transformer])(rng)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d) and m.weight.requires_grad]
    for layer in rng.sample(layers, min(2, len(layers))):
        how = rng.choice(["weight_norm", "old weight_norm", "spectral_norm", "prune"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if how == "weight_norm":
                parametrizations.weight_norm(layer)
            elif how == "old weight_norm":
                torch.nn.utils.weight_norm(layer)
            elif how == "spectral_norm":
                parametrizations.spectral_norm(layer)
            else:
                prune.l1_unstructured(layer, "weight", amount=0.5)
    return model, inputs


FAMILIES: dict[str, Callable[[Random], tuple[nn.Module, Inputs]]] = {
    "mlp": mlp,
    "cnn": cnn,
    "transformer": transformer,
    "unusual": unusual,
}


def options_of(rng: Random) -> dict[str, Any]:
    """How the network is to be compacted."""
    target = rng.choice(["units", "units", "parameters", "flops"])
    return {
        "criterion": rng.choice(["magnitude", "random"]),
        "sparsity": rng.choice([0.1, 0.3, 0.5, 0.5, 0.8]),
        "target": target,
        "spread": rng.choice(["uniform", "global"]),
        "round_to": rng.choice([1, 1, 1, 1, 2]),
        "min_units": rng.choice([1, 1, 1, 2]),
    }


def example_of(rng: Random, inputs: Inputs) -> Tensor:
    """One or several samples, sometimes all equal or zero."""
    example = inputs(rng.choice([1, 2, 3]), 1)
    way = rng.choice(["plain", "plain", "zeros", "equal"])
    if way == "zeros":
        return torch.zeros_like(example)
    return torch.ones_like(example) if way == "equal" else example


def compare(seed: int) -> Outcome:
    """Draw a network, compact it, and compare it with the masked one on inputs that it has not seen."""
    rng = Random(seed)
    family = rng.choice(["mlp", "cnn", "cnn", "transformer", "transformer", "unusual"])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float64)
        try:
            model, inputs = FAMILIES[family](rng)
        finally:
            torch.set_default_dtype(torch.float32)
        model.eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        return _compared(seed, rng, family, model, inputs)


def _compared(seed: int, rng: Random, family: str, model: nn.Module, inputs: Inputs) -> Outcome:
    example, options, residual = example_of(rng, inputs), options_of(rng), rng.random() < 0.2
    try:
        groups = find_groups(model, example, residual=residual, seconds=3600)  # a busy machine decides nothing
        report = compact_with_report(model, example, groups=groups, seed=seed, **options)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        ours = "shaver" in place.filename and isinstance(error, ValueError | TypeError | RuntimeError)
        where = f"{type(error).__name__} at {place.filename.rpartition('/')[2]}:{place.lineno}: {error}"
        return Outcome(seed, "refused" if ours else "crashed", family, where)
    masked = deepcopy(model)
    mask_units(masked, report.groups, report.choice.kept).apply_(masked)
    with torch.no_grad():
        for other in (example, inputs(4, 2), inputs(1, 3)):
            expected, found = masked(other), report.model(other)
            difference = float((expected - found).abs().max() / expected.abs().max().clamp(min=1e-30))
            if not difference < 1e-9:
                return Outcome(seed, "wrong", family, f"{difference:.2g}")
    return Outcome(seed, "equal", family, f"{difference:.2g}")
