"""Compares what ranks compute: after some steps all compute gradients of one micro-batch.

Each time another rank's: it keeps what its model was called with first in the step, and sends that
to all others. What they compute is added to nothing. Where hashes of all gradients are equal, that
was all. Else each rank computes once more, and tells enough for all to judge alike
(gradient_verdict.py). Who is wrong ends by a named error, before it averages anything further.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from isthmus.protos.errors import GradientsDifferError
from isthmus.sites.worker.checks.gradient_verdict import (
    SKETCH_NUMEL,
    Computed,
    Spread,
    Verdict,
    judge,
    whose_turn,
)
from isthmus.sites.worker.checks.module_hooks import UntracedModuleHook
from isthmus.sites.worker.checks.replay import (
    SAMPLE_BYTES,
    NotReplayedError,
    Replay,
    Take,
    packed_sample,
)
from isthmus.sites.worker.exchange.agreement import tell_all, tell_hashes
from isthmus.sites.worker.exchange.bucket_pipeline import BucketPipeline
from isthmus.sites.worker.exchange.tensor_average import first_bucket_of_list
from isthmus.sites.worker.exchange.tensor_hashes import hash_of, layout_of_labels

_FIRST_BUCKET = first_bucket_of_list(layout_of_labels(["what all ranks compute alike"]))
_MAX_NOTES = 4
_PART_NUMEL = 1 << 22
"""Elements of which a sketch is made at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """All ranks that compare what they compute; each has a place among them."""

    sites: Sequence[str]
    ranks_per_site: Sequence[int]
    own: int
    """This rank's place."""

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return sum(self.ranks_per_site)

    def name(self, place: int) -> str:
        """Return a rank's name, for people."""
        for site, ranks in zip(self.sites, self.ranks_per_site, strict=True):
            if place < ranks:
                return f"rank {place} of site {site}"
            place -= ranks
        raise IndexError(place)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnArithmetic:
    """What a rank tells of how it computes: as `Computed` has it."""

    kind: str
    place: str
    repeats: bool


class GradientCheck:
    """One rank's part in comparing gradients. For the training thread."""

    def __init__(
        self,
        pipeline: BucketPipeline,
        models: Sequence[nn.Module],
        names: Mapping[torch.Tensor, str],
        device: torch.device,
        *,
        seats: Seats,
        own: OwnArithmetic,
        every: int,
        num_steps: Callable[[], int],
        gone: Callable[[], Collection[int]],
        global_parameters: Callable[[], AbstractContextManager[None]],
        note: Callable[[str], None],
        record: Callable[[int, int, float], None],
    ) -> None:
        """Watch the first forward pass of each step from now on.

        Args:
            pipeline: over which ranks tell each other.
            models: that are attached; none where this rank can compute nothing for others.
            names: of their parameters.
            device: on which this rank computes.
            seats: of all ranks.
            own: how this rank computes.
            every: steps from one comparison to the next.
            num_steps: returns how many have been taken.
            gone: returns the sites that take no part.
            global_parameters: returns a context in which all ranks have the same parameters.
            note: tells people once why gradients are not compared.
            record: is given a step, the number of ranks that were compared, and the seconds.
        """
        self._pipeline, self._device, self._seats, self._own = pipeline, device, seats, own
        self._every, self._num_steps, self._gone = every, num_steps, gone
        self._global_parameters, self._note, self._record = global_parameters, note, record
        self._models = models
        self._replay = Replay([*map(_inside, models)], names, device) if models else None
        num_tensors = 0 if self._replay is None else len(self._replay.names)
        self._spread = Spread(np.zeros(num_tensors, dtype=np.float32))
        self._sample = b""
        """The sample of this step, if it is this rank's turn; empty: there is none."""
        self._has_looked = False
        """In this step."""
        self._noted: set[str] = set()
        hook = UntracedModuleHook(self._before_forward)
        self.undo = [
            each.register_forward_pre_hook(hook, with_kwargs=True).remove for each in models
        ]

    # ---------------------------------------------------------------- a step

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:  # noqa: ANN401 - what a model is called with
        """Keep what a model is called with, where it is this rank's turn."""
        step = self._num_steps() + 1
        if self._has_looked or step % self._every or not torch.is_grad_enabled():
            return
        self._has_looked = True
        turn = whose_turn(step // self._every, self._seats.ranks_per_site, self._gone())
        if turn != self._seats.own:
            return
        number = next(at for at, each in enumerate(self._models) if each is model)
        try:
            self._sample = packed_sample(number, _inside(model), args, kwargs)
        except NotReplayedError as error:
            self._tell_why_not(error)

    def after_step(self, step: int) -> None:
        """Compare, if it is time to: a collective of all ranks of all sites.

        Raises:
            GradientsDifferError: this rank's gradients are wrong.
            IsthmusError: the exchange failed.
        """
        own, self._sample, self._has_looked = self._sample, b"", False
        if step % self._every:
            return
        begun_s = time.perf_counter()
        sample = next((each for each in self._tell_all(own) if each), b"")
        if not sample:
            return
        with self._global_parameters():
            num_ranks = self._compare(sample, step)
        if num_ranks > 1:
            self._record(step, num_ranks, time.perf_counter() - begun_s)

    def _compare(self, sample: bytes, step: int) -> int:
        """Compute, and compare hashes; return how many ranks have computed."""
        own = self._hashes(sample, step)
        packed = b"".join(each.to_bytes(8, "little") for each in own)
        number = (xxhash.xxh3_64_intdigest(packed) or 1) if own else 0
        told = tell_hashes(self._pipeline, number, **self._where)
        known = [each for each in told if each]
        if len({*known}) > 1:
            self._judge(sample, step, own)
        return len(known)

    def _judge(self, sample: bytes, step: int, first: Sequence[int]) -> None:
        """Compute once more, and decide with all others who is wrong."""
        told = self._tell_all(self._computed_again(sample, step, first))
        ranks = {at: Computed.from_bytes(each) for at, each in enumerate(told) if each}
        if len(ranks) < 2 or len({each.spread.largest.size for each in ranks.values()}) > 1:
            return  # the others could not compute once more, or have other parameters
        verdict = judge(ranks)
        if verdict.spread is not None:
            self._spread = verdict.spread
            return
        self._blame(sample, step, ranks, verdict)

    def _blame(
        self, sample: bytes, step: int, ranks: Mapping[int, Computed], verdict: Verdict
    ) -> None:
        """End this rank by name, if it is wrong. First those that are not tell a gradient."""
        wrong, own = verdict.wrong, self._seats.own
        first = min(wrong)
        tensor = wrong[first]
        right = [at for at in ranks if at not in wrong]
        alike = [at for at in right if ranks[at].kind == ranks[first].kind]
        witnesses = [*wrong] if verdict.is_tied else (alike or right)[:1]
        values = self._gradient(sample, step, tensor) if own in {*witnesses, *wrong} else None
        is_witness = own in witnesses and values is not None and values.nbytes <= SAMPLE_BYTES
        told = self._tell_all(values.tobytes() if is_witness and values is not None else b"")
        if own not in wrong:
            return
        theirs = next((told[at] for at in witnesses if at != own and told[at]), b"")
        by = ""
        if theirs and values is not None:
            difference = np.abs(values - np.frombuffer(theirs, dtype=np.float32)).max(initial=0.0)
            by = f" by up to {difference:.3g}"
        assert self._replay is not None, "it has computed"
        name = self._replay.names[tensor]
        how = "each time" if ranks[own].is_steady else "one time of two"
        at = f"{self._seats.name(own)} ({ranks[own].place})"
        if verdict.is_tied:
            others = " and ".join(
                f"{self._seats.name(each)} ({ranks[each].place})" for each in wrong if each != own
            )
            raise GradientsDifferError(
                f"after step {step}, {at} and {others} computed unlike gradients of one "
                f"micro-batch: {name} differs{by}, {how}, and no third rank tells which is right"
            )
        raise GradientsDifferError(
            f"after step {step}, {at} computed wrong gradients of one micro-batch: {name} "
            f"differed{by}, {how}, from what {len(right)} other rank{'s' * (len(right) > 1)} computed"
        )

    # ---------------------------------------------------------------- what is computed

    def _hashes(self, sample: bytes, step: int) -> list[int]:
        """Return a hash of each parameter's gradient; nothing where they cannot be computed."""
        hashes = [0] * len(self._spread.largest)

        def take(at: int, grad: torch.Tensor) -> None:
            hashes[at] = hash_of(grad)

        return hashes if self._compute(sample, step, take) else []

    def _computed_again(self, sample: bytes, step: int, first: Sequence[int]) -> bytes:
        hashes = [0] * len(first)
        sketch = np.zeros((len(first), SKETCH_NUMEL), dtype=np.float32)

        def take(at: int, grad: torch.Tensor) -> None:
            hashes[at], sketch[at] = hash_of(grad), sketch_of(grad)

        if not (first and self._compute(sample, step, take)):
            return b""
        own = self._own
        return Computed(
            kind=own.kind,
            place=own.place,
            repeats=own.repeats,
            hashes=(tuple(first), tuple(hashes)),
            sketch=sketch,
            spread=self._spread,
        ).to_bytes()

    def _gradient(self, sample: bytes, step: int, tensor: int) -> np.ndarray[Any, Any] | None:
        """Return one gradient, as float32; None: it cannot be computed."""
        found = []

        def take(at: int, grad: torch.Tensor) -> None:
            if at == tensor:
                found.append(_flat(grad).float().cpu().numpy())

        self._compute(sample, step, take)
        return found[0] if found else None

    def _compute(self, sample: bytes, step: int, take: Take) -> bool:
        if self._replay is None:
            return False
        try:
            self._replay.compute(sample, step, take)
        except NotReplayedError as error:
            self._tell_why_not(error)
            return False
        return True

    def _tell_why_not(self, error: NotReplayedError) -> None:
        if str(error) not in self._noted and len(self._noted) < _MAX_NOTES:
            self._noted.add(str(error))
            self._note(f"{self._seats.name(self._seats.own)} compares no gradients: {error}")

    # ---------------------------------------------------------------- what ranks tell

    @property
    def _where(self) -> dict[str, Any]:
        """Have each rank speak for itself."""
        seats = self._seats
        return {
            "site": seats.own,
            "num_sites": seats.count,
            "rank": 0,
            "device": self._device,
            "first_bucket": _FIRST_BUCKET,
        }

    def _tell_all(self, data: bytes) -> list[bytes]:
        """Return what each rank tells, by its place."""
        return tell_all(self._pipeline, data, **self._where)


def _inside(model: nn.Module) -> nn.Module:
    module: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return module


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in row-major order; of complex ones, pairs."""
    flat = tensor.detach().reshape(-1)
    return torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat


def sketch_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return sums of a tensor's elements, with signs that are drawn alike everywhere.

    float64[SKETCH_NUMEL], of one pass of reading.
    """
    flat = _flat(tensor)
    sums = torch.zeros(SKETCH_NUMEL, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _PART_NUMEL):
        part = flat[start : start + _PART_NUMEL].double()
        index = torch.arange(start, start + part.numel(), dtype=torch.int64, device=flat.device)
        mixed = (index ^ (index >> 15)) * 0x2C1B3C6D
        mixed = (mixed ^ (mixed >> 12)) * 0x297A2D39
        signs = ((mixed >> 17) & 1).double() * 2 - 1
        sums.index_add_(0, (mixed >> 21) % SKETCH_NUMEL, part * signs)
    found: np.ndarray[Any, Any] = sums.cpu().numpy()
    return found
