"""A Lightning training that one process runs, or two."""

import logging
import os
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shaver.integrations.lightning import SpaMCallback
from tests.integrations.ddp_cases import QUICK, blobs, mlp


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp().double()

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def run(ranks: int) -> dict[str, Tensor]:
    """Global batches of 10, which two ranks take in turns."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    x, y = blobs()
    data = TensorDataset(x[:40], y[:40])
    rank = int(os.environ.get("RANK", "0"))
    sampler: Any = DistributedSampler(data, ranks, rank, shuffle=False)
    loader = DataLoader(data, batch_size=10 // ranks, sampler=sampler)
    lit, callback = Lit(), SpaMCallback("net", source="ef", **QUICK)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=3,
        use_distributed_sampler=False,  # Lightning's own would shuffle
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.callbacks.append(callback)
    trainer.fit(lit, loader)
    assert callback.spam is not None
    assert callback.spam.updates >= 2
    found = {name: p.detach().clone() for name, p in lit.net.named_parameters()}
    return found | {f"precision.{n}": p.clone() for n, p in callback.posterior.precision().items()}
