"""Makes each step of an optimizer one of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from sites.worker.digest import digest_of
from sites.worker.link import Link
from sites.worker.rounds import Round
from sites.worker.step_log import StepLog

Parameters = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class CountedSteps:
    """Of one optimizer: the record of each step, and the digest of those that are verified."""

    def __init__(self, link: Link, log: StepLog, verify_every: int) -> None:
        """Count nothing yet.

        Args:
            link: takes the digests.
            log: takes the steps.
            verify_every: steps between digests; 0: there is none.
        """
        self._link = link
        self._log = log
        self._verify_every = verify_every
        self._has_begun = False

    def begin(self, caller: str) -> None:
        """Claim the run's steps for what one method of the site synchronises.

        Raises:
            RuntimeError: another one has.
        """
        if self._has_begun:
            raise RuntimeError(f"site.{caller}: a model is synchronised already")
        self._has_begun = True

    def follow(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Parameters,
        take_rounds: Callable[[], list[Round]],
    ) -> None:
        """Count the optimizer's steps from now on, and send the digest of what they begin with.

        Args:
            optimizer: a hook after its steps is registered.
            parameters: all that sites are to hold alike, by name.
            take_rounds: returns those since the last step.
        """
        self._send_digest(parameters, 0)
        self._log.restart_clock()

        def end_step(*_: Any) -> None:  # noqa: ANN401 - torch's own arguments
            self._log.end_step(take_rounds())
            self._send_digest(parameters, self._log.num_steps)

        optimizer.register_step_post_hook(end_step)

    def _send_digest(self, parameters: Parameters, step: int) -> None:
        """Send hashes of all parameters, in the steps that are verified.

        Not of buffers: a running mean is each rank's own, as in DistributedDataParallel.
        """
        if self._verify_every == 0 or step % self._verify_every != 0:
            return
        digest = digest_of(parameters())
        shown = digest.bounded()
        self._link.send_digest(step, digest.combined, shown.tensors, shown.names)
