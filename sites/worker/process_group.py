"""torch.distributed inside one site: initialised here unless the script has done so."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore


def choose_device() -> torch.device:
    """Return this rank's device, and make it the current one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank())
    torch.cuda.set_device(device)
    return device


def local_rank() -> int:
    """Return the rank inside the node, as torchrun gave it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def ensure_process_group(device: torch.device, timeout_s: float) -> bool:
    """Initialise the default process group; return whether it was done here, and not before.

    Without torchrun's variables this process is the only rank.
    """
    if dist.is_initialized():
        return False
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    return True
