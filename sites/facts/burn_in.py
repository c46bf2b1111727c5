"""Loads the devices of a machine for a while, and looks whether each computes and copies rightly.

One process a device, as in training: each multiplies the same matrices again and again, copies to
the device and back, and adds up numbers with the others. A result is right if it has the bits of
the first one, and that the bits of the other devices; a copy if it is equal; a sum if it is exact.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from isthmus.protos.own_processes import own_command
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_lines import Kinds, line_of
from isthmus.topology.spec.machine_facts import Burned

_SIZE = 1024
"""Rows and columns of the matrices."""
_COPY_NUMEL = 16 << 20
_START_S = 120.0
"""Time to start the processes, and to end them, beside what was asked for."""
_BURNED: Kinds[Burned] = Kinds("device to burn-in", Burned)


def burn_in(for_s: float) -> list[Burned]:
    """Return what became of each device of this machine; of one without accelerators, its CPUs."""
    num_devices = max(1, torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                own_command(
                    "isthmus.sites.facts.burn_in",
                    str(index),
                    str(num_devices),
                    str(for_s),
                    str(Path(folder) / "store"),
                ),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for index in range(num_devices)
        ]
        deadline_s = time.monotonic() + for_s + _START_S
        burned = [_ended(index, process, deadline_s) for index, process in enumerate(processes)]
    return compared(burned)


def compared(burned: Sequence[Burned]) -> list[Burned]:
    """Return the devices; those whose product is not what most of their kind have are wrong.

    Where there is no such majority, it may be any of them.
    """
    found = []
    for device in burned:
        alike = [
            other.product for other in burned if other.device == device.device and other.product
        ]
        usual, count = Counter(alike).most_common(1)[0] if alike else (device.product, 1)
        is_known = 2 * count > len(alike)
        is_wrong = device.product != usual if is_known else len(set(alike)) > 1
        whose = (
            "others of its kind" if is_known else "the other of its kind, and either may be wrong"
        )
        if is_wrong and not device.problem:
            found.append(
                replace(device, problem=f"its product of two matrices is not that of {whose}")
            )
        else:
            found.append(device)
    return found


def _ended(index: int, process: subprocess.Popen[bytes], deadline_s: float) -> Burned:
    """Return what a device's process has found; one that does not end is killed."""
    try:
        out, err = process.communicate(timeout=max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Burned(index=index, device="", problem="it hangs")
    try:
        return _BURNED.read(out)
    except ConfigError:
        lines = err.decode(errors="replace").strip().splitlines() or ["no word"]
        return Burned(index=index, device="", problem=f"its process ended with: {lines[-1]:.200}")


class Burn:
    """One device's part."""

    def __init__(self, index: int, device: torch.device) -> None:
        """Make what is computed with: the same at all devices."""
        self._index, self._device = index, device
        generator = torch.Generator().manual_seed(0)
        self._first, self._second = (
            torch.randn(_SIZE, _SIZE, generator=generator, dtype=torch.float32, device="cpu").to(
                device
            )
            for _ in range(2)
        )
        self._pattern = torch.arange(_COPY_NUMEL, dtype=torch.int32, device="cpu")
        self.product = ""
        self.num_products = 0
        self.copy_bytes_per_s = 0.0

    def problem(self) -> str:
        """Compute and copy once; return what is wrong, or nothing."""
        bits = (self._first @ self._second).view(torch.int32).to(torch.int64)
        places = torch.arange(1, bits.numel() + 1, dtype=torch.int64, device=self._device).view_as(
            bits
        )
        product = f"{int((bits * places).sum()):x}"
        self.product = self.product or product
        self.num_products += 1
        if product != self.product:
            return f"product {self.num_products} of the same two matrices has other bits"
        began_s = time.perf_counter()
        back = self._pattern.to(self._device, copy=True).cpu()
        moved = 2 * self._pattern.nbytes / (time.perf_counter() - began_s)
        self.copy_bytes_per_s = max(self.copy_bytes_per_s, moved)
        if not torch.equal(back, self._pattern):
            return "what was copied to it and back is not the same"
        total = torch.full((4096,), 1 << self._index % 16, dtype=torch.int64, device=self._device)
        dist.all_reduce(total)
        wanted = sum(1 << each % 16 for each in range(dist.get_world_size()))
        return "" if bool((total == wanted).all()) else "a sum over the devices is wrong"


def main(arguments: Sequence[str]) -> None:
    """Load one device; print what became of it."""
    index, count, for_s, store = int(arguments[0]), int(arguments[1]), *arguments[2:]
    has_cards = torch.cuda.is_available()
    device = torch.device("cuda", index) if has_cards else torch.device("cpu")
    if has_cards:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if has_cards else "gloo",
        init_method=f"file://{store}",
        rank=index,
        world_size=count,
        timeout=timedelta(seconds=_START_S),
    )
    burn, problem, rounds = (
        Burn(index, device),
        "",
        torch.zeros(1, dtype=torch.float32, device=device),
    )
    deadline_s = time.monotonic() + float(for_s)
    while not bool(rounds):
        problem = problem or burn.problem()
        # All stop after the same sum, whoever finds first that something is wrong, or time is up.
        rounds.fill_(float(bool(problem) or time.monotonic() > deadline_s))
        dist.all_reduce(rounds)
    name = torch.cuda.get_device_name(device) if has_cards else "cpu"
    burned = Burned(
        index=index,
        device=name,
        product=burn.product,
        num_products=burn.num_products,
        copy_bytes_per_s=burn.copy_bytes_per_s,
        problem=problem,
    )
    sys.stdout.write(line_of(burned).decode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
