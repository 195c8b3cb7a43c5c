"""Prune a trained network: estimate the curvature in one pass over the data, then choose the sparsity in four ways."""

import argparse
import copy

import shaver

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--epochs", type=int, default=20)
epochs = options.parse_args().epochs

data = shaver.data.load("digits", valid_fraction=0.1)
trained = shaver.zoo.build("digits_cnn", seed=0)
shaver.fit(trained, data.train, method="map", epochs=epochs, batch_size=64)  # stands in for your trained network


def accuracy(model):
    return shaver.measure.quality(model, data.test.batches(256)).accuracy


# MAP training fixed δ at 1 (ordinary weight decay, 1/N). The exact curvature gives the posterior afterwards.
curvature = shaver.curvature.estimate(trained, data.train.batches(128), source="ggn")
posterior = shaver.Posterior(curvature, 1.0, dict(trained.named_parameters()))
scores = shaver.score(trained, "opd", posterior=posterior)

print(f"{'dense':<34} {accuracy(trained):.1%}")
for name, how in {
    "80 % of all weights": {"sparsity": 0.8},
    "80 % of each layer": {"sparsity": 0.8, "scope": "layer"},
    "two of each four": {"scope": "2:4"},
    "as far as validation allows, −1 pt": {"max_drop": 0.01, "valid": data.valid.batches(256)},
}.items():
    model = copy.deepcopy(trained)
    pruned = shaver.prune(model, scores, **how)
    print(f"{name:<34} {accuracy(model):.1%}  sparsity {pruned.achieved:.3f}")

# Fine-tuning keeps pruned weights at zero: neither momentum nor weight decay changes them.
model = copy.deepcopy(trained)
pruned = shaver.prune(model, scores, sparsity=0.9)
before = accuracy(model)
shaver.fit(model, data.train, method="map", epochs=max(1, epochs // 4), lr=0.005, batch_size=64, masks=pruned.masks)
print(f"{'90 %, fine-tuned':<34} {accuracy(model):.1%}  {before:.1%} before fine-tuning")
