"""Starting worker scripts in several processes, as torchrun does, on a port of their own."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def torchrun(worker: str, *arguments: object, ranks: int = 2, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run ``worker`` (a file beside this one) in ``ranks`` processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(HERE / worker), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def succeed(worker: str, *arguments: object, ranks: int = 2) -> None:
    """The same; a failure shows what the ranks printed."""
    done = torchrun(worker, *arguments, ranks=ranks)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
