"""In what form a rank hands its shard of a bucket over."""

from enum import StrEnum


class Form(StrEnum):
    """As messages name it."""

    VALUES = "values"
    """float32. The gateway encodes what it sends, and keeps what that loses."""
    ENCODED = "encoded"
    """Each chunk's body (sites.codecs.codec.BodyCodec), where its first element would be. The rank
    keeps what was lost. Chunks of trees whose codec has no bodies are as in VALUES."""
    UNFIT = "unfit"
    """float32 of which some are not for the codec's codes, a NaN say. Where chunks have bodies
    otherwise, what the rank owed is added already: the gateway encodes as the codec does, and keeps
    nothing."""
