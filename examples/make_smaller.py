"""Make a smaller dense network: mask units during training, remove them afterwards, then time and save the result."""

import argparse
import tempfile
from pathlib import Path

import torch

import shaver

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--epochs", type=int, default=20)
options.add_argument("--out", type=Path, default=None, help="folder for the small network")
given = options.parse_args()

data = shaver.data.load("digits")
x, _ = data.test[:1]
model = shaver.zoo.build("digits_cnn", seed=0)

# Units are masked along a schedule during training. The prior has one precision per unit.
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

# The folder holds the remaining weights and a plan, without pickle. Loading calls the network's own constructor.
folder = given.out or Path(tempfile.mkdtemp())
shaver.save(small, folder)
again = shaver.load(folder)
with torch.no_grad():
    print("the same outputs after loading:", torch.allclose(again.eval()(batch), small.eval()(batch), atol=1e-5))
