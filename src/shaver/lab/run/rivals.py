"""Rivals, written from their papers: sparse variational dropout and L0 regularisation by hard concrete gates.

Both replace the computation of each linear layer and convolution while the network trains, decide about each weight by
themselves, and leave plain weights at the end. They are here to be compared with, in the same harness.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaver.data import Batches

#: Called after each epoch with its number and its mean loss.
Told = Callable[[int, float], None]


class Gated(nn.Module):
    """A layer whose weights carry an uncertainty or a gate while the network trains."""

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer

    def apply_layer(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer with other weights."""
        if isinstance(self.layer, nn.Linear):
            return F.linear(x, weight, bias)
        return cast(Tensor, self.layer._conv_forward(x, weight, bias))

    @abstractmethod
    def penalty(self) -> Tensor:
        """What the layer adds to the loss, in nats."""

    @abstractmethod
    def final(self) -> Tensor:
        """The plain weights at the end; zero where the method removes them."""


class VariationalDropout(Gated):
    """Sparse variational dropout (Molchanov, Ashukha and Vetrov, 2017), with local reparametrisation.

    q(w) = N(θ, σ²) under the log-uniform prior, whose Kullback–Leibler divergence is approximated as in the paper's
    equation 14, with α = σ²/θ². Weights with log α > 3 are removed. As in the authors' code, their means are left out
    during training too.
    """

    threshold = 3.0

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__(layer)
        self.log_variance = nn.Parameter(torch.full_like(layer.weight, -10.0))

    def log_alpha(self) -> Tensor:
        """log α, kept within the range in which the approximation holds."""
        return (self.log_variance - self.layer.weight.square().add(1e-8).log()).clamp(-8.0, 8.0)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs drawn from their own Gaussian; their mean in evaluation mode."""
        if not self.layer.training:
            return self.apply_layer(x, self.final(), self.layer.bias)
        log_alpha, weight = self.log_alpha(), self.layer.weight
        mean = self.apply_layer(x, weight * (log_alpha.detach() <= self.threshold), self.layer.bias)
        variance = self.apply_layer(x.square(), log_alpha.exp() * weight.square(), None)
        return mean + variance.clamp_min(1e-8).sqrt() * torch.randn_like(mean)

    def penalty(self) -> Tensor:
        """The divergence from the prior."""
        log_alpha = self.log_alpha()
        inner = 0.63576 * torch.sigmoid(1.87320 + 1.48695 * log_alpha) - 0.5 * F.softplus(-log_alpha)
        return (0.63576 - inner).sum()

    def final(self) -> Tensor:
        """The means of the weights that stay."""
        return self.layer.weight.detach() * (self.log_alpha().detach() <= self.threshold)


class HardConcrete(Gated):
    """L0 regularisation (Louizos, Welling and Kingma, 2018) with one hard concrete gate per weight."""

    temperature, low, high = 2 / 3, -0.1, 1.1

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__(layer)
        self.log_alpha = nn.Parameter(torch.full_like(layer.weight, 2.0))

    def _stretched(self, share: Tensor) -> Tensor:
        return (share * (self.high - self.low) + self.low).clamp(0.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """The layer with gates drawn once per batch, or with their deterministic values in evaluation mode."""
        if not self.layer.training:
            return self.apply_layer(x, self.final(), self.layer.bias)
        uniform = torch.rand_like(self.log_alpha).clamp(1e-6, 1 - 1e-6)
        gates = self._stretched(torch.sigmoid((torch.logit(uniform) + self.log_alpha) / self.temperature))
        return self.apply_layer(x, self.layer.weight * gates, self.layer.bias)

    def penalty(self) -> Tensor:
        """The expected number of open gates."""
        return torch.sigmoid(self.log_alpha - self.temperature * math.log(-self.low / self.high)).sum()

    def final(self) -> Tensor:
        """The weights times their gates."""
        return self.layer.weight.detach() * self._stretched(torch.sigmoid(self.log_alpha.detach()))


RIVALS: dict[str, type[Gated]] = {"vd": VariationalDropout, "l0": HardConcrete}


def train_rival(
    method: str,
    model: nn.Module,
    batches: Batches,
    *,
    epochs: int,
    seed: int = 0,
    lr: float = 1e-3,
    strength: float = 1.0,
    told: Told = lambda epoch, loss: None,
) -> None:
    """Train a network in place by Adam; its weights end with exact zeros.

    The schedule is that of the authors of variational dropout: the penalty grows linearly from 2.5 to 10 % of the
    training, and the learning rate falls linearly to zero in the second half.

    Args:
        method: ``"vd"`` or ``"l0"``.
        model: The network; all of its linear layers and convolutions take part.
        batches: The training data.
        epochs: Passes over the data.
        seed: Of the noise.
        lr: The first learning rate. L0's gates learn ten times as fast.
        strength: Factor of the penalty; the coefficient λ of L0, 1 for variational dropout.
        told: Called after each epoch.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    gated = [RIVALS[method](layer) for layer in layers]
    gates = [p for one in gated for p in one.parameters(recurse=False)]
    parts = [
        {"params": list(model.parameters()), "base": lr},
        {"params": gates, "base": 10 * lr if method == "l0" else lr},
    ]
    optimizer = torch.optim.Adam(parts, lr=lr)
    total, step = epochs * len(batches), 0
    model.train()
    for one in gated:
        one.layer.forward = one.forward  # type: ignore[method-assign]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for epoch in range(epochs):
            batches.set_epoch(epoch)
            summed = 0.0
            for x, y in batches:
                for group in optimizer.param_groups:
                    group["lr"] = group["base"] * min(1.0, 2 * (1 - step / total))
                weight = strength * min(1.0, max(0.0, (step / total - 0.025) / 0.075)) / batches.data_size
                loss = F.cross_entropy(model(x), y)
                objective = loss + weight * torch.stack([one.penalty() for one in gated]).sum()
                optimizer.zero_grad()
                objective.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                summed += float(loss.detach())
                step += 1
            told(epoch + 1, summed / len(batches))
    for one in gated:
        del one.layer.forward
        with torch.no_grad():
            one.layer.weight.copy_(one.final())
    model.eval()
