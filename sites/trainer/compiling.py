"""Blocks by torch.compile: what that takes, and where they run as they are written."""

from __future__ import annotations

import contextlib
import os
import shutil
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from isthmus.topology.spec.errors import ConfigError, Problem
from isthmus.topology.spec.job import Trainer


def check_can_compile(site: str) -> None:
    """Refuse to start where the first step would find that nothing can be compiled.

    Raises:
        ConfigError: `site` has no C++ compiler, or not the headers of this Python.
    """
    compiler = os.environ.get("CXX", "g++")
    headers = Path(sysconfig.get_path("include"))
    if shutil.which(compiler) is None:
        missing = f"no C++ compiler ({compiler}): install g++ there, or name another in $CXX"
    elif not (headers / "Python.h").is_file():
        missing = f"no Python.h in {headers}: install Python's headers there (python3-dev)"
    else:
        return
    message = f"torch.compile cannot work at site {site}, which has {missing}; or leave it false"
    raise ConfigError([Problem("job", 0, 0, message, "trainer.compile")])


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Have each block compiled when it is first called."""
    # DDP's buckets are larger than a block mostly: blocks are not cut where a bucket ends.
    torch._dynamo.config.optimize_ddp = False
    for block in blocks:
        block.compile()


def as_written(config: Trainer) -> contextlib.AbstractContextManager[None]:
    """Return a context in which blocks run as they are written, compiled or not.

    For evaluations: without gradients blocks would be compiled once more, many steps after the
    start, when a site that takes longer than others would pass for one that hangs.
    """
    if not config.compile:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance
