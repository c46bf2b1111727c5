"""A model's tensors in the one order that all sites agree on, and how they make buckets.

Each site knows its own tensors, and which of its ranks hold what of them. The first site's list is
law: its order, and what crosses exactly. All sites then cut the same buckets: whole tensors one
after another, each counted row by row, whatever any site's shards are. Tensors that all sites'
ranks hold alike are in buckets of their own, in rank-major order: first all that one rank holds,
and so on, so that nothing has to move inside a site.

The order is that in which gradients are expected. It is decided beforehand: where gradients come in
another one, they wait for their turn.

Pure, but for `gather`.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from typing import Self

import torch.distributed as dist
import xxhash

from isthmus.protos.errors import LayoutMismatchError
from isthmus.sites.worker.exchange.holdings import Holding, problem_of
from isthmus.sites.worker.exchange.rounds import SharedBy
from isthmus.sites.worker.exchange.routes import (
    Holders,
    Part,
    Route,
    participants,
    rank_major_route,
    route,
)
from isthmus.sites.worker.exchange.tensor_average import Packer
from isthmus.sites.worker.exchange.tensor_hashes import layout_of_labels

PLANES = 8
"""Pairs of bytes of an element, at most."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the model."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    item_bytes: int
    kind: str
    """trained, frozen or buffer."""
    exact: bool
    """Its gradient crosses as float32 whatever the codec."""

    @property
    def numel(self) -> int:
        """How many elements the tensor has."""
        numel = 1
        for each in self.shape:
            numel *= each
        return numel

    @property
    def label(self) -> str:
        """What sites have to agree on."""
        return f"{self.name} {self.shape} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank tells the others of its site about one of its tensors."""

    entry: Entry
    holding: Holding
    mesh: tuple[int, ...]
    """The ranks that share it out; empty: no DTensor."""
    content: int
    """Hash of what the rank holds of it."""
    is_lone: bool = False
    """Nothing makes the mean of its gradient over the site's ranks."""


@dataclass(frozen=True, slots=True)
class SiteTensors:
    """All tensors of one site's ranks, and who holds them."""

    entries: tuple[Entry, ...]
    holders: Mapping[str, Holders]
    """Who holds a tensor, by its name."""

    @classmethod
    def gather(cls, own: Sequence[Held]) -> Self:
        """Tell the site's ranks what this one holds, and hear of all. A collective of the site.

        Raises:
            TypeError: ranks do not hold each element once, or all of them the same, or one of them
                has no parameter that is trained.
        """
        found: list[list[Held]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, [*own])
        return cls.of(found)

    @classmethod
    def of(cls, ranks: Sequence[Sequence[Held]]) -> Self:
        """Return what the ranks of a site hold, in the order of the first rank that has each.

        The last stage of a pipeline is the first to have its gradients. What a first stage shares
        with another comes last.

        Raises:
            TypeError: as `gather`.
        """
        _check_all_train(ranks)
        _check_one_replica(ranks)
        parts = [
            frozenset(each.entry.name for each in held if each.entry.kind == "trained")
            for held in ranks
        ]
        by_name: dict[str, list[tuple[int, Held]]] = {}
        for rank in reversed(range(len(ranks))):
            for each in ranks[rank]:
                by_name[each.entry.name] = [(rank, each), *by_name.pop(each.entry.name, [])]
        holders = {name: _holders_of(name, held, parts) for name, held in by_name.items()}
        return cls(tuple(held[0][1].entry for held in by_name.values()), holders)

    @property
    def is_split(self) -> bool:
        """Whether some ranks have other tensors than others: a pipeline's stages."""
        return len({each.ranks for each in self.holders.values()}) > 1

    def ranks_of(self) -> dict[str, tuple[int, ...]]:
        """Return who has any of a tensor, by its name."""
        return {name: each.ranks for name, each in self.holders.items()}

    def to_bytes(self) -> bytes:
        """Return what the other sites have to know of it."""
        ranks = [self.holders[each.name].ranks for each in self.entries]
        groups = list(dict.fromkeys(ranks))
        value = {
            "entries": [asdict(each) for each in self.entries],
            "groups": groups,
            "held_by": [groups.index(each) for each in ranks],
            "shards": [_hash_of_shards(self.holders[each.name]) for each in self.entries],
        }
        return zlib.compress(json.dumps(value).encode())


@dataclass(frozen=True, slots=True)
class SiteList:
    """What one site told all others: its tensors, and which of its ranks have any of each."""

    entries: tuple[Entry, ...]
    ranks: tuple[tuple[int, ...], ...]
    shards: Mapping[str, int]
    """Hash of which rank holds which elements of a tensor, by name, of those that may be in
    rank-major order."""

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read what `SiteTensors.to_bytes` made."""
        value = json.loads(zlib.decompress(data))
        groups = [tuple(each) for each in value["groups"]]
        entries = [Entry(**{**each, "shape": tuple(each["shape"])}) for each in value["entries"]]
        hashes = zip(entries, value["shards"], strict=True)
        return cls(
            tuple(entries),
            tuple(groups[each] for each in value["held_by"]),
            {entry.name: shards for entry, shards in hashes if shards is not None},
        )

    def ranks_of(self) -> dict[str, tuple[int, ...]]:
        """Return who has any of a tensor, by its name."""
        pairs = zip(self.entries, self.ranks, strict=True)
        return {entry.name: ranks for entry, ranks in pairs}


@dataclass(frozen=True, slots=True)
class GradientPlan:
    """How gradients cross, as one rank takes part in it."""

    cuts: tuple[tuple[BucketCut, SharedBy], ...]
    """All buckets, and who shares each, in the order of crossing."""
    flags: BucketCut
    """The last bucket: which gradients any rank has."""
    flags_sharing: SharedBy
    identity: int
    """Tells apart how all are cut into buckets, and which ranks share each."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all sites have agreed on, and who has what."""

    law: tuple[Entry, ...]
    """All tensors, in the order of crossing."""
    here: SiteTensors
    sites: tuple[Mapping[str, tuple[int, ...]], ...]
    """Who has any of a tensor, by site; nothing of a site that has not told."""
    ranks_per_site: tuple[int, ...]

    ranks_per_gateway: int
    """How many of this site's ranks a gateway serves."""
    rank_major: Mapping[str, int] = field(default_factory=dict)
    """Hash of who holds what, by name, of the tensors that cross in rank-major order."""

    def cut_gradients(self, bucket_numel: int) -> list[BucketCut]:
        """Cut all gradients into buckets, in the order of crossing."""
        holders = self.here.holders
        return cut_gradients(
            self.law, bucket_numel, {name: holders[name] for name in self.rank_major}
        )

    def gradient_plan(self, bucket_numel: int, rank: int) -> GradientPlan:
        """Return how gradients cross, in buckets of so many elements at the most."""
        cuts = self.cut_gradients(bucket_numel)
        flags = cut_flags(self.law, len(cuts))
        *shared_by, flags_sharing = self.shared_by([*cuts, flags], rank)
        pairs = tuple(zip(cuts, shared_by, strict=True))
        return GradientPlan(pairs, flags, flags_sharing, self.identity(cuts))

    def identity(self, cuts: Sequence[BucketCut]) -> int:
        """Return what tells apart how all are cut into buckets, and which ranks share each.

        In rank-major order, also who holds what: by that elements have their places.
        """
        return layout_of_labels(
            f"{each.layout} {self.participants(each)} {[*map(self.rank_major.get, each.names)]}"
            for each in cuts
        )

    def shared_by(
        self, cuts: Sequence[BucketCut], rank: int, *, in_planes: bool = False
    ) -> list[SharedBy]:
        """Return who shares each of a round's buckets, as one of their ranks tells its gateway.

        `in_planes`: each crosses as several, which have PLANES numbers.
        """
        served = range(
            rank // self.ranks_per_gateway * self.ranks_per_gateway,
            (rank // self.ranks_per_gateway + 1) * self.ranks_per_gateway,
        )
        found, before = [], 0
        for cut in cuts:
            found.append(SharedBy(self.participants(cut), before))
            ranks = participants(cut.parts(self.here))
            if rank in ranks:
                before = 0
            elif any(each in served for each in ranks):
                last = PLANES * cut.number + cut.num_planes - 1
                before = (last if in_planes else cut.number) + 1
        return found

    def participants(self, cut: BucketCut) -> tuple[tuple[int, ...], ...]:
        """Return who shares a bucket, by site; (): all, of a site or everywhere."""
        found = []
        for ranks_of, num_ranks in zip(self.sites, self.ranks_per_site, strict=True):
            ranks = sorted({rank for name in cut.names for rank in ranks_of.get(name, ())})
            found.append(() if len(ranks) == num_ranks else tuple(ranks))
        return tuple(found) if any(found) else ()


@dataclass(frozen=True, slots=True)
class Slice:
    """The elements [start, stop) of a tensor of the list; in rank-major order, of each shard."""

    entry: Entry
    start: int
    stop: int

    def numel(self) -> int:
        """How many elements they are."""
        return self.stop - self.start

    def __getitem__(self, part: slice, /) -> Slice:
        """Return some of these elements, by their places among them."""
        return Slice(self.entry, self.start + part.start, self.start + part.stop)


@dataclass(frozen=True, slots=True)
class BucketCut:
    """One bucket: slices, one after another."""

    number: int
    slices: tuple[Slice, ...]
    exact: bool
    is_rank_major: bool = False
    is_gradient: bool = False

    @property
    def layout(self) -> int:
        """What has to be equal at all sites."""
        of = "shards from" if self.is_rank_major else "from"
        return layout_of_labels(f"{each.entry.label} {of} {each.start}" for each in self.slices)

    @property
    def num_planes(self) -> int:
        """How many buckets of numbers its bytes cross as, a pair of bytes a number."""
        return max(1, self.slices[0].entry.item_bytes // 2)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors whose elements it has."""
        return tuple(each.entry.name for each in self.slices)

    def parts(self, tensors: SiteTensors) -> tuple[Part, ...]:
        """Return its parts as a site holds them."""
        return tuple(
            Part(tensors.holders[each.entry.name], each.start, each.stop) for each in self.slices
        )

    def route(self, tensors: SiteTensors, rank: int) -> Route:
        """Return the route of one of the ranks that share it."""
        parts = self.parts(tensors)
        if self.is_rank_major:
            return rank_major_route(parts, rank)
        return route(parts, rank, is_gradient=self.is_gradient)


def cut_gradients(
    law: Sequence[Entry], bucket_numel: int, rank_major: Mapping[str, Holders]
) -> list[BucketCut]:
    """Cut all gradients into buckets, in the order of crossing.

    Those that cross exactly are apart, and so are those in rank-major order, of each group of ranks
    that share them: who holds these is in `rank_major`.
    """
    packers: dict[tuple[bool, tuple[int, ...]], Packer[Slice]] = {}
    cut: list[BucketCut] = []

    def add(slices: list[Slice], *, exact: bool, ranks: tuple[int, ...]) -> None:
        cut.append(BucketCut(len(cut), tuple(slices), exact, bool(ranks), is_gradient=True))

    for each in law:
        if each.kind != "trained":
            continue
        holders = rank_major.get(each.name)
        ranks = () if holders is None else holders.ranks
        numel = each.numel if holders is None else holders.shard_numel
        shard_numel = max(1, bucket_numel // max(1, len(ranks)))
        packer = packers.setdefault((each.exact, ranks), Packer(shard_numel))
        for full in packer.add(Slice(each, 0, numel)):
            add(full, exact=each.exact, ranks=ranks)
    for (exact, ranks), packer in packers.items():
        if rest := packer.take():
            add(rest, exact=exact, ranks=ranks)
    return cut


def cut_flags(law: Sequence[Entry], number: int) -> BucketCut:
    """Return the bucket that has a flag for each gradient, in place of its first element."""
    trained = (each for each in law if each.kind == "trained")
    return BucketCut(number, tuple(Slice(each, 0, 1) for each in trained), exact=True)


def cut_state(law: Sequence[Entry], bucket_numel: int) -> list[BucketCut]:
    """Cut all tensors into buckets, those with elements of one size together."""
    cut: list[list[Slice]] = []
    for _, entries in itertools.groupby(
        sorted(law, key=lambda each: each.item_bytes), key=lambda each: each.item_bytes
    ):
        packer: Packer[Slice] = Packer(bucket_numel)
        for each in entries:
            cut += packer.add(Slice(each, 0, each.numel))
        if rest := packer.take():
            cut.append(rest)
    return [BucketCut(number, tuple(each), exact=True) for number, each in enumerate(cut)]


def check_alike(site: str, entries: Iterable[Entry], law_site: str, law: Iterable[Entry]) -> None:
    """Compare a site's tensors with the list that is law.

    Raises:
        LayoutMismatchError: they differ; names the first tensor that does.
    """
    here = {each.name: each for each in entries}
    there = {each.name: each for each in law}
    for name in [*there, *here]:
        if name not in here or name not in there:
            has, lacks = (site, law_site) if name in here else (law_site, site)
            raise LayoutMismatchError(
                f"site {has} has a tensor {name}, site {lacks} has not: the model, and the names "
                "of a pipeline's parts, must be those of the whole model at every site"
            )
        ours, theirs = here[name], there[name]
        for what in ("shape", "dtype", "kind"):
            if getattr(ours, what) != getattr(theirs, what):
                raise LayoutMismatchError(
                    f"{what} of {name} is {getattr(ours, what)} at site {site}, and "
                    f"{getattr(theirs, what)} at site {law_site}"
                )


def rank_major_names(
    site: str, tensors: SiteTensors, lists: Sequence[SiteList | None]
) -> dict[str, int]:
    """Find the tensors that the ranks of all sites hold alike, so that they cross as they lie.

    Args:
        site: whose `tensors` these are.
        tensors: what its ranks hold now.
        lists: what each site has told; None: one that was lost before. It may hold them in any way,
            so then there are none.

    Returns:
        Hash of who holds what, by name.

    Raises:
        LayoutMismatchError: the site comes back, and holds one in another way than it told.
    """
    first, *others = lists
    if first is None or None in others:
        return {}
    alike = {
        name: shards
        for name, shards in first.shards.items()
        if all(each is not None and each.shards.get(name) == shards for each in others)
    }
    for name, shards in alike.items():
        if _hash_of_shards(tensors.holders[name]) != shards:
            raise LayoutMismatchError(
                f"site {site} comes back with {name} divided among its ranks in another way than "
                "at all sites when the run began: come back with the layout that it began with"
            )
    return alike


def _hash_of_shards(holders: Holders) -> int | None:
    """Return what tells apart who holds what of a tensor; None: it has no rank-major order."""
    if not holders.is_rank_major:
        return None
    held = [(ranks, holding.held) for holding, ranks in holders.groups]
    return xxhash.xxh3_64_intdigest(repr(sorted(held)).encode())


def _check_all_train(ranks: Sequence[Sequence[Held]]) -> None:
    """Refuse a rank that would never begin a round, for which the others would wait.

    Raises:
        TypeError: there is one; names it.
    """
    trains = [any(each.entry.kind == "trained" for each in held) for held in ranks]
    if any(trains) and not all(trains):
        raise TypeError(
            f"site.attach: rank {trains.index(False)} has no parameter that is trained, and "
            "others have: give each stage of a pipeline one at least"
        )


def _check_one_replica(ranks: Sequence[Sequence[Held]]) -> None:
    """Refuse ranks that have the same part of the model, and whose gradients nobody averages.

    What DTensor spreads over ranks is one replica of theirs.

    Raises:
        TypeError: there are such ranks; names two of them.
    """
    first_with: dict[Set[str], int] = {}
    meshes: dict[int, Set[int]] = {}
    for rank, held in enumerate(ranks):
        if not any(each.is_lone for each in held):
            continue
        part = frozenset(each.entry.name for each in held if each.entry.kind == "trained")
        meshes[rank] = {rank}.union(*(each.mesh for each in held if each.entry.kind == "trained"))
        first = first_with.setdefault(part, rank)
        if rank not in meshes[first]:
            raise TypeError(
                f"site.attach: ranks {first} and {rank} both have the parameters that they train, "
                f"as {min(part)}, and nothing averages their gradients: let "
                "DistributedDataParallel or fully_shard wrap the model, over the ranks that have "
                "data of their own"
            )


def _holders_of(name: str, held: Sequence[tuple[int, Held]], parts: Sequence[Set[str]]) -> Holders:
    """Group the ranks that hold a tensor by what they hold of it, and by parts that share it.

    `parts` are the names of all parameters that a rank trains, by rank.

    Raises:
        TypeError: not each element is held once, or all ranks by what is the same.
    """
    first_rank, first = held[0]
    for rank, each in held:
        if (each.entry.shape, each.entry.dtype) != (first.entry.shape, first.entry.dtype):
            raise TypeError(
                f"site.attach: {name} is {first.entry.shape} of {first.entry.dtype} on rank "
                f"{first_rank}, and {each.entry.shape} of {each.entry.dtype} on rank {rank}: a "
                "pipeline's parts need the names that they have in the whole model"
            )
        if each.entry.kind != first.entry.kind:
            raise TypeError(
                f"site.attach: {name} is {first.entry.kind} on rank {first_rank}, and "
                f"{each.entry.kind} on rank {rank}: freeze it on all ranks or on none"
            )
    givers: dict[Holding, tuple[int, Held]] = {}
    for rank, each in held:
        giver, given = givers.setdefault(each.holding, (rank, each))
        if each.mesh and each.mesh != given.mesh and each.content != given.content:
            raise TypeError(
                f"site.attach: ranks {giver} and {rank} hold the same part of {name}, and "
                "not the same values: start from one seed, and give a pipeline's parts the "
                "names that they have in the whole model"
            )
    is_trained = first.entry.kind == "trained"
    by_part: dict[Set[str], dict[Holding, list[int]]] = {}
    for rank, each in held:
        part = parts[rank] if is_trained else frozenset[str]()
        other = next((one for one in each.mesh if is_trained and parts[one] != part), rank)
        if other != rank:
            raise TypeError(
                f"site.attach: ranks {rank} and {other} have unlike parts of the model, and "
                f"fully_shard reduces {name} over both: parts of a pipeline have meshes of their "
                "own, and parameters of which ranks have unlike ones (experts) are DTensors"
            )
        by_part.setdefault(part, {}).setdefault(each.holding, []).append(rank)
    for groups in by_part.values():
        problem = problem_of(groups)
        if problem is not None:
            raise TypeError(f"site.attach: parameter {name}: {problem}")
    every = (group for groups in by_part.values() for group in groups.items())
    return Holders(tuple((each, tuple(ranks)) for each, ranks in every), len(by_part) > 1)
