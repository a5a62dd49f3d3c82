"""The report in a real browser: opened from disk, drawn, without network, in both themes, on a phone and on paper."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from planner.report.figures import pictures
from planner.report.html import html_report
from tests.report.documents import CASES, HOSTILE, experts, hostile, piped, searched

PHONE = {"width": 360, "height": 740}
DESK = {"width": 1200, "height": 900}

pytestmark = pytest.mark.browser


class Opened:
    """A report in a window, with what the browser asked for and complained about."""

    def __init__(self, browser: Any, file: Path, **context: Any) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.context = browser.new_context(**{"viewport": DESK, "color_scheme": "light", **context})
        self.page = self.context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(file.as_uri())

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *problem: object) -> None:
        self.context.close()
        if problem[0] is None:
            assert self.complaints == []
            assert [url for url in self.requests if not url.startswith("file:")] == []


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The report of every case as a file."""
    folder = tmp_path_factory.mktemp("reports")
    for name, case in CASES.items():
        (folder / f"{name}.html").write_text(html_report(case()), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_every_figure_is_drawn(browser: Any, reports: dict[str, Path], name: str) -> None:
    """Each figure holds marks, nothing is complained about, nothing is loaded, and tables fold away."""
    with Opened(browser, reports[name]) as page:
        figures = page.locator("figure.drawn")
        assert figures.count() >= 2
        for index in range(figures.count()):
            figure = figures.nth(index)
            assert figure.locator("svg.plan-plot").count() == 1
            assert figure.locator("svg.plan-plot :is(rect, path, circle)").count() > 1
            assert figure.locator("svg.plan-plot text").count() > 1
            assert not figure.locator("details").evaluate("element => element.open")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("viewport", [PHONE, DESK], ids=["phone", "desk"])
def test_nothing_is_wider_than_the_window(
    browser: Any, reports: dict[str, Path], name: str, viewport: dict[str, int]
) -> None:
    """The page does not scroll sideways, and no text of a figure is cut off, with all tables open."""
    with Opened(browser, reports[name], viewport=viewport) as page:
        page.evaluate("document.querySelectorAll('details').forEach(element => element.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        cut = page.evaluate(
            """() => [...document.querySelectorAll('svg.plan-plot text')].filter(text => {
                const inner = text.getBoundingClientRect(), outer = text.closest('.canvas').getBoundingClientRect();
                return inner.width && (inner.left < outer.left - 1 || inner.right > outer.right + 1);
            }).map(text => text.textContent)"""
        )
        assert cut == []


def test_dark_mode(browser: Any, reports: dict[str, Path]) -> None:
    """Ground, text and marks follow the theme, while the page is open."""
    look = """() => {
        const style = element => getComputedStyle(element);
        return [style(document.body).backgroundColor, style(document.querySelector('h2')).color,
                style(document.querySelector('figure[data-figure=stages] svg rect')).fill];
    }"""
    with Opened(browser, reports["piped"]) as page:
        light = page.evaluate(look)
        page.emulate_media(color_scheme="dark")
        dark = page.evaluate(look)
        assert all(one != other for one, other in zip(light, dark, strict=True))


def test_figures_follow_the_window(browser: Any, reports: dict[str, Path]) -> None:
    """A narrower window draws narrower figures."""
    with Opened(browser, reports["piped"]) as page:
        width = "() => Number(document.querySelector('svg.plan-plot').getAttribute('width'))"
        assert page.evaluate(width) > 900
        page.set_viewport_size(PHONE)
        page.wait_for_function("() => Number(document.querySelector('svg.plan-plot').getAttribute('width')) < 360")


def test_the_gantt_has_every_slot(browser: Any, reports: dict[str, Path]) -> None:
    """A rectangle a slot, and a bubble behind every stage."""
    schedule = pictures(piped()).schedule
    assert schedule is not None
    with Opened(browser, reports["piped"]) as page:
        figure = page.locator("figure[data-figure=schedule] svg")
        assert figure.locator("[aria-label=bar] rect").count() == len(schedule.slots) + schedule.stages
        names = figure.locator("text").all_text_contents()
        assert {"warm-up", "steady state", "cool-down"} <= set(names)


LABELS = """() => {
    const middle = box => ({x: box.x + box.width / 2, y: box.y + box.height / 2});
    const boxes = kind => [...document.querySelectorAll(`figure[data-figure=points] [aria-label=${kind}] > *`)]
        .map(mark => [mark.textContent, mark.getBoundingClientRect()]);
    const dots = boxes('dot').map(([, box]) => middle(box));
    return boxes('text').filter(([text]) => /^\\d+( |$)/.test(text)).map(([text, box]) => {
        const apart = dots.map(dot => Math.hypot(dot.x - middle(box).x, dot.y - middle(box).y));
        const hidden = dots.filter(({x, y}) =>
            x > box.left - 4 && x < box.right + 4 && y > box.top - 2 && y < box.bottom + 2);
        return [parseInt(text), 1 + apart.indexOf(Math.min(...apart)), hidden.length];
    });
}"""
"""Number of every label of the scatter, the dot that it is nearest to, and how many dots it hides."""


@pytest.mark.parametrize("viewport", [PHONE, DESK], ids=["phone", "desk"])
def test_a_number_stands_beside_its_own_dot(browser: Any, reports: dict[str, Path], viewport: dict[str, int]) -> None:
    """Plans that nearly coincide, too: no label hides a dot, and the dot that it is nearest to is its own."""
    with Opened(browser, reports["searched"], viewport=viewport) as page:
        labels = page.evaluate(LABELS)
    assert len(labels) == len(pictures(searched()).points) > 5
    assert all(rank == nearest and not hidden for rank, nearest, hidden in labels), labels


def test_a_tip_tells_the_numbers(browser: Any, reports: dict[str, Path]) -> None:
    """Over a mark of the memory figure stands what it is."""
    with Opened(browser, reports["piped"]) as page:
        bars = page.locator("figure[data-figure=stages] [aria-label=bar] rect")
        bars.nth(1).hover(force=True)
        tip = page.locator("figure[data-figure=stages] [aria-label=tip]")
        assert "of the limit in use" in tip.text_content()


def test_the_map_changes_its_groups_by_keyboard(browser: Any, reports: dict[str, Path]) -> None:
    """The arrow keys of the choice renumber the cells."""
    with Opened(browser, reports["experts"]) as page:
        cells = page.locator(".gpu b")
        before = cells.all_text_contents()
        page.locator(".choices input").first.focus()
        page.keyboard.press("ArrowRight")
        assert cells.all_text_contents() != before
        label = page.locator(".chosen").text_content()
        assert label == page.locator(".choices label:has(input:checked)").text_content().strip()
    assert experts().best.strategy.ep == 8


def test_printing(browser: Any, reports: dict[str, Path]) -> None:
    """A PDF of a few pages in light colours, even from a dark screen; the screen's figures come back."""
    with Opened(browser, reports["piped"], color_scheme="dark") as page:
        pdf = page.pdf(format="A4")
        assert pdf.startswith(b"%PDF")
        assert 1 < len(re.findall(rb"/Type\s*/Page\b", pdf)) < 12
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        page.emulate_media(media="screen")
        assert page.evaluate("Number(document.querySelector('svg.plan-plot').getAttribute('width'))") > 900


def test_hostile_names_do_nothing(browser: Any, reports: dict[str, Path]) -> None:
    """They are shown as written, and no dialog opens."""
    dialogs: list[str] = []
    with Opened(browser, reports["hostile"]) as page:
        page.on("dialog", lambda dialog: dialogs.append(dialog.message))
        page.reload()
        shown = page.locator("h2").text_content()
    assert dialogs == []
    assert " ".join(HOSTILE.split()) in " ".join(shown.split())
    assert hostile().request.model.name == HOSTILE


def test_without_scripts_everything_is_said(browser: Any, reports: dict[str, Path]) -> None:
    """Tables lie open, and the choice that needs the script stays away."""
    with Opened(browser, reports["piped"], java_script_enabled=False) as page:
        tables = page.locator("figure table")
        assert tables.count() == page.locator("figure").count()
        assert all(tables.nth(index).is_visible() for index in range(tables.count()))
        assert not page.locator(".choices").is_visible()
