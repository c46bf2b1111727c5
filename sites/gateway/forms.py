"""In what form a rank hands its shard of a bucket over."""

from enum import StrEnum


class Form(StrEnum):
    """As messages name it."""

    VALUES = "values"
    """float32. The gateway encodes what it sends, and keeps what that loses."""
    ENCODED = "encoded"
    """Each chunk's body (sites.codecs.codec.BodyCodec), where its first element would be. The rank keeps
    what was lost."""
    UNFIT = "unfit"
    """float32 of which some are not for the codec's codes, a NaN say. What the rank owed is added already, so the
    gateway encodes as its codec does, and keeps nothing."""
