"""A user's own script that depends on where it runs: a relative path, arguments, environment.

Its last line to stdout is what it found, as JSON, of the secret only a hash.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import isthmus


def main() -> None:
    """Fit nothing much for some steps; tell where and how this runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=1)
    options = parser.parse_args()
    text = Path(options.data).read_text(encoding="utf-8").strip()
    site = isthmus.join()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.attach(model, optimizer)
    generator = torch.Generator().manual_seed(site.global_rank)
    for _ in range(options.steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    secret = os.environ.get("TOKEN_OF_TEST", "")
    shown = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if secret and secret.encode() in _read(path)
    ]
    found = {
        "site": site.name,
        "main": site.is_main,
        "folder": str(Path.cwd()),
        "text": text,
        "steps": options.steps,
        "colour": os.environ.get("COLOUR"),
        "secret": hashlib.sha256(secret.encode()).hexdigest(),
        "shown": shown,
    }
    print(json.dumps(found), flush=True)
    site.leave()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    main()
