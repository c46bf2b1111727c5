"""One process that trains what a run has trained, by what its journal says of its epochs.

Each chunk is summed by the product's own machines, among those who were members when it was
finished. So parameters must be those of the run, bit for bit, also where sites were lost in the
midst of a round or came back. For the shipped trainer, sites of one or two ranks (of three, nobody
says in which order they are added), and a job whose intervals are steps; nothing may be lost while
a site enters.
"""

import json
import sqlite3
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from isthmus.protos.frame import pack, unpack
from isthmus.sites.codecs.codec import Floats
from isthmus.sites.codecs.registry import EXACT
from isthmus.sites.gateway.reduction.chunk_reduction import (
    Bucket,
    BucketReduction,
    Event,
    Own,
    Received,
    Send,
)
from isthmus.sites.gateway.reduction.epochs import in_force
from isthmus.sites.gateway.reduction.residuals import Residuals
from isthmus.sites.local.chunk_grid import grid
from isthmus.sites.trainer.corpus import Corpus, load_corpus
from isthmus.sites.trainer.gpt import Gpt
from isthmus.sites.trainer.learning import (
    apply_gradients,
    clip_gradients,
    learn_from,
    make_optimizer,
)
from isthmus.sites.trainer.reference import one_deterministic_thread
from isthmus.sites.worker.data.batch_shares import BatchShares, Gone
from isthmus.sites.worker.data.sampler import Sampler
from isthmus.sites.worker.exchange.collectives import ensure_process_group
from isthmus.sites.worker.exchange.exactness import Exactness
from isthmus.topology.spec.batch_rule import FullBatch
from isthmus.topology.spec.epoch import Epoch, Finished, numbers_of
from isthmus.topology.spec.json_fields import read_json
from isthmus.topology.spec.run_spec import RunSpec

FIRST_GRADIENTS = 5
"""The rounds before them compare the text of all sites, and their initial state, two each, for they
are the same; and in one more the sites agree how DDP's buckets are cut."""


def step_of(round_: int, entries: Sequence[int]) -> int:
    """Return the step of a round; sites agree in a round of its own that a site enters next.

    `entries` are the rounds with which sites entered, in order.
    """
    return round_ - FIRST_GRADIENTS - sum(each <= round_ for each in entries)


def round_of(step: int, entries: Sequence[int]) -> int:
    """Return the round of a step's gradients."""
    found = FIRST_GRADIENTS + step
    for each in entries:
        found += found >= each - 1
    return found


Chunk = tuple[int, int]
"""Number of a bucket, and of a chunk of it."""


@dataclass(frozen=True)
class Begun:
    """An epoch as the journal has it."""

    epoch: Epoch
    kept: frozenset[Chunk]
    """Chunks of its first round that were finished before, and stay as they were."""
    is_redo: bool

    @property
    def lets_in(self) -> bool:
        """Whether a site takes part again from then on, which has followed before."""
        return not self.is_redo and not self.epoch.follows


def journal_of(run: Path) -> list[Begun]:
    """Return the epochs of the run that a folder holds, in order, without the first."""
    with closing(sqlite3.connect(f"file:{run / 'journal.sqlite3'}?mode=ro", uri=True)) as journal:
        rows = journal.execute(
            "SELECT detail FROM events WHERE kind = 'epoch.begun' ORDER BY sequence"
        ).fetchall()
    found = []
    for (text,) in rows:
        detail = json.loads(text)
        kept = read_json(tuple[Finished, ...], detail["kept"])
        chunks = frozenset((each.bucket, one) for each in kept for one in numbers_of(each.runs))
        found.append(Begun(read_json(Epoch, detail["record"]), chunks, detail["is_redo"]))
    return found


class Carriers:
    """Tells by which epoch each chunk was finished."""

    def __init__(self, first: Epoch, begun: list[Begun]) -> None:
        self.epochs = [first, *(each.epoch for each in begun)]
        self._begun = begun

    def of(self, round_: int, chunk: Chunk) -> Epoch:
        """Return it; a later epoch does again what it has not kept."""
        found = self.epochs[0]
        for each in self._begun:
            if each.epoch.from_round <= round_:
                is_kept = each.epoch.from_round == round_ and chunk in each.kept
                found = found if is_kept else each.epoch
        return found


@dataclass(frozen=True)
class Crossing:
    """Gradients that cross together."""

    grads: list[torch.Tensor]
    """Flat; in the memory that the optimizer reads."""
    is_exact: bool

    def read(self) -> Floats:
        """Return a copy, one after another."""
        found: Floats = torch.cat(self.grads).numpy()
        return found

    def write(self, result: Floats) -> None:
        """Put the mean in their place."""
        start = 0
        for each in self.grads:
            each.copy_(torch.from_numpy(result[start : start + each.numel()]))
            start += each.numel()


class PresentShares(BatchShares):
    """As a batch is divided; ranks of sites that have gone get nothing of it."""

    def of_rank(self, site: int, rank: int, gone: Gone) -> range:
        return range(0) if site in gone else super().of_rank(site, rank, gone)


class Replica:
    """One rank: its own copy of the model, as DDP cuts it into buckets."""

    def __init__(self, spec: RunSpec, site: int, rank: int, corpus: Corpus) -> None:
        self.config = spec.job.trainer
        self.corpus = corpus
        self.site = site
        self.model = Gpt(self.config.model, self.config.seed)
        self.parallel = DistributedDataParallel(
            self.model,
            bucket_cap_mb=spec.job.exchange.bucket_bytes / (1 << 20),
            gradient_as_bucket_view=True,
        )
        self.parallel.register_comm_hook(None, self._keep)
        self.names: dict[torch.Tensor, str] = {
            each: name for name, each in self.model.named_parameters()
        }
        self.exactness = Exactness(spec.job.exchange)
        self.optimizer = make_optimizer(self.model, self.config.optimizer)
        ranks = tuple(each.num_ranks for each in spec.topology.sites)
        self.sampler = Sampler(
            num_samples=len(corpus.training) - self.config.model.context,
            shares=PresentShares(
                full=FullBatch(self.config.global_batch, sum(ranks)),
                rule=spec.job.on_fewer_sites,
                rate=spec.job.rate,
                ranks=ranks,
            ),
            site=site,
            rank=rank,
            seed=self.config.seed,
        )
        self.buckets: list[Crossing] = []
        """The buckets of the latest backward pass."""
        self.tokens = 0

    def _keep(self, _: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        names = [self.names[each] for each in bucket.parameters()]
        named = zip(names, bucket.gradients(), strict=True)
        for group, is_exact in self.exactness.split(named, exact=False):
            self.buckets.append(Crossing([grad.view(-1) for _, grad in group], is_exact))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def backward(self) -> None:
        """Have this rank's own gradients of the next step in `buckets`; those may be of none."""
        samples = self.sampler.draw()
        self.buckets = []
        self.tokens = len(samples) * self.config.model.context
        if not len(samples):  # its site has gone: gradients are only to have their memory
            samples = np.arange(1)
        self.optimizer.zero_grad()
        learn_from(self.parallel, self.corpus.training, self.config, samples)

    def step(self, step: int, results: list[Floats]) -> None:
        """Take the step with the mean of all sites."""
        for bucket, result in zip(self.buckets, results, strict=True):
            bucket.write(result)
        clip = partial(clip_gradients, [*self.model.parameters()])
        apply_gradients(clip, self.optimizer, self.config, step)
        self.sampler.step()


class Replay:
    """A run, step by step."""

    def __init__(self, run: Path) -> None:
        """Read what the folder of a run has of it."""
        self.spec = RunSpec.from_bytes((run / "run_spec.json").read_bytes())
        config = self.spec.job.trainer
        corpus = load_corpus(config.data, run, config.model.context)
        ensure_process_group(torch.device("cpu"), 60.0)
        assert dist.get_world_size() == 1
        self.names = self.spec.site_names
        self.ranks = tuple(each.num_ranks for each in self.spec.topology.sites)
        assert max(self.ranks) <= 2
        self.replicas = [
            Replica(self.spec, site, rank, corpus)
            for site, count in enumerate(self.ranks)
            for rank in range(count)
        ]
        first = Epoch(0, self.names, self.spec.reduction, 0)
        self._begun = journal_of(run)
        self._entries = [each.epoch.from_round for each in self._begun if each.lets_in]
        self.carriers = Carriers(first, self._begun)
        self._decay = self.spec.job.exchange.error_feedback_decay
        self._residuals = {site: Residuals(self._decay) for site in range(len(self.names))}

    def steps(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Take all steps; yield how many there were, and the parameters."""
        for step in range(self.spec.job.trainer.steps):
            self._change_members(step)
            with one_deterministic_thread():
                for each in self.replicas:
                    each.backward()
                results = self._reduce(round_of(step, self._entries))
                for each in self.replicas:
                    each.step(step, results)
            yield step + 1, dict(self.replicas[0].model.state_dict())

    def _reduce(self, round_: int) -> list[Floats]:
        """Return the means of all buckets."""
        return [self._bucket(round_, bucket) for bucket in range(len(self.replicas[0].buckets))]

    def _change_members(self, step: int) -> None:
        """Tell samplers who has gone or enters, and forget the residuals of lost encoders."""
        before = set(self.names)
        for each in self._begun:
            members = set(each.epoch.members) - set(each.epoch.follows)
            at = max(0, step_of(each.epoch.from_round, self._entries))
            lost, entered = before - members, members - before
            before = members
            for name in (*lost, *entered):
                site = self.names.index(name)
                if name in lost and at + 1 == step:
                    for replica in self.replicas:
                        replica.sampler.lose({site: at})
                # Its round begins while the others are told: so they are long before.
                if name in entered and at - 1 == step:
                    for replica in self.replicas:
                        replica.sampler.regain(site, at)
                if name in entered and at == step:
                    self._residuals[site] = Residuals(self._decay)

    def _bucket(self, round_: int, index: int) -> Floats:
        """Return the mean of a bucket."""
        parts: dict[int, Floats] = {}
        weights: defaultdict[int, float] = defaultdict(float)
        for each in self.replicas:
            scaled = each.buckets[index].read() * np.float32(each.tokens)
            if each.site in parts:
                parts[each.site] += scaled
            else:
                parts[each.site] = scaled
            weights[each.site] += each.tokens
        (numel,) = {len(each) for each in parts.values()}
        (is_exact,) = {each.buckets[index].is_exact for each in self.replicas}
        cut = grid(numel, self.spec.chunk_bytes // 4, self.ranks)
        result = np.empty(numel, dtype=np.float32)
        reductions: dict[int, dict[int, BucketReduction]] = {}
        for chunk in range(cut.num_chunks):
            epoch = self.carriers.of(round_, (index, chunk))
            if epoch.number not in reductions:
                reductions[epoch.number] = self._reductions(
                    epoch, round_, index, numel, is_exact=is_exact
                )
            first, count = cut.span(chunk)
            place = slice(first, first + count)
            members = reductions[epoch.number]
            own = {site: Own(parts[site][place].copy(), weights[site]) for site in members}
            result[place] = reduced(members, chunk, own)
        return result

    def _reductions(
        self, epoch: Epoch, round_: int, index: int, numel: int, *, is_exact: bool
    ) -> dict[int, BucketReduction]:
        """Return each member's machines of a bucket."""
        reduction = epoch.reduction
        cut = grid(numel, self.spec.chunk_bytes // 4, self.ranks)
        found = {}
        for site in map(self.names.index, epoch.members):
            ruling = in_force(
                reduction.plan,
                reduction.codecs,
                site,
                epoch=epoch.number,
                from_round=epoch.from_round,
            ).of_bucket(numel)
            codecs = (EXACT,) * len(ruling.codecs) if is_exact else ruling.codecs
            found[site] = BucketReduction(
                Bucket(epoch.number, round_, index, 0, codecs, cut, time.thread_time),
                ruling.plan,
                ruling.roles,
                None if is_exact else self._residuals[site].bucket(index, 0, numel),
            )
        return found


def reduced(members: dict[int, BucketReduction], chunk: int, own: dict[int, Own]) -> Floats:
    """Reduce one chunk between some sites; return its mean, which all of them have."""
    events: deque[tuple[int, Event]] = deque(own.items())
    while events:
        site, event = events.popleft()
        for action in members[site].chunk(chunk).handle(event):
            if isinstance(action, Send):
                frame = unpack(pack(action.frame))  # it may be a view of what changes afterwards
                events.append((action.site, Received(site, frame)))
    found = [each.values for each in own.values()]
    assert all(each.tobytes() == found[0].tobytes() for each in found)
    return found[0]
