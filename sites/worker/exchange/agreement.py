"""Sends a few bytes from each site to all others, as one average over sites.

Two bytes make one number. Each site writes its numbers into places of its own, where all others
have zeros, and a 1 beside them. So the average holds each site's numbers divided by how many took
part, and its 1 divided by the same. The quotient of the two, rounded, is the number. A site that is
lost has sent nothing. Ranks that each speak for themselves take the places of sites.
"""

from __future__ import annotations

import torch

from isthmus.sites.worker.exchange.bucket_pipeline import BucketPipeline
from isthmus.sites.worker.exchange.rounds import RoundTerms
from isthmus.sites.worker.exchange.tensor_average import packed
from isthmus.sites.worker.exchange.tensor_hashes import layout_of_labels

_PAIR = 2
_QUARTERS = 4
"""Numbers of 16 bits in a hash."""
_BLOCK_NUMEL = 1 << 20
_LAYOUT = layout_of_labels(["what each site tells all others"])


def tell_all(
    pipeline: BucketPipeline,
    data: bytes,
    *,
    site: int,
    num_sites: int,
    rank: int,
    device: torch.device,
    first_bucket: int = 0,
) -> list[bytes]:
    """Return what each site's first rank tells; nothing of a lost one.

    A collective of all ranks of all sites, of two rounds, whose buckets' numbers begin at
    `first_bucket`.

    Raises:
        IsthmusError: the exchange failed.
    """
    speaks = rank == 0
    halves = [len(data) >> 16, len(data) & 0xFFFF]
    lengths = torch.zeros(_PAIR * num_sites, dtype=torch.float32, device="cpu")
    lengths[_PAIR * site :][:_PAIR] = torch.tensor(halves, dtype=torch.float32, device="cpu")
    terms = RoundTerms(first_bucket=first_bucket)
    sums, _ = _sum(pipeline, lengths, site, num_sites, device, speaks=speaks, terms=terms)
    told = sums.reshape(num_sites, _PAIR).tolist()
    counts = [int(high) << 16 | int(low) for high, low in told]
    places = [0]
    for count in counts:
        places.append(places[-1] + -(-count // _PAIR))
    numbers = torch.zeros(places[-1], dtype=torch.float32, device="cpu")
    padded = data + bytes(len(data) % _PAIR) or bytes(_PAIR)
    octets = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    pairs = octets.view(-1, _PAIR).to(torch.float32)
    own = numbers[places[site] : places[site + 1]]
    own.copy_((pairs[:, 0] + 256.0 * pairs[:, 1])[: len(own)])
    sums, spoke = _sum(pipeline, numbers, site, num_sites, device, speaks=speaks, terms=terms)
    heard = sums.to(torch.int32)
    found = torch.stack([heard % 256, heard // 256], dim=1).to(torch.uint8).numpy().tobytes()
    return [
        found[_PAIR * place : _PAIR * place + count] if has_spoken else b""
        for place, count, has_spoken in zip(places, counts, spoke, strict=False)
    ]


def tell_hashes(
    pipeline: BucketPipeline,
    number: int,
    *,
    site: int,
    num_sites: int,
    rank: int,
    device: torch.device,
    first_bucket: int = 0,
) -> list[int | None]:
    """Return the hash of 64 bits that each site's first rank tells; None of a lost one.

    A collective of all ranks of all sites, of one round, whose buckets' numbers begin at
    `first_bucket`.

    Raises:
        IsthmusError: the exchange failed.
    """
    numbers = torch.zeros(num_sites, _QUARTERS, dtype=torch.float32, device="cpu")
    quarters = [number >> 16 * place & 0xFFFF for place in range(_QUARTERS)]
    numbers[site] = torch.tensor(quarters, dtype=torch.float32, device="cpu")
    flat = numbers.view(-1)
    terms = RoundTerms(first_bucket=first_bucket)
    sums, spoke = _sum(pipeline, flat, site, num_sites, device, speaks=rank == 0, terms=terms)
    return [
        sum(int(each) << 16 * place for place, each in enumerate(told)) if has_spoken else None
        for told, has_spoken in zip(sums.view(num_sites, _QUARTERS).tolist(), spoke, strict=True)
    ]


def _sum(
    pipeline: BucketPipeline,
    numbers: torch.Tensor,
    site: int,
    num_sites: int,
    device: torch.device,
    *,
    speaks: bool,
    terms: RoundTerms,
) -> tuple[torch.Tensor, list[bool]]:
    """Return the sum over sites of whole numbers below 65536, of which one at most is not 0.

    And which sites took part.
    """
    ones = torch.zeros(num_sites, dtype=torch.float32, device="cpu")
    ones[site] = 1.0
    means = torch.cat([ones, numbers]).to(device)
    pipeline.begin(1.0 if speaks else 0.0, terms)
    blocks = packed([means], _BLOCK_NUMEL)
    futures = [pipeline.submit(each, _LAYOUT, exact=True) for each in blocks]
    pipeline.wait()
    for future in futures:
        future.wait()  # on CUDA, results are only enqueued: this stream must wait for them
    found = means.cpu().double()
    ones = found[:num_sites]
    return (found[num_sites:] / ones.max()).round(), (ones > 0).tolist()
