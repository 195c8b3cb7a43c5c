"""Run by torchrun: ``main`` runs every case, ``dies`` loses a rank, ``goes_on`` continues."""

import os
import sys
from pathlib import Path

import torch

from shaver.io import save_tensors
from tests.integrations.fit_cases import CASES, Failing, run, with_sampler

torch.set_num_threads(1)
command, folder, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
if command == "main":
    for case in CASES:
        save_tensors(folder / f"{case}-{rank}.safetensors", run(case, folder / case))
    save_tensors(folder / f"sampler-{rank}.safetensors", with_sampler(rank, 2))
    try:
        run("spam", build=lambda: Failing("raises"))
    except Exception as error:
        (folder / f"error-{rank}.txt").write_text(repr(error))
    sys.stdout.flush()
    os._exit(0)  # after a failed run gloo's threads may abort the interpreter's shutdown; what matters is on disk
elif command == "dies":
    run("spam", folder, build=lambda: Failing("dies"))
elif command == "goes_on":
    for path in map(Path, sys.argv[2:]):
        save_tensors(path.with_name(f"{path.name}-{rank}.safetensors"), run("spam", path))
