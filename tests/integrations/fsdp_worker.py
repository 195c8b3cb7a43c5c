"""Run by torchrun: every case of fsdp_cases, saving, loading, and what is refused."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from shaver.integrations.distributed import full_state_dict
from shaver.io import save_state, save_tensors
from shaver.shards import gathered, is_sharded
from shaver.spam import SpaM
from tests.integrations.fsdp_cases import CASES, Net, run, start, train

torch.set_num_threads(1)
dist.init_process_group("gloo")
folder, rank = Path(sys.argv[1]), dist.get_rank()
for case in CASES:
    save_tensors(folder / f"{case}-{rank}.safetensors", run(case, rank, 2))

notes = {}
for case in ("unit", "sgd"):
    model, spam, optimizer = start(case, 2)
    train(model, spam, optimizer, rank, 2, 2)
    state = full_state_dict(spam)
    weights, momentum = gathered(model.state_dict()), gathered(optimizer.state_dict())
    if rank == 0:
        save_state(folder / f"half-{case}.safetensors", {"spam": state, "model": weights, "optimizer": momentum})
    _, again, _ = start(case, 2)
    again.load_state_dict(state)
    for ours, theirs in zip(again.prior.factors, spam.prior.factors, strict=True):
        assert torch.equal(ours.values, theirs.values), ours.key
notes["sharded"] = all(is_sharded(value) for value in spam.state_dict()["prior"]["values"].values())
notes["rows"] = {name: list(value.shape) for name, value in spam.prior.delta().items()}
dist.barrier()

wrapped = fully_shard(Net())
refused = {"own": {"prior": lambda name, p: name}, "kron": {"structure": "kron"}}
for name, options in refused.items():
    try:
        SpaM(wrapped, 10, **({"source": "ef"} | options if name != "kron" else options))
    except ValueError as error:
        notes[name] = str(error)
# one rank's samples are broken: no rank waits for another
model, spam, optimizer = start("mc", 2)
train(model, spam, optimizer, rank, 2, 1)
assert spam.online is not None
assert spam.online.active
broken = torch.full((4, 6), torch.nan if rank else 1.0, dtype=torch.float64)
try:
    torch.nn.functional.cross_entropy(model(broken), torch.zeros(4, dtype=torch.long)).backward()
    spam.step(optimizer)
except FloatingPointError as error:
    notes["broken"] = str(error)
(folder / f"notes-{rank}.json").write_text(json.dumps(notes))
dist.destroy_process_group()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)  # on a busy machine a thread of the backend may outlive the interpreter, which then aborts
