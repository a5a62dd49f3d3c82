"""Contrast of the report's colours, computed from its style sheet for both themes (WCAG 2.2, level AA)."""

from __future__ import annotations

import re
from itertools import product

import pytest

from planner.report.html import static_dir

TEXT, MARK = 4.5, 3.0
"""Least contrast of text, and of the parts of a figure."""
CSS = (static_dir() / "plan.css").read_text(encoding="utf-8")
SERIES = [f"c{number}" for number in range(1, 13)]
PALE = float(re.findall(r"color-mix\(in srgb, .*? (\d+)%", (static_dir() / "charts.js").read_text("utf-8"))[0]) / 100
"""Share of the strong colour in the slots of warm-up and cool-down."""

Colour = tuple[float, float, float]


def variables(block: str) -> dict[str, Colour]:
    """Names of a block of CSS variables and their colours."""
    found = re.findall(r"--([\w-]+): #([0-9a-f]{6});", block)
    return {name: tuple(int(value[i : i + 2], 16) / 255 for i in (0, 2, 4)) for name, value in found}  # type: ignore[misc]


LIGHT = variables(CSS[CSS.index(":root") : CSS.index("@media screen and (prefers-color-scheme: dark)")])
DARK = LIGHT | variables(CSS[CSS.index("@media screen and (prefers-color-scheme: dark)") : CSS.index("@media print")])
THEMES = {"light": LIGHT, "dark": DARK}


def luminance(colour: Colour) -> float:
    """Relative luminance of an sRGB colour."""
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Colour, other: Colour) -> float:
    """From 1 (the same) to 21 (black and white)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_computed_right() -> None:
    """Black on white, and a grey whose ratio is well known."""
    assert contrast((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)) == pytest.approx(21)
    assert contrast((118 / 255,) * 3, (1.0, 1.0, 1.0)) == pytest.approx(4.54, abs=0.01)


def test_themes_differ() -> None:
    """Each theme has colours of its own for everything."""
    assert LIGHT.keys() == DARK.keys() >= {*SERIES, "surface", "raised", "text", "quiet", "axis"}
    assert all(LIGHT[name] != DARK[name] for name in LIGHT)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(
    ("name", "ground"), list(product(("text", "quiet", "link", "good", "bad", "care"), ("surface", "raised")))
)
def test_text(theme: str, name: str, ground: str) -> None:
    """Every colour of text on every ground."""
    colours = THEMES[theme]
    assert contrast(colours[name], colours[ground]) >= TEXT


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", SERIES)
def test_marks(theme: str, name: str) -> None:
    """A mark stands out from the ground, text on it can be read, and text on its pale form as well."""
    colours = THEMES[theme]
    mark, ground = colours[name], colours["surface"]
    assert contrast(mark, ground) >= MARK
    assert contrast(colours["on-mark"], mark) >= TEXT
    red, green, blue = (PALE * a + (1 - PALE) * b for a, b in zip(mark, ground, strict=True))
    assert contrast(colours["text"], (red, green, blue)) >= TEXT


@pytest.mark.parametrize("theme", THEMES)
def test_lines(theme: str) -> None:
    """Axes, leaders and the hatching of the bubble can be seen."""
    assert contrast(THEMES[theme]["axis"], THEMES[theme]["surface"]) >= MARK


def test_named_colours_are_of_the_series() -> None:
    """Kinds of parts, slots and levels take their colour from the series, so the tests above hold for them."""
    named = re.findall(r"--(?:kind|slot|level)-[\w-]+: (.*?);", CSS)
    assert len(named) == 12
    assert all(re.fullmatch(r"var\(--c\d+\)", value) for value in named)
