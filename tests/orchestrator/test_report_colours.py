"""The style sheet's colours: those that touch can be told apart, and words can be read."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from isthmus.orchestrator.evidence.report import page

SHEET = Path(page.__file__).with_name("page.css").read_text(encoding="utf-8")
THEMES = {"light": 0, "dark": 1}
# Machado, Oliveira, Fernandes (2009): severity 1, on linear RGB.
VISIONS = {
    "normal": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
TOUCHING = [("compute", "rs"), ("rs", "wan"), ("wan", "wait"), ("wan", "ag"), ("rs", "ag")]
TOLD_APART = 20.0
"""CIE76 difference; 2.3 is what is just noticed side by side."""
READABLE = [
    ("ink", "paper"),
    ("quiet", "paper"),
    ("quiet", "raised"),
    ("good", "paper"),
    ("bad", "paper"),
    ("on-dark", "compute"),
    ("on-dark", "wan"),
    ("on-light", "rs"),
    ("on-light", "wait"),
]
Rgb = tuple[float, float, float]


def colour(name: str, theme: str) -> Rgb:
    """Return a variable of the style sheet in linear RGB."""
    match = re.search(rf"--{name}: (?:light-dark\((#\w+), (#\w+)\)|(#\w+));", SHEET)
    assert match, name
    text = match[3] or match[1 + THEMES[theme]]
    parts = (int(text[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return red, green, blue


def luminance(rgb: Rgb) -> float:
    return 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2]


def lab(rgb: Rgb) -> Rgb:
    """Return CIE L*a*b* under D65."""
    red, green, blue = (min(1.0, max(0.0, part)) for part in rgb)
    xyz = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047,
        luminance((red, green, blue)),
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883,
    )
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def seen(rgb: Rgb, vision: str) -> Rgb:
    red, green, blue = (
        sum(weight * part for weight, part in zip(row, rgb, strict=True)) for row in VISIONS[vision]
    )
    return red, green, blue


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("vision", VISIONS)
def test_colours_that_touch_are_told_apart(theme: str, vision: str) -> None:
    for one, other in TOUCHING:
        first, second = (lab(seen(colour(name, theme), vision)) for name in (one, other))
        assert math.dist(first, second) >= TOLD_APART, (one, other)


@pytest.mark.parametrize("theme", THEMES)
def test_words_have_the_contrast_that_wcag_asks_for(theme: str) -> None:
    for words, ground in READABLE:
        darker, lighter = sorted(luminance(colour(name, theme)) for name in (words, ground))
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (words, ground)
