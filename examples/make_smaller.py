"""A smaller dense network: units fall while training, are removed afterwards, and the rest is stored and timed."""

import argparse
import tempfile
from pathlib import Path

import torch

import shaver

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--epochs", type=int, default=20)
options.add_argument("--out", type=Path, default=None, help="keep the small network here")
given = options.parse_args()

data = shaver.data.load("digits")
x, _ = data.test[:1]
model = shaver.zoo.build("digits_cnn", seed=0)

# Units are masked along a schedule, under a prior with one precision for each unit.
gradual = shaver.structure.Gradual(0.7, example=x, target="flops")
settings = {"epochs": given.epochs, "lr": 0.1, "batch_size": 64}
history = shaver.fit(model, data.train, method="spam", online=gradual, **settings)
report = shaver.structure.compact_with_report(model, x, masks=history.masks)
small = report.model
print(report)


def accuracy(network):
    return shaver.measure.quality(network, data.test.batches(256)).accuracy


batch, _ = data.test[:128]
times = [1e3 * shaver.measure.latency(network, x, batch_size=128).median for network in (model, small)]
print(f"test accuracy {accuracy(model):.1%} masked, {accuracy(small):.1%} compact")
print(f"milliseconds for 128 samples {times[0]:.2f} masked, {times[1]:.2f} compact")

# Stored as what is left and how it came about, without pickle; rebuilt from the network's own constructor.
folder = given.out or Path(tempfile.mkdtemp())
shaver.save(small, folder)
again = shaver.load(folder)
with torch.no_grad():
    print("the same outputs after loading:", torch.equal(again.eval()(batch), small.eval()(batch)))
