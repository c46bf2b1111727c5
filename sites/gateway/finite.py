"""Finds numbers that are not finite in what a rank hands over."""

from __future__ import annotations

from typing import Final

import numpy as np

from protos.errors import NonFiniteError
from sites.gateway.bucket_run import Post

_TILE: Final = 1 << 16
"""Elements that are looked at together: what numpy answers with stays in a core's cache."""


def check_finite(post: Post) -> None:
    """Look at each number of a rank's part.

    Raises:
        NonFiniteError: one is a NaN or an infinity; names the first.
    """
    for start in range(0, len(post.values), _TILE):
        tile = post.values[start : start + _TILE]
        is_finite = np.isfinite(tile)
        if not is_finite.all():
            first = int(is_finite.argmin())
            raise NonFiniteError(
                f"round {post.round} bucket {post.bucket}: element {start + first} of "
                f"{len(post.values)} of its part is {tile[first]}"
            )
