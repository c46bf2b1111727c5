"""Gives all sites the first site's values of a model whose ranks hold shards, and hashes them.

Values cross as gradients do, by the same routes: of each tensor whoever holds an element sends it,
and every holder gets it. Bytes travel as numbers, as in initial_state.py: of an element of 2 k
bytes each pair is in a bucket of its own. Only the first rank's weight counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from isthmus.sites.worker.exchange.bucket_pipeline import BucketPipeline
from isthmus.sites.worker.exchange.collectives import Ranks
from isthmus.sites.worker.exchange.exactness import Exactness
from isthmus.sites.worker.exchange.routes import Route, participants
from isthmus.sites.worker.exchange.sharding import holding_of, is_sharded, local_of
from isthmus.sites.worker.exchange.tensor_hashes import ParameterHashes, hash_of, layout_of_labels
from isthmus.sites.worker.layouts.canonical import PLANES, Agreed, BucketCut, Entry, Held, cut_state
from isthmus.sites.worker.layouts.initial_state import BLOCK_NUMEL, BLOCKS_IN_FLIGHT, InitialState


class ShardedState:
    """The tensors of one rank, among those of its site."""

    def __init__(
        self,
        agreed: Agreed,
        own: Mapping[str, torch.Tensor],
        twins: Sequence[tuple[str, torch.Tensor]] = (),
    ) -> None:
        """`own` are the tensors that this rank holds any of, by name; `twins` copies of some."""
        self._twins = twins
        self._agreed = agreed
        self._law = agreed.law
        self._own = own
        self._cuts = cut_state(agreed.law, BLOCK_NUMEL)
        self.groups = {participants(each.parts(agreed.here)) for each in self._cuts}
        """The ranks that share a bucket, of all buckets."""

    def hashes(self, tensors: Mapping[str, torch.Tensor]) -> ParameterHashes:
        """Hash tensors, all of each, those agreed on in their order. A collective of the site.

        What this rank holds is hashed as it is here; for what it has nothing of, such as another
        pipeline stage's, it says what the first rank says that has it.
        """
        agreed = [each.name for each in self._law]
        own = {name: hash_of(tensors[name]) for name in agreed if name in tensors}
        own |= {name: hash_of(each) for name, each in tensors.items() if name not in own}
        if self._agreed.here.is_split:
            told: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(told, own)
            for each in told:
                own = each | own
        known = [name for name in agreed if name in own]
        names = (*known, *(name for name in own if name not in set(known)))
        return ParameterHashes(names, tuple(own[each] for each in names))

    def digest(self, now: Mapping[str, torch.Tensor]) -> ParameterHashes | None:
        """Return hashes of all parameters for the sites to compare; None: others tell.

        `now` are those that this rank has by now. Where ranks of the site hold copies that are not
        equal, those who do speak, and the others would only repeat what they heard of one of them.
        A collective of the site.
        """
        hashes = self.hashes(now)
        holders = self._agreed.here.holders
        if all(len(ranks) == 1 for each in holders.values() for _, ranks in each.groups):
            return hashes
        own = {name: hash_of(local_of(now[name])) for name in holders if name in now}
        told: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(told, own)
        disputing = {
            rank
            for name in hashes.names
            if name in holders
            for _, ranks in holders[name].groups
            if len({told[each].get(name) for each in ranks}) > 1
            for rank in ranks
        }
        return hashes if not disputing or dist.get_rank() in disputing else None

    def equalise(self, initial: InitialState) -> bool:
        """Give every site the first site's values; return whether any ranks differed.

        Raises:
            IsthmusError: the exchange failed.
        """
        combined = self.hashes(self._own).combined.to_bytes(8, "little")
        layout = layout_of_labels(each.label for each in self._law)
        if initial.all_sites_have(combined, layout):
            return False
        flats = {name: local_of(each).contiguous().view(-1) for name, each in self._own.items()}
        for start in range(0, len(self._cuts), BLOCKS_IN_FLIGHT // 2):
            group = self._cuts[start : start + BLOCKS_IN_FLIGHT // 2]
            self._cross(initial.pipeline, group, flats, 1.0 if initial.is_first else 0.0)
        for name, flat in flats.items():
            local = local_of(self._own[name])
            if local.data_ptr() != flat.data_ptr():
                local.copy_(flat.view(local.shape))
        for name, twin in self._twins:
            twin.copy_(self._own[name])
        return True

    def _cross(
        self,
        pipeline: BucketPipeline,
        cuts: Sequence[BucketCut],
        flats: Mapping[str, torch.Tensor],
        weight: float,
    ) -> None:
        """Send some buckets in one round, and write what comes back."""
        rank = dist.get_rank()
        sent: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        futures = []
        pipeline.begin(weight)
        shared_by = self._agreed.shared_by(cuts, rank, in_planes=True)
        for cut, sharing in zip(cuts, shared_by, strict=True):
            if rank not in participants(cut.parts(self._agreed.here)):
                continue
            way = cut.route(self._agreed.here, rank)
            pieces = held_pieces(cut, way, flats)
            planes = _planes_of(torch.cat([_bytes_of(each) for each in pieces]), cut)
            sent.append((pieces, planes))
            for index, plane in enumerate(planes):
                futures.append(
                    pipeline.submit(
                        [plane],
                        cut.layout,
                        exact=True,
                        route=way,
                        number=PLANES * cut.number + index,
                        sharing=sharing,
                    )
                )
        pipeline.wait()
        for future in futures:
            future.wait()
        for pieces, planes in sent:
            _write_back(planes, pieces)


def held_tensors(
    own: Mapping[str, torch.Tensor], exactness: Exactness, *, lone_rank: int | None = None
) -> list[Held]:
    """Return what a rank tells the others of its site about parameters and buffers.

    `lone_rank`: this rank, where nothing reduces gradients over ranks but DTensor.

    Raises:
        TypeError: one is laid out in a way that is not known.
    """
    found = []
    for name, each in own.items():
        is_parameter = isinstance(each, nn.Parameter)
        is_trained = is_parameter and each.requires_grad
        kind = "trained" if is_trained else "frozen"
        entry = Entry(
            name,
            tuple(each.shape),
            str(each.dtype),
            each.element_size(),
            kind if is_parameter else "buffer",
            is_trained and exactness.spares(name, each),
        )
        mesh: Ranks = () if lone_rank is None else (lone_rank,)
        if is_sharded(each):
            mesh = tuple(each.device_mesh.mesh.flatten().tolist())
        content = hash_of(local_of(each)) if mesh else 0
        found.append(Held(entry, holding_of(name, each), mesh, content, lone_rank is not None))
    return found


def held_pieces(
    cut: BucketCut, way: Route, flats: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Return views of what this rank holds of a bucket, of each of its slices in turn."""
    return [
        flats[name][start:stop]
        for name, (start, stop) in zip(cut.names, way.held, strict=True)
        if name in flats
    ]


def _bytes_of(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8).view(flat.numel(), flat.element_size())


def _planes_of(octets: torch.Tensor, cut: BucketCut) -> list[torch.Tensor]:
    """Return uint8[n, k] as k / 2 tensors of n numbers, one if k is 1."""
    item_bytes = cut.slices[0].entry.item_bytes
    numbers = octets.to(torch.float32)
    if item_bytes == 1:
        return [numbers.reshape(-1)]
    return [numbers[:, place] + 256.0 * numbers[:, place + 1] for place in range(0, item_bytes, 2)]


def _write_back(planes: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> None:
    """Write what `_planes_of` made of the pieces' bytes back to them."""
    start = 0
    for each in pieces:
        octets = _bytes_of(each)
        for index, plane in enumerate(planes):
            whole = plane[start : start + each.numel()].to(torch.int32)
            octets[:, 2 * index] = (whole % 256).to(torch.uint8)
            if octets.shape[1] > 1:
                octets[:, 2 * index + 1] = (whole // 256).to(torch.uint8)
        start += each.numel()
