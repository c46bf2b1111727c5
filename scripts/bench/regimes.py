"""Train a small GPT at two sites under each regime; compare the held-out loss with sync's.

Each row is a real run of the shipped trainer, launched with real gateways on this machine: the loss
at its end, less that of `sync` with the same seed. What it does not show: the model has half a
million parameters and sees 150,000 tokens. Published gaps of diloco shrink as models grow
(arXiv 2503.09799, table 4), so these are the worst case.
"""

from __future__ import annotations

import argparse
from statistics import fmean

from isthmus.protos import metrics
from scripts.bench.launched import launched, of_kind

REGIMES = {
    "sync": ["regime=sync"],
    "sync, int4": ["regime=sync", "exchange.codec=int4"],
    "delayed, look: false": ["regime={kind: delayed, look: false}"],
    "delayed": ["regime=delayed"],
    "delayed, int4": ["regime=delayed", "exchange.codec=int4"],
    "local_sgd, H = 10": ["regime={kind: local_sgd, sync_every: 10}"],
    "local_sgd, H = 10, topk2": [
        "regime={kind: local_sgd, sync_every: 10}",
        "exchange.codec=topk2",
        "exchange.error_feedback_decay=0.95",
    ],
    "diloco, H = 10": ["regime={kind: diloco, sync_every: 10}"],
    "diloco, H = 10, topk2": [
        "regime={kind: diloco, sync_every: 10}",
        "exchange.codec=topk2",
        "exchange.error_feedback_decay=0.95",
    ],
    "diloco, H = 10, topk2, no decay": [
        "regime={kind: diloco, sync_every: 10}",
        "exchange.codec=topk2",
    ],
    "diloco, H = 30": ["regime={kind: diloco, sync_every: 30}"],
    "streaming, H = 10": ["regime={kind: streaming, sync_every: 10, fragments: 5, delay: 1}"],
    "streaming, H = 30": ["regime={kind: streaming, sync_every: 30, fragments: 6, delay: 2}"],
    "never": ["exchange.schedule=off"],
}
TOPOLOGY = """
version: 1
name: one-machine
sites: [SITES]
links: [LINKS]
security: {mode: insecure}
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, action="append", default=[], help="0, 1 and 2")
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--lr", type=float, action="append", default=[])
    parser.add_argument("--only", default="", help="regimes whose names have this in them")


def run(options: argparse.Namespace) -> int:
    """Print a row a regime and learning rate; return 1 if a run has failed."""
    status = 0
    names = [name for name in REGIMES if name == "sync" or options.only in name]
    for lr in options.lr or [3e-3, 1e-3]:
        print(f"{options.sites} sites, {options.steps} steps, learning rate {lr:g}")
        baselines: list[float] = []
        for name in names:
            losses = [_loss(name, seed, lr, options) for seed in options.seed or [0, 1, 2]]
            if not all(losses):
                status = 1
                continue
            baselines = baselines or losses
            gaps = [loss - baseline for loss, baseline in zip(losses, baselines, strict=True)]
            seeds = " ".join(f"{gap:+.3f}" for gap in gaps)
            print(f"{name:32} {fmean(losses):.4f}  {fmean(gaps):+.3f}   {seeds}", flush=True)
    return status


def _loss(name: str, seed: int, lr: float, options: argparse.Namespace) -> float:
    """Return the held-out loss at the end of a run; 0: it failed."""
    trainer = {
        "steps": options.steps,
        "global_batch": 8,
        "micro_batch": 8,
        "seed": seed,
        "evaluate_every": options.steps,
        "evaluation_batches": 24,
        "model": {"layers": 4, "heads": 4, "width": 104, "context": 64},
        "optimizer": {
            "learning_rate": lr,
            "min_learning_rate": round(lr / 10, 9),
            "warmup_steps": 20,
        },
    }
    sites = [f"s{index}" for index in range(options.sites)]
    each = "nodes: 1, accelerators_per_node: 1, accelerator: cpu"
    links = [
        f"{{between: [{sites[0]}, {other}], bandwidth: 10Gbit/s, rtt: 0.2ms}}"
        for other in sites[1:]
    ]
    topology = TOPOLOGY.replace("SITES", ", ".join(f"{{name: {site}, {each}}}" for site in sites))
    topology = topology.replace("LINKS", ", ".join(links))
    settings = [*REGIMES[name], "verify.parameters_every=50"]
    records = launched(topology, trainer, settings, within_s=600)
    found = [
        record["values"][metrics.HELD_OUT_LOSS]
        for record in of_kind(records, metrics.EVALUATION)
        if record["step"] == options.steps
    ]
    return fmean(found) if found else 0.0
