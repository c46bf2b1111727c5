"""Finds numbers that are not finite in what a rank hands over."""

from __future__ import annotations

from protos.errors import NonFiniteError
from sites.codecs.kernels import floats
from sites.gateway.reduction.bucket_run import Post


def check_finite(post: Post) -> None:
    """Look at each number of a rank's part.

    Raises:
        NonFiniteError: one is a NaN or an infinity; names the first.
    """
    first = floats.first_not_finite(post.values)
    if first >= 0:
        raise NonFiniteError(
            f"round {post.round} bucket {post.bucket}: element {first} of {len(post.values)} of "
            f"its part is {post.values[first]}"
        )
