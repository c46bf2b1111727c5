"""The order in which gradients of a DistributedDataParallel cross: one for all sites.

After its first backward pass DDP cuts buckets anew, in the order in which its own gradients came.
Where that depends on the data, sites would have unlike buckets. So after the first round they
compare hashes of their cuts, once; where one differs, all take that of the first site.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import torch
import xxhash
from torch.nn.parallel import DistributedDataParallel

from isthmus.protos.errors import LayoutMismatchError
from isthmus.sites.worker.exchange.agreement import tell_all, tell_hashes
from isthmus.sites.worker.exchange.bucket_pipeline import BucketPipeline

Cut = list[list[str]]
"""Names of the parameters of each bucket, in the order of crossing."""
Agree = Callable[[Cut], Cut]
"""Given this site's cut, returns that of all sites. A collective of all ranks of all sites."""


def agree_on_cut(
    pipeline: BucketPipeline,
    sites: Sequence[str],
    rank: int,
    device: torch.device,
    *,
    site: int,
    own: Cut,
) -> Cut:
    """Return the first site's cut: this site's, where none differs. A round, or three.

    Raises:
        LayoutMismatchError: the first site trains other parameters.
        IsthmusError: the exchange failed.
    """
    text = json.dumps(own).encode()
    number = xxhash.xxh3_64_intdigest(text)
    where = {"site": site, "num_sites": len(sites), "rank": rank}
    hashes = tell_hashes(pipeline, number, device=device, **where)
    present = {each for each in hashes if each is not None}
    if present == {number}:
        return own
    if len(present) == 1:  # this site comes back to the run, and is not asked
        raise LayoutMismatchError(
            f"site {sites[site]} comes back while a model is trained for the first time, and its "
            "gradients came in another order than at all others: let it come back once more"
        )
    told = tell_all(pipeline, text, device=device, **where)
    first, data = next((name, data) for name, data in zip(sites, told, strict=True) if data)
    cut: Cut = json.loads(data)
    here, there = (sorted(name for names in each for name in names) for each in (own, cut))
    if here != there:
        name = next(iter({*here} ^ {*there}))
        has, lacks = (sites[site], first) if name in here else (first, sites[site])
        raise LayoutMismatchError(
            f"site {has} trains a parameter {name}, site {lacks} does not: the model must be the "
            "same at every site"
        )
    return cut


def own_cut(model: DistributedDataParallel, names: Mapping[torch.Tensor, str]) -> Cut:
    """Return how DDP will cut a model's gradients from now on, after its first backward pass.

    Else DDP would cut them anew in its next forward pass. It says how by tensors of zeros in place
    of its buckets, which are gone at once; after the backward pass there are no activations.
    """
    model.reducer._rebuild_buckets()
    buckets = model.reducer._get_zeros_like_grad_buckets()
    return [[names[each] for each in bucket.parameters()] for bucket in buckets]
