"""The HTML report: well formed, complete without scripts, self-contained, and deaf to markup in names."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from planner.report.figures import pictures
from planner.report.html import SCRIPTS, STYLES, embedded, html_report, plan_section, static_dir
from planner.specs.pictures import Pictures
from planner.units import duration, gib
from tests.report.documents import CASES, HOSTILE, hostile, interleaved, piped, searched, too_large

VOID = {"meta", "br", "input", "link", "img", "hr"}
LARGEST_BYTES = 1_500_000


class Page(HTMLParser):
    """Elements with their attributes, and the text of the whole page outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.data: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside == "script":
            self.data.append(data)
        elif inside != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def count(self, tag: str, **attributes: str) -> int:
        return sum(name == tag and attributes.items() <= found.items() for name, found in self.elements)


@pytest.mark.parametrize("name", CASES)
def test_elements_are_nested(name: str) -> None:
    """Every element is closed, in order."""
    assert Page(html_report(CASES[name]())).open == []


@pytest.mark.parametrize("name", CASES)
def test_the_file_stands_alone(name: str) -> None:
    """Nothing is loaded: no address in an attribute, and a policy that forbids everything but the texts inside."""
    text = html_report(CASES[name]())
    page = Page(text)
    for tag, attributes in page.elements:
        assert not attributes.keys() & {"src", "href", "srcset", "action", "style"}, tag
        assert not any(key.startswith("on") for key in attributes), tag
    policy = next(found["content"] for _, found in page.elements if found.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "url(http" not in text
    assert "@import" not in text
    assert len(text.encode()) < LARGEST_BYTES


@pytest.mark.parametrize("name", CASES)
def test_figures_have_captions_and_tables(name: str) -> None:
    """A figure that is drawn says the same in a caption and a table, which is open until the script has drawn."""
    text = plan_section(CASES[name]())
    figures = re.findall(r"<figure .*?</figure>", text, re.DOTALL)
    assert len(figures) >= 2
    for figure in figures:
        caption = re.search(r"<figcaption>(.*?)</figcaption>", figure, re.DOTALL)
        assert caption is not None
        assert len(caption[1]) > 20
        assert "<table" in figure
        assert figure.count("<tr") > 1
        if 'class="drawn"' in figure:
            assert "<details open>" in figure


@pytest.mark.parametrize("name", CASES)
def test_the_words_are_the_documents(name: str) -> None:
    """The verdict, every reason and every assumption stand in the text."""
    document = CASES[name]()
    text = Page(plan_section(document)).text
    estimate = document.best.estimate
    for said in (
        document.request.model.name,
        duration(estimate.step_time_s),
        gib(estimate.peak_memory_range_bytes[1]),
        *document.best.why,
        *document.warnings,
        *(assumption.why for assumption in document.assumptions),
    ):
        assert " ".join(said.split()) in text


def test_a_plan_that_does_not_fit_says_so() -> None:
    """In words, with how much is too much."""
    estimate = too_large().best.estimate
    text = Page(plan_section(too_large())).text
    assert "Does not fit" in text
    assert f"{gib(estimate.peak_memory_range_bytes[1] - estimate.memory_limit_bytes)} too much" in text
    assert "Does not fit" not in Page(plan_section(piped())).text


def test_every_plan_has_a_row() -> None:
    """The ranked table holds what the scatter draws, in the same order."""
    section = plan_section(searched())
    table = section[section.index('<section class="ranking">') :].split("</table>")[0]
    drawn = pictures(searched()).points
    backends = re.findall(r'<tr.*?<th scope="row".*?</th><td>(\w+)</td>', table, re.DOTALL)
    assert backends == [point.backend for point in drawn]


def test_markup_in_names_is_text() -> None:
    """A hostile name adds no element and is shown as it is written."""
    ours, theirs = Page(html_report(searched())), Page(html_report(hostile()))
    assert theirs.count("script") == ours.count("script") == len(SCRIPTS) + 1
    assert theirs.count("a") == 0
    assert " ".join(HOSTILE.split()) in theirs.text


def test_json_cannot_leave_its_element() -> None:
    """The embedded numbers hold no character that HTML reads, and are the numbers."""
    drawn = pictures(searched())
    point = drawn.points[0].model_copy(update={"label": HOSTILE})
    drawn = drawn.model_copy(update={"points": (point, *drawn.points[1:])})
    text = embedded(drawn)
    assert not re.search("[<>&\u2028\u2029]", text)
    assert Pictures.model_validate(json.loads(text)) == drawn
    assert json.loads(Page(html_report(searched(), drawn)).data[0])["points"][0]["label"] == HOSTILE


def test_scripts_and_styles_can_stand_inside_a_page() -> None:
    """No file that is put into the page closes its own element or opens a comment."""
    for name in (*SCRIPTS, *STYLES):
        text = (static_dir() / name).read_text(encoding="utf-8").lower()
        assert not re.search("</script|</style|<!--", text), name


def test_sections_of_one_page_have_ids_of_their_own() -> None:
    """Two plans on one page share no id."""
    pages = [Page(plan_section(piped(), name=name)) for name in ("first", "second")]
    ids = [found["id"] for page in pages for _, found in page.elements if "id" in found]
    assert len(ids) == len(set(ids)) > 6


def test_the_pipeline_in_words() -> None:
    """Fill and idle time are those of the picture; the bubble of the step's bars is another figure."""
    schedule = pictures(piped()).schedule
    assert schedule is not None
    fill = min(slot.start_s for slot in schedule.slots if slot.stage == schedule.stages - 1)
    idle = 100 * (1 - schedule.busy_share)
    assert f"fill {duration(fill)}, stages idle {idle:.1f} % of the time" in Page(plan_section(piped())).text


def test_chunks_are_told_apart() -> None:
    """Shade and letter are the chunk's where a stage has several; elsewhere the shade is the phase's."""
    text = Page(plan_section(interleaved())).text
    assert "letters chunks of the model, a to f; slots of every second chunk are pale" in text
    text = Page(plan_section(piped())).text
    assert "pale slots belong to a stage's warm-up" in text
    assert "chunk" not in text
