"""Use SpaM in your own training loop: two lines more than plain PyTorch."""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import shaver

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--epochs", type=int, default=20)
epochs = options.parse_args().epochs

# Any data and any network will do. These need no download.
digits = shaver.data.load("digits")
train_set, test_set = TensorDataset(*digits.train[:]), TensorDataset(*digits.test[:])
loader = DataLoader(train_set, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
    torch.nn.Flatten(), torch.nn.Linear(16 * 4 * 4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10),
)  # fmt: skip

optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # no weight decay: the prior takes its place
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
spam = shaver.SpaM(model, data_size=len(train_set), total_steps=epochs * len(loader))
for epoch in range(epochs):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        spam.step(optimizer)  # takes the optimizer's step, applies the prior, and learns δ
        schedule.step()
    if (epoch + 1) % 5 == 0:
        known = spam.statistics()  # empty before the first curvature measurement
        print(f"epoch {epoch + 1:3}  loss {loss.item():.3f}  weights that matter {known['relevant']:.1%}")
spam.close()  # removes the hooks from the model

scores = shaver.score(model, "opd", posterior=spam.posterior)
test = DataLoader(test_set, batch_size=256)
dense = shaver.measure.quality(model, test).accuracy
shaver.prune(model, scores, sparsity=0.95)
print(f"test accuracy {dense:.1%} dense, {shaver.measure.quality(model, test).accuracy:.1%} with 5 % of the weights")
