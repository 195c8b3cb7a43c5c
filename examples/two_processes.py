"""Train one network in several processes: `torchrun --nproc-per-node 2 examples/two_processes.py`.

Each process takes a part of every batch. The curvature is summed over the processes, δ is computed once, and all
processes prune the same weights.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shaver

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--epochs", type=int, default=20)
epochs = options.parse_args().epochs

torch.set_num_threads(1)
dist.init_process_group("gloo")  # "nccl" if every process has a GPU
digits = shaver.data.load("digits")
train_set = TensorDataset(*digits.train[:])
sampler = DistributedSampler(train_set, seed=0)
loader = DataLoader(train_set, batch_size=64 // dist.get_world_size(), sampler=sampler)

model = shaver.zoo.build("digits_cnn", seed=0)
parallel = DistributedDataParallel(model)
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
spam = shaver.SpaM(parallel, data_size=len(train_set), total_steps=epochs * len(loader))  # takes the wrapped network
for epoch in range(epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(parallel(x), y)
        optimizer.zero_grad()
        loss.backward()
        spam.step(optimizer)
        schedule.step()

pruned = shaver.prune(model, shaver.score(model, "opd", posterior=spam.posterior), sparsity=0.95)
kept = torch.cat([mask.flatten() for mask in pruned.masks.values()]).to(torch.uint8)
first = kept.clone()
dist.broadcast(first, src=0)
quality = shaver.measure.quality(model, digits.test.batches(256))
print(f"rank {dist.get_rank()}: accuracy {quality.accuracy:.1%}, same masks as rank 0: {torch.equal(kept, first)}")
dist.destroy_process_group()
