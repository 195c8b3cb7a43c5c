"""Run by torchrun: every case of ddp_cases, one file of results a rank."""

import importlib.util
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from shaver.io import save_tensors
from tests.integrations.ddp_cases import CASES, run

torch.set_num_threads(1)
dist.init_process_group("gloo")
for case in CASES:
    save_tensors(Path(sys.argv[1]) / f"{case}-{dist.get_rank()}.safetensors", run(case, dist.get_rank(), 2))
if importlib.util.find_spec("lightning") is not None:
    from tests.integrations.lightning_case import run as run_lightning

    save_tensors(Path(sys.argv[1]) / f"lightning-{dist.get_rank()}.safetensors", run_lightning(2))
if dist.is_initialized():
    dist.destroy_process_group()
