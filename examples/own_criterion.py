"""Write three extensions: a pruning criterion, a curvature rule for your own layer, and a likelihood."""

import torch
from torch import nn

import shaver
import shaver.testing
from shaver.curvature import Dense


# A criterion gives each weight a score. The lowest scores are pruned first.
@shaver.criteria.criterion("prior-energy", needs=["posterior"])
def prior_energy(given):
    """δθ²: the cost of a weight according to the prior alone."""
    delta = given.posterior.delta()
    return {name: delta[name] * weight.square() for name, weight in given.weights.items()}


shaver.testing.check_criterion("prior-energy")  # says what is wrong, if anything is


# A layer of your own works without a rule; a rule makes it fast.
class Gain(nn.Module):
    """y = x · gain, with one gain per feature."""

    def __init__(self, features):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(features))

    def forward(self, x):
        return x * self.gain


@shaver.curvature.register_rule(Gain)
def gain(module, inputs, grads):
    """The inputs are (B, …, features); the K gradients of the outputs are (K, B, …, features)."""
    per_sample = (grads * inputs).reshape(*grads.shape[:2], -1, grads.shape[-1])
    return {"gain": Dense(per_sample.sum(2))}  # (K, B, features)


# A likelihood is a loss per sample and a square root of its Hessian at the outputs.
class Poisson(shaver.likelihoods.Likelihood):
    """Counts with log rate f: −log p = e^f − y f + log y!, with second derivative e^f."""

    def nll(self, outputs, targets):
        each = outputs.exp() - targets * outputs + torch.lgamma(targets + 1)
        return each.flatten(1).sum(1)

    def root(self, outputs):
        return torch.diag_embed((outputs / 2).exp()).movedim(-1, 0)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), Gain(8), nn.Tanh(), nn.Linear(8, 1))
batches = [(x := torch.randn(64, 4), torch.poisson((x[:, :1] + 1).exp()))]
curvature = shaver.curvature.estimate(model, batches, likelihood=Poisson(), source="ggn")
print(curvature.coverage())
posterior = shaver.Posterior(curvature, 1.0, dict(model.named_parameters()))
print(shaver.prune(model, shaver.score(model, "prior-energy", posterior=posterior), sparsity=0.5))
