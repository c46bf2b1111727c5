"""The codecs for gradient chunks, by name."""

CODECS = (
    "fp32",
    "bf16",
    "split",
    "bf16-split",
    "int8",
    "int8-zstd",
    "int4",
    "int4-zstd",
    "fp8",
    "fp8-zstd",
    "topk",
    "topk-zstd",
    "topk2",
)
"""The codecs for gradient chunks; sites/codecs implements them, docs/codecs.md compares them.

`fp32` and `bf16` are plain; `split` is fp32 cut into byte planes, each under zstd: lossless;
`bf16-split` rounds to bf16, then compresses the plane with the exponents. `int8`, `int4` and `fp8`
(e4m3) give each block of 128 elements a scale; `topk` sends the largest one in a hundred,
`topk2` 64 of each 4096 with two bits for each value. With `-zstd`, what compresses is compressed.
"""

RUNGS = ("fp32", "split", "bf16", "bf16-split", "int8", "int4")
"""The codecs that a running job may go over to, as its links narrow and widen: the most exact, then
the largest first."""


def rungs(own: str, least_exact: str) -> tuple[str, ...]:
    """Return the codecs that a run may have: from its own down to the least exact one.

    Both are of RUNGS, and `own` is not below `least_exact`.
    """
    return RUNGS[RUNGS.index(own) : RUNGS.index(least_exact) + 1]
