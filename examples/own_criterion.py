"""Three extensions: a pruning criterion, a curvature rule for a layer of your own, and a likelihood."""

import torch
from torch import nn

import shaver
import shaver.testing
from shaver.curvature import Dense


# A criterion is one function from what is given to a score for each weight; the lowest are pruned first.
@shaver.criteria.criterion("prior-energy", needs=["posterior"])
def prior_energy(given):
    """δθ²: what the prior alone says a weight costs."""
    delta = given.posterior.delta()
    return {name: delta[name] * weight.square() for name, weight in given.weights.items()}


shaver.testing.check_criterion("prior-energy")  # shapes, seeds, modes, and the model left as it was


# A layer of your own works without a rule: the generic one computes per-sample gradients. A rule makes it fast.
class Gain(nn.Module):
    """y = x · gain, one gain a feature."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(features))

    def forward(self, x):
        return x * self.gain


@shaver.curvature.register_rule(Gain)
def gain(module, inputs, grads):
    """From inputs (B, …, features) and output gradients (K, B, …, features) to gradients (K, B, features)."""
    return {"gain": Dense((grads * inputs).flatten(2, -2).sum(2) if grads.ndim > 3 else grads * inputs)}


# A likelihood is a loss for each sample and a square root of its Hessian at the outputs.
class Poisson(shaver.likelihoods.Likelihood):
    """Counts with log rate f: −log p = e^f − y f + log y!, with second derivative e^f."""

    def nll(self, outputs, targets):
        return (outputs.exp() - targets * outputs + torch.lgamma(targets + 1)).flatten(1).sum(1)

    def root(self, outputs):
        return torch.diag_embed((outputs / 2).exp()).movedim(-1, 0)  # one column for each output


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), Gain(8), nn.Tanh(), nn.Linear(8, 1))
x = torch.randn(64, 4)
batches = [(x, torch.poisson((x[:, :1] + 1).exp()))]
curvature = shaver.curvature.estimate(model, batches, likelihood=Poisson(), source="ggn")
print(curvature.coverage())
posterior = shaver.Posterior(curvature, 1.0, dict(model.named_parameters()))
print(shaver.prune(model, shaver.score(model, "prior-energy", posterior=posterior), sparsity=0.5))
