"""The shared list of cases: a network, its data, its likelihood, and which parameters have no fast rule."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import tests.curvature.networks as net
from shaver.likelihoods import Classification, Likelihood, Regression
from tests.curvature.reference import Problem

Draw = Callable[[int, torch.Generator], Tensor]


def normal(*shape: int) -> Draw:
    return lambda n, generator: torch.randn(n, *shape, generator=generator, dtype=torch.float64)


def integers(high: int, *shape: int) -> Draw:
    return lambda n, generator: torch.randint(high, (n, *shape), generator=generator)


def with_ignored(high: int, positions: int) -> Draw:
    """Labels of which some are ignored, and all of them in the first sample."""

    def draw(n: int, generator: torch.Generator) -> Tensor:
        labels = torch.randint(high, (n, positions), generator=generator)
        labels[torch.rand(n, positions, generator=generator) < 0.3] = -100
        labels[0] = -100
        return labels

    return draw


THREE_CLASSES = integers(3)


class Poisson(Likelihood):
    """A user's own likelihood: counts with log rate f."""

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.exp() - targets * outputs + torch.lgamma(targets + 1)).flatten(1).sum(1)

    def root(self, outputs: Tensor) -> Tensor:
        return torch.diag_embed((outputs / 2).exp()).movedim(-1, 0)


@dataclass(frozen=True)
class Case:
    """One network with its data.

    Attributes:
        generic: The parameters that are left to the generic rule; every other trainable one has a fast rule.
        frozen: Parameters that are not trained, hence have no curvature.
        keys: Names of the inputs for dict batches, called as ``model(**inputs)``.
    """

    name: str
    build: Callable[[], nn.Module]
    x: Draw
    y: Draw = THREE_CLASSES
    likelihood: str | Likelihood = "classification"
    generic: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    keys: tuple[str, ...] = ()

    def model(self, seed: int = 0) -> nn.Module:
        """The network in training mode and float64, with no parameter or statistic at a special value."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build().double()
            for parameter in model.parameters():
                with torch.no_grad():
                    if parameter.ndim < 2:
                        parameter.add_(0.3 * torch.randn_like(parameter))
                    else:
                        parameter.copy_(torch.randn_like(parameter) / max(1, parameter[0].numel()) ** 0.5)
            for name, buffer in model.named_buffers():
                if name.endswith("running_mean"):
                    buffer.normal_()
                elif name.endswith("running_var"):
                    buffer.uniform_(0.5, 2)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        return model.train()

    def batches(self, sizes: tuple[int, ...] = (3, 2), seed: int = 1) -> list[Any]:
        """One batch of each size. The first size, 3, is also the length of several sequences, on purpose."""
        generator = torch.Generator().manual_seed(seed)
        return [self._batch(n, generator) for n in sizes]

    def _batch(self, n: int, generator: torch.Generator) -> Any:
        x, y = self.x(n, generator), self.y(n, generator)
        if not self.keys:
            return x, y
        return {self.keys[0]: x, self.keys[1]: (x != 0).double() + 1e-3, "labels": y}

    @property
    def reading(self) -> dict[str, Any]:
        """``forward=`` and ``targets=`` where batches are dicts."""
        if not self.keys:
            return {}
        return {
            "forward": lambda model, batch: model(**{key: batch[key] for key in self.keys}),
            "targets": lambda batch: batch["labels"],
        }

    def problem(self, model: nn.Module, batches: list[Any]) -> Problem:
        """The same for the reference."""
        return Problem(model, batches, self.likelihood, **self.reading)


def conv(dims: int, *args: Any, head: int = 4, **options: Any) -> Callable[[], nn.Module]:
    """A convolution, a nonlinearity, a mean over positions and a layer on top."""
    kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    return lambda: nn.Sequential(kind(*args, **options), nn.Tanh(), net.pool_pixels(), nn.Linear(head, 3))


def chain(*makers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(make() for make in makers))


def of(kind: Callable[..., nn.Module], *args: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(*args, **options)


def lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 2, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)),
    )


def grouped() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True)),
        *(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4), nn.ReLU6(inplace=True)),
        *(nn.Conv2d(4, 6, 1, groups=2), nn.ReLU(), net.pool_pixels(), nn.Linear(6, 3)),
    )


def pruned() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    prune.custom_from_mask(model[0], "weight", torch.arange(20).reshape(5, 4) % 3 > 0)
    return model


def registered_twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 3))


def names(*items: str) -> frozenset[str]:
    return frozenset(items)


IN, OUT = of(nn.Linear, 4, 5), of(nn.Linear, 5, 3)
TANH, POSITIONS, PIXELS = of(nn.Tanh), net.pool_positions, net.pool_pixels

LINEAR = [
    Case("mlp", chain(IN, TANH, of(nn.Linear, 5, 5, bias=False), of(nn.ReLU), OUT), normal(4)),
    Case("linear-positions", chain(IN, TANH, OUT, POSITIONS), normal(3, 4)),
    Case("linear-grid", chain(IN, TANH, OUT, of(net.Apply, lambda x: x.sum((1, 2)))), normal(2, 3, 4)),
    Case("linear-folded", net.Folded, normal(3, 4)),
    Case("linear-folded-positions-major", of(net.Folded, positions_major=True), normal(3, 4)),
    Case("sequence-first", net.SequenceFirst, normal(4, 4)),
    Case("sequence-first-square", of(net.SequenceFirst, norm=True), normal(3, 4)),
    Case("linear-on-shared-table", net.OnTable, normal(3, 4)),
    Case("linear-in-place-relu", chain(IN, of(nn.ReLU, inplace=True), OUT), normal(4)),
    Case("linear-dropout", chain(IN, of(nn.Dropout, 0.5), TANH, OUT), normal(4)),
    Case("conv1d-transformers", chain(of(net.Conv1D, 5, 4), TANH, of(net.Conv1D, 3, 5), POSITIONS), normal(3, 4)),
    Case("frozen", chain(IN, TANH, OUT), normal(4), frozen=names("0.bias", "2.weight")),
    Case("regression", chain(IN, TANH, OUT), normal(4), normal(3), Regression(noise=0.3)),
    Case("regression-grid", chain(IN, TANH, OUT), normal(2, 4), normal(2, 3), "regression"),
    Case("poisson", chain(IN, TANH, OUT), normal(4), lambda n, g: integers(5, 3)(n, g).double(), Poisson()),
    Case("token-labels", chain(IN, TANH, OUT), normal(4, 4), with_ignored(3, 4)),
    Case("dict-batch", net.DictModel, integers(6, 4), keys=("tokens", "mask")),
]

CONV = [
    Case("conv1d", conv(1, 2, 4, 3, stride=2, padding=1), normal(2, 7)),
    Case("conv1d-replicate", conv(1, 2, 4, 3, padding=2, padding_mode="replicate", dilation=2), normal(2, 6)),
    Case("conv2d", conv(2, 2, 4, 3), normal(2, 5, 5)),
    Case("conv2d-no-bias-stride", conv(2, 2, 4, (3, 2), stride=(2, 1), padding=(1, 0), bias=False), normal(2, 5, 4)),
    Case("conv2d-reflect", conv(2, 1, 4, 3, padding=(2, 1), padding_mode="reflect"), normal(1, 4, 4)),
    Case("conv2d-circular", conv(2, 1, 4, 3, padding=1, padding_mode="circular", stride=2), normal(1, 4, 5)),
    Case("conv2d-same-even", conv(2, 1, 4, (2, 4), padding="same"), normal(1, 3, 4)),
    Case(
        "conv2d-same-reflect",
        conv(2, 1, 4, 3, padding="same", padding_mode="reflect", dilation=(1, 2)),
        normal(1, 4, 5),
    ),
    Case("conv2d-groups", conv(2, 4, 6, 2, groups=2, dilation=2, padding=1, head=6), normal(4, 4, 4)),
    Case("conv2d-depthwise", conv(2, 3, 6, 3, groups=3, padding=1, head=6), normal(3, 4, 4)),
    Case("conv2d-pointwise", conv(2, 2, 4, 1), normal(2, 3, 3)),
    Case("conv2d-one-position", conv(2, 2, 4, 3), normal(2, 3, 3)),
    Case("conv3d", conv(3, 1, 4, (2, 3, 2), stride=(1, 2, 1), padding=(0, 1, 0)), normal(1, 3, 4, 3)),
    Case("conv3d-groups-circular", conv(3, 2, 4, 2, groups=2, padding=1, padding_mode="circular"), normal(2, 2, 3, 2)),
    Case(
        "conv-channels-last",
        chain(of(net.Apply, lambda x: x.to(memory_format=torch.channels_last)), conv(2, 2, 4, 3)),
        normal(2, 5, 4),
    ),
    Case("conv-folded-frames", net.FoldedImages, normal(3, 1, 3, 3)),
    Case(
        "segmentation",
        chain(of(nn.Conv2d, 1, 2, 3, padding=1), TANH, of(nn.Conv2d, 2, 3, 1)),
        normal(1, 3, 2),
        integers(3, 3, 2),
        Classification(class_dim=1),
    ),
]

NORM = [
    Case("batchnorm1d", chain(IN, of(nn.BatchNorm1d, 5), TANH, OUT), normal(4)),
    Case(
        "batchnorm1d-positions", chain(of(nn.Conv1d, 2, 5, 2), of(nn.BatchNorm1d, 5), TANH, PIXELS, OUT), normal(2, 4)
    ),
    Case(
        "batchnorm2d",
        chain(of(nn.Conv2d, 1, 5, 2), of(nn.BatchNorm2d, 5), of(nn.ReLU, inplace=True), PIXELS, OUT),
        normal(1, 3, 3),
    ),
    Case("batchnorm-no-affine", chain(IN, of(nn.BatchNorm1d, 5, affine=False), TANH, OUT), normal(4)),
    Case("layernorm", chain(IN, of(nn.LayerNorm, 5), TANH, OUT), normal(4)),
    Case("layernorm-positions", chain(IN, of(nn.LayerNorm, 5, bias=False), TANH, OUT, POSITIONS), normal(3, 4)),
    Case("layernorm-grid", chain(IN, of(nn.LayerNorm, (3, 5)), TANH, OUT, POSITIONS), normal(3, 4)),
    Case(
        "layernorm-grid-rows",
        chain(IN, of(nn.LayerNorm, (3, 5)), TANH, OUT, of(net.Apply, lambda x: x.sum((1, 2)))),
        normal(2, 3, 4),
    ),
    Case(
        "groupnorm",
        chain(of(nn.Conv2d, 1, 4, 2), of(nn.GroupNorm, 2, 4), TANH, PIXELS, of(nn.Linear, 4, 3)),
        normal(1, 3, 3),
    ),
    Case("groupnorm-flat", chain(of(nn.Linear, 4, 6), of(nn.GroupNorm, 3, 6), TANH, of(nn.Linear, 6, 3)), normal(4)),
    Case("rmsnorm", chain(IN, of(nn.RMSNorm, 5), TANH, OUT, POSITIONS), normal(3, 4)),
    Case("rmsnorm-grid", chain(IN, of(nn.RMSNorm, (3, 5), eps=1e-3), TANH, OUT, POSITIONS), normal(3, 4)),
    Case(
        "instancenorm",
        chain(of(nn.Conv2d, 1, 4, 2), of(nn.InstanceNorm2d, 4, affine=True), TANH, PIXELS, of(nn.Linear, 4, 3)),
        normal(1, 3, 4),
    ),
    Case(
        "instancenorm-tracked",
        chain(
            of(nn.Conv1d, 1, 4, 2),
            of(nn.InstanceNorm1d, 4, affine=True, track_running_stats=True),
            TANH,
            PIXELS,
            of(nn.Linear, 4, 3),
        ),
        normal(1, 4),
    ),
]

OTHER = [
    Case("embedding", chain(of(nn.Embedding, 6, 5), TANH, OUT, POSITIONS), integers(4, 4)),
    Case("embedding-padding", chain(of(nn.Embedding, 4, 5, padding_idx=0), TANH, POSITIONS, OUT), integers(4, 4)),
    Case("embedding-one-token", chain(of(nn.Embedding, 6, 5), TANH, OUT), integers(6)),
    Case(
        "embedding-bag",
        chain(of(nn.EmbeddingBag, 6, 5, mode="mean"), TANH, OUT),
        integers(6, 4),
        generic=names("0.weight"),
    ),
    Case("scalars", chain(IN, net.Bias, TANH, net.Scale, net.Bias, OUT, POSITIONS), normal(3, 4)),
    Case("prelu", chain(IN, of(nn.PReLU, 5), OUT), normal(4)),
    Case("bilinear-form", chain(net.Quadratic), normal(4), generic=names("0.left")),
    Case(
        "conv-transpose",
        chain(of(nn.ConvTranspose2d, 2, 4, 2, stride=2), TANH, PIXELS, of(nn.Linear, 4, 3)),
        normal(2, 3, 2),
        generic=names("0.weight", "0.bias"),
    ),
    Case("attention-batch-first", net.MultiHead, normal(3, 4)),
    Case("attention-batch-second", of(net.MultiHead, batch_first=False), normal(3, 4)),
    Case(
        "lstm",
        net.Recurrent,
        normal(3, 3),
        generic=names("cell.weight_ih_l0", "cell.weight_hh_l0"),
    ),
    Case(
        "weight-norm",
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)),
        normal(4),
        generic=names("0.parametrizations.weight.original0", "0.parametrizations.weight.original1"),
    ),
    Case("torch-prune-mask", pruned, normal(4), generic=names("0.weight_orig")),
    Case("linear-subclass", chain(of(net.HalfLinear, 4, 5), TANH, OUT), normal(4), generic=names("0.weight")),
    Case("called-twice", net.CalledTwice, normal(4)),
    Case("registered-twice", registered_twice, normal(4)),
    Case("shared-branches", net.Branches, normal(2, 6)),
    Case("siblings", net.Siblings, normal(4)),
    Case("used-elsewhere", net.Elsewhere, normal(4), generic=names("layer.weight")),
    Case("unused", net.Unused, normal(4)),
]

COMPOSITE = [
    Case("lenet", lenet, normal(1, 12, 12)),
    Case("grouped-net", grouped, normal(2, 4, 4)),
    Case(
        "fixup-block",
        chain(of(nn.Conv2d, 1, 3, 3), of(net.FixupBlock, 3), PIXELS, of(nn.Linear, 3, 3)),
        normal(1, 5, 5),
    ),
    Case(
        "batchnorm-block",
        chain(of(nn.Conv2d, 1, 3, 2), of(net.NormResBlock, 3), PIXELS, of(nn.Linear, 3, 3)),
        normal(1, 4, 4),
    ),
    Case("mixer-block", chain(of(net.MixerBlock, 3, 4), POSITIONS, of(nn.Linear, 4, 3)), normal(3, 4)),
    Case("transformer-block", chain(of(net.TransformerBlock, 4), POSITIONS, of(nn.Linear, 4, 3)), normal(3, 4)),
    Case("vision-transformer", net.VisionTransformer, normal(1, 4, 4)),
    Case(
        "torch-encoder",
        chain(of(nn.TransformerEncoderLayer, 4, 2, 6, batch_first=True), POSITIONS, of(nn.Linear, 4, 3)),
        normal(3, 4),
    ),
    Case("tied-language-model", net.TiedLanguageModel, integers(6, 3), integers(6, 3)),
    Case(
        "language-model",
        of(net.TiedLanguageModel, tied=False),
        integers(6, 4),
        with_ignored(6, 4),
    ),
]

CASES = LINEAR + CONV + NORM + OTHER + COMPOSITE
BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "case names are unique"
