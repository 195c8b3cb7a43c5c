"""Compare four priors and one of your own on the same network: evidence, accuracy, and accuracy after pruning."""

import argparse
import copy

import torch

import shaver
import shaver.testing

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--epochs", type=int, default=20)
epochs = options.parse_args().epochs


def by_filter(name, parameter):
    """One precision per filter of a convolution, and one per other tensor."""
    if parameter.ndim == 4:
        return torch.arange(len(parameter)).reshape(-1, 1, 1, 1)  # ids that broadcast to the parameter
    return name  # one key for the whole tensor


shaver.testing.check_prior(by_filter)  # checks that the grouping is a valid prior

data = shaver.data.load("digits")
start = shaver.zoo.build("digits_cnn", seed=0)
print(f"{'prior':<12} {'δ values':>8} {'evidence':>9} {'dense':>7} {'95 % weights':>13} {'50 % units':>11}")
for prior in ("scalar", "layer", "unit", "parameter", by_filter):
    model = copy.deepcopy(start)
    history = shaver.fit(model, data.train, method="spam", epochs=epochs, lr=0.1, batch_size=64, spam={"prior": prior})
    posterior = history.posterior
    numbers = sum(f.values.numel() for f in shaver.priors.make_prior(prior, dict(model.named_parameters())).factors)

    def accuracy(network):
        return shaver.measure.quality(network, data.test.batches(256)).accuracy

    dense = accuracy(model)
    small = shaver.compact(model, data.test[:1][0], posterior=posterior, sparsity=0.5)
    shaver.prune(model, shaver.score(model, "opd", posterior=posterior), sparsity=0.95)
    label = prior if isinstance(prior, str) else prior.__name__
    print(
        f"{label:<12} {numbers:>8} {posterior.log_evidence:>9.0f} {dense:>7.1%} {accuracy(model):>13.1%} "
        f"{accuracy(small):>11.1%}"
    )
