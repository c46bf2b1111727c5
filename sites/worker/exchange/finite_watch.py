"""Notices gradients that are not finite, and names the first tensor: before and after averaging."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from isthmus.protos.errors import NonFiniteError
from isthmus.sites.codecs.kernels import loops

Named = Sequence[tuple[str, torch.Tensor]]
"""Gradients, or views of them, with their parameters' names."""
Tell = Callable[[str, str, bool], None]
"""Called with the tensor's name, what is to be said of it, and whether it is the average's."""


class FiniteWatch:
    """Tells once of gradients that are not finite, until a round was finite again.

    What one rank's gradient holds is in everybody's average. So a rank that found its own finite
    says of the average only that it is not: the coordinator waits for whoever knows more.
    """

    def __init__(self, tell: Tell, *, stops: bool) -> None:
        """`stops`: the run ends for it."""
        self._tell = tell
        self._stops = stops
        self._was_finite = True
        self._is_finite = True
        """Of the open round, as far as it has come."""

    def found(self, named: Named, *, is_own: bool, what: str = "gradient", since: str = "") -> None:
        """What this rank has to hand over is not finite. `is_own`: it is this rank's gradient.

        Else it is a shard of the site's. `what` says what it is, if no gradient, and `since` how it
        came to that.

        Raises:
            NonFiniteError: and the run is to stop for that.
        """
        name, value = _first(named)
        whose = f"the {what} of {name}" if is_own else f"its shard of the site's {what} of {name}"
        reason = f"{whose} held {value} before it was averaged{since}"
        self._found(name, reason, is_averaged=False)

    def end_round(self, *, unfit: Sequence[Named], what: str = "gradient") -> None:
        """A round of gradients is complete; `unfit` are those of its buckets that are not finite.

        Raises:
            NonFiniteError: they are not, and the run is to stop for that.
        """
        if unfit and self._is_finite:
            name, value = _first([each for named in unfit for each in named])
            reason = (
                f"the average over sites of the {what} of {name} held {value}, though each rank's "
                f"{what} was finite: it left what float32 or the codec can hold"
            )
            self._found(name, reason, is_averaged=True)
        self._was_finite, self._is_finite = self._is_finite, True

    def _found(self, name: str, reason: str, *, is_averaged: bool) -> None:
        is_first, self._is_finite = self._is_finite and self._was_finite, False
        if is_first:
            self._tell(name, reason, is_averaged)
        if self._stops:
            raise NonFiniteError(reason)


def are_finite(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return whether no element is a NaN or an infinity: bool[], on the host.

    One pass of reading. On CUDA nothing is waited for: it is true once the stream has come so far.
    Some of the pieces may lie on the host.
    """
    if all(each.dtype == torch.float32 and each.device.type == "cpu" for each in pieces):
        return _on_host(
            all(loops.first_not_finite(each.detach().reshape(-1).numpy()) < 0 for each in pieces)
        )
    ends = [torch.stack(torch.aminmax(each.detach())).float() for each in pieces if each.numel()]
    devices = [each.device for each in ends if each.is_cuda]
    ends = [each.to(devices[0], non_blocking=True) for each in ends] if devices else ends
    found = torch.isfinite(torch.stack(ends)).all() if ends else _on_host(True)
    if found.device.type == "cpu":
        return found
    told = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
    return told.copy_(found, non_blocking=True)


def _on_host(value: bool) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.bool, device="cpu")


def _first(named: Named) -> tuple[str, str]:
    """Return the first tensor that is not finite, and what it holds."""
    for name, each in named:
        if not bool(torch.isfinite(each.detach()).all()):
            return name, "a NaN" if bool(torch.isnan(each.detach()).any()) else "an infinity"
    return named[0][0] if named else "a parameter", "a NaN or an infinity"
