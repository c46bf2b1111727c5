"""What a plain (unquoted) YAML scalar means: numbers, true and false, nothing, else text.

YAML 1.1, which PyYAML implements, reads `no` as false, `12:30:45` as 45045, `010` as 8 and `1e3` as
a text. Here a scalar is what it looks like (YAML 1.2's core schema, decimal numbers only): `no`,
`12:30:45` and `0x10` are texts, `1e3` is a number, and `010`, which looks like two things, is
refused.
"""

import math
import re

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,18})")
_DECIMAL = re.compile(
    r"[-+]?((0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?|\.[0-9]{1,18})([eE][-+]?[0-9]{1,3})?"
)
_PADDED = re.compile(r"[-+]?0[0-9]+(\.[0-9]*)?")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
}


class ScalarError(ValueError):
    """A plain scalar that could be read in two ways."""


def read_plain(text: str) -> str | int | float | bool | None:
    """Return what an unquoted scalar means.

    Raises:
        ScalarError: a number with leading zeros, which is decimal to some and octal to others.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _PADDED.fullmatch(text):
        raise ScalarError(f"{text} has a leading zero: write the number without it, or quote it")
    if _INTEGER.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text):
        number = float(text)
        return number if math.isfinite(number) else text
    return text
