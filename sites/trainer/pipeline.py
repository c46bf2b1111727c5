"""A rank's stages of a pipeline, and what takes micro-batches through them.

1F1B where a rank has one stage, interleaved 1F1B where it has several. All micro-batches of a pass
have one shape, and there are as many as the schedule wants: what is missing is filled up with
sequences that count for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn import functional

from isthmus.topology.spec.workload import Parallel

_COUNTS_NOT = -100
"""A target whose loss is 0."""


class Pipeline:
    """The schedules of one rank: one for each number and size of micro-batches."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        stages: Sequence[int],
        cut: Parallel,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Take what `lay_out` has made.

        Args:
            parts: Of this rank, in the order of their stages.
            stages: Their numbers.
            cut: Of the site.
            group: The ranks that have the other stages.
            device: Of this rank.
        """
        self._parts = parts
        self._stages = stages
        self._cut = cut
        self._group = group
        self._device = device
        self._schedules: dict[object, Schedule1F1B | ScheduleInterleaved1F1B] = {}
        self._tokens = 1
        self._num_stages = cut.pipeline * cut.virtual_stages
        self._is_first = stages[0] == 0
        self.is_last = stages[-1] == self._num_stages - 1
        """Whether losses are known here."""

    def learn(self, windows: Tensor, rows: int, tokens: int) -> Tensor:
        """Leave the gradients of `windows` in the parts; return the sum of the losses, if known.

        Args:
            windows: int64, shape (N, context + 1).
            rows: Sequences of the site's busiest replica, N or more.
            tokens: Of all windows, by which gradients are divided.

        Returns:
            float64, shape (): 0 where `is_last` is not.
        """
        self._tokens = tokens
        losses = self._run(windows, rows, is_learning=True)
        return _sum(losses, self._device) * tokens

    @torch.no_grad()
    def evaluate(self, windows: Tensor, rows: int) -> Tensor:
        """Return the sum of the losses of `windows`, without gradients; as `learn` does."""
        self._tokens = 1
        return _sum(self._run(windows, rows, is_learning=False), self._device)

    def _run(self, windows: Tensor, rows: int, *, is_learning: bool) -> list[Tensor]:
        count = micro_batches(rows, self._cut)
        size = -(-rows // count)
        missing = count * size - len(windows)
        inputs = functional.pad(windows[:, :-1], (0, 0, 0, missing))
        targets = functional.pad(windows[:, 1:], (0, 0, 0, missing), value=_COUNTS_NOT)
        schedule = self._schedule(count, size, is_learning)
        losses: list[Tensor] = []
        arguments = (inputs,) if self._is_first else ()
        take = schedule.step if is_learning else schedule.eval
        if self.is_last:
            take(*arguments, target=targets, losses=losses, return_outputs=False)
        else:
            take(*arguments, return_outputs=False)
        return losses

    def _schedule(
        self, count: int, size: int, is_learning: bool
    ) -> Schedule1F1B | ScheduleInterleaved1F1B:
        key = count, size, is_learning
        if key not in self._schedules:
            stages = [
                PipelineStage(part, stage, self._num_stages, self._device, group=self._group)
                for part, stage in zip(self._parts, self._stages, strict=True)
            ]
            # Gradients are divided by the loss: a schedule would do it after they have crossed.
            self._schedules[key] = (
                Schedule1F1B(stages[0], count, loss_fn=self._loss, scale_grads=False)
                if len(stages) == 1
                else ScheduleInterleaved1F1B(
                    [*stages], count, loss_fn=self._loss, scale_grads=False
                )
            )
        return self._schedules[key]

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over a micro-batch, divided by the tokens of all."""
        total = functional.cross_entropy(
            logits.flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=_COUNTS_NOT,
            reduction="sum",
        )
        return total / self._tokens


def micro_batches(rows: int, cut: Parallel) -> int:
    """Return how many micro-batches take so many sequences through a pipeline.

    1F1B wants as many as there are stages at least; interleaved, whole rounds of them.
    """
    count = max(-(-rows // cut.micro_batch), cut.pipeline)
    return count if cut.virtual_stages == 1 else -(-count // cut.pipeline) * cut.pipeline


def _sum(losses: Sequence[Tensor], device: torch.device) -> Tensor:
    if not losses:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([each.detach() for each in losses]).sum(dtype=torch.float64)
