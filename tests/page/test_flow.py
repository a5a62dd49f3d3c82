"""What a person does on the page, in headless Chromium: ask, change the question, take files along, share the link."""

from __future__ import annotations

import io
import json
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra api")

import uvicorn

from planner.service import render_document
from planner.service.document import read_plan
from planner_api.app import create_app
from planner_api.settings import Settings
from tests.clients.running import running_service

PLAN_MS = 60_000

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a service of these tests' own."""
    with running_service(tmp_path_factory.mktemp("page"), PLANNER_RATE_LIMIT="") as address:
        yield address


class Window:
    """A page of the service, with what the browser asked for and complained about."""

    def __init__(self, browser: Any, url: str, path: str = "/", **context: Any) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.url = url
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **context})
        self.page = self.context.new_page()
        self.page.set_default_timeout(PLAN_MS)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url + path)

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *problem: object) -> None:
        self.context.close()
        if problem[0] is None:
            assert self.complaints == []
            assert [each for each in self.requests if not each.startswith((self.url, "data:"))] == []


def asked(page: Any) -> dict[str, str]:
    """The question in the address."""
    return {name: values[0] for name, values in parse_qs(urlsplit(page.url).query).items()}


def downloaded(page: Any, selector: str, ending: str) -> bytes:
    """A file that the page offers, kept under a name that says of which plan it is."""
    plan = page.get_attribute(".take form", "action").split("/")[3]
    with page.expect_download() as waiting:
        page.click(selector)
    assert waiting.value.suggested_filename == f"plan-{plan[:12]}{ending}"
    return Path(waiting.value.path()).read_bytes()


def headline(page: Any) -> str:
    page.wait_for_selector("section.plan svg.plan-plot")
    return str(page.locator("section.plan h2").first.text_content())


def steps(page: Any) -> list[str]:
    """What the sliders say."""
    return [str(text) for text in page.locator(".sliders output").all_text_contents()]


def test_the_whole_way(browser: Any, url: str) -> None:
    """Choose, plan, change the GPUs, download, come back by the link."""
    with Window(browser, url) as page:
        page.fill("#model", "llama-3.1-8b")
        page.press("#model", "Tab")
        page.fill("#gpu", "h100")
        page.press("#gpu", "Tab")
        page.locator("p.missing", has_text="Number of GPUs").wait_for()
        assert page.locator("section.problem").count() == 0
        assert steps(page) == ["-", "-", "-", "-"]
        page.fill("#gpus", "8")
        page.press("#gpus", "Enter")
        assert "8 x h100" in headline(page)
        assert page.locator("section.plan figure[data-figure]").count() >= 4
        assert page.locator("section.changed").count() == 0

        assert steps(page) == ["8 GPUs", "8,192 tokens", "128 sequences", "0 %"]

        # One step of the slider, by keyboard: planned again, beside where one started.
        page.focus("#slide-gpus")
        page.keyboard.press("ArrowRight")
        page.wait_for_selector("section.changed")
        assert "16 x h100" in headline(page)
        assert asked(page)["gpus"] == "16"
        assert page.input_value("#gpus") == "16"
        assert page.locator("section.changed th", has_text="step time").count() == 1

        document = read_plan(downloaded(page, "a[download$='.json']", ".json").decode(), "plan.json")
        assert document.request.cluster.gpus == 16
        with tarfile.open(fileobj=io.BytesIO(downloaded(page, "#download", ".tar.gz"))) as archive:
            files = {
                name.partition("/")[2]: stream.read().decode()
                for name in archive.getnames()
                if (stream := archive.extractfile(name)) is not None
            }
        assert files == render_document(document)
        report = downloaded(page, "a[href*='report.html']", ".html").decode()
        assert report.startswith("<!doctype html>")
        assert document.id[:12] in report
        link, before = page.url, headline(page)

        page.go_back()
        page.locator("section.plan h2", has_text=" 8 x h100").wait_for()
        assert page.input_value("#gpus") == "8"

    with Window(browser, url, link.removeprefix(url)) as page:
        assert headline(page) == before
        assert page.input_value("#gpus") == "16"
        assert page.get_attribute("#slide-gpus", "aria-valuetext") == "16 GPUs"
        assert page.locator("section.changed").count() == 1
        # What is in force, also where no step is as large, the field says it in tokens, or nobody has asked yet.
        page.fill("#gpus", "24")
        page.fill("#global_batch", "3145728")
        assert steps(page)[::2] == ["24 GPUs", "3,145,728 sequences"]
        page.fill("#global_batch", "3Mi")
        assert steps(page)[2] == "3Mi"
        page.press("#global_batch", "Enter")
        page.locator("section.plan h2", has_text=" 24 x h100").wait_for()
        assert steps(page) == ["24 GPUs", "8,192 tokens", "384 sequences", "0 %"]
        assert page.get_attribute("#slide-global_batch", "aria-valuetext") == "384 sequences"
        page.fill("#gpus", "1")
        assert steps(page)[0] == "1 GPU"


@pytest.mark.parametrize(
    ("query", "told", "field"),
    [
        ("model=llama-3.1-8bb&gpu=h100&gpus=8", "llama-3.1-8b", "#model"),
        ("model=llama-3.1-8b&gpu=h100&gpus=12", "do not fill nodes", "#gpus"),
        ("model=llama-3.1-8b&gpu=h100&gpus=eight", "no whole number", "#gpus"),
        ("config=%7B%22model_type&gpu=h100&gpus=8", "cannot be parsed", "#config"),
        ("model=llama-3.1-8b&gpu=h100&gpus=8&pins=tp", "NAME=VALUE", "#pins"),
    ],
)
def test_what_is_wrong_is_said(browser: Any, url: str, query: str, told: str, field: str) -> None:
    """The answer says what cannot be used and leads to its field; no option of a command line is named."""
    window = Window(browser, url, f"/?{query}")
    page = window.page
    shown = str(page.locator("section.problem").text_content())
    assert told in shown
    assert "--" not in shown
    assert page.locator(f"section.problem a[href='{field}'], {field}[aria-invalid='true']").count() >= 1
    window.context.close()


def test_nothing_fits(browser: Any, url: str) -> None:
    """That nothing fits is an answer with reasons and a way out."""
    window = Window(browser, url, "/?model=70b&gpu=a100&gpus=2&backend=megatron")
    window.page.wait_for_selector("section.problem")
    shown = str(window.page.locator("section.problem").text_content())
    assert "fits" in shown
    assert "GPUs" in shown
    window.context.close()


def test_without_scripts(browser: Any, url: str) -> None:
    """The form asks and the answer is complete: verdict, plans, and a table for every figure."""
    with Window(browser, url, "/?model=llama-3.1-8b&gpu=h100&gpus=8", java_script_enabled=False) as page:
        for _ in range(100):
            if page.locator("section.plan").count():
                break
            page.wait_for_timeout(200)
            page.reload()
        assert not page.locator("[data-copy]").is_visible()
        page.select_option("#launcher", "slurm")
        with tarfile.open(fileobj=io.BytesIO(downloaded(page, "#download", ".tar.gz"))) as archive:
            assert any(name.endswith("/job.sbatch") for name in archive.getnames())
        assert page.locator("section.plan figure").count() == page.locator("section.plan figure table").count() > 3
        page.fill("#gpus", "16")
        page.click("#ask button[type=submit]")
        assert asked(page)["gpus"] == "16"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(browser: Any, url: str, scheme: str) -> None:
    """Nothing is wider than the window."""
    phone = {"viewport": {"width": 360, "height": 740}, "color_scheme": scheme}
    with Window(browser, url, "/?model=llama-3.1-8b&gpu=h100&gpus=8", **phone) as page:
        headline(page)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_hostile_values_do_nothing(browser: Any, url: str) -> None:
    """They are shown as they were written."""
    text = "%22%3E%3Cscript%3Ealert(1)%3C/script%3E"
    dialogs: list[str] = []
    window = Window(browser, url, f"/?model={text}&gpu={text}&gpus=8&pins={text}")
    window.page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    window.page.reload()
    assert window.page.input_value("#model") == '"><script>alert(1)</script>'
    assert dialogs == []
    assert json.dumps(window.complaints).count("Content Security Policy") == 0
    window.context.close()


@contextmanager
def idle_service(folder: Path) -> Iterator[str]:
    """Address of a service in this process that makes no plans: they wait."""
    app = create_app(Settings(database_url=f"sqlite:///{folder}/plans.db", workers=0, rate_limit=""))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def test_waiting_is_calm(browser: Any, tmp_path: Path) -> None:
    """While a plan waits, looks at it take no focus and say nothing; a newer question replaces it; cancel ends it."""
    with idle_service(tmp_path) as address:
        window = Window(browser, address, "/?model=1b&gpu=h100&gpus=8")
        page = window.page
        page.evaluate(
            """() => {
                window.spoken = [];
                new MutationObserver(() => spoken.push(document.getElementById("said").textContent))
                    .observe(document.getElementById("said"), {childList: true, subtree: true});
            }"""
        )
        page.focus("#cancel")
        for _ in range(2):
            with page.expect_response(lambda answer: "/plans/" in answer.url):
                pass
        page.wait_for_timeout(300)
        assert page.evaluate("document.activeElement.id") == "cancel"
        assert page.evaluate("spoken") == []

        # Two steps in quick succession: the page ends at the second.
        page.focus("#slide-gpus")
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(250)
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(2500)
        assert asked(page)["gpus"] == "32"
        plan = page.get_attribute(".making", "hx-get").removeprefix("/plans/")
        question = page.request.get(f"{address}/plans/{plan}").text()
        assert 'name="gpus" type="text" value="32"' in question

        page.click("#cancel")
        page.wait_for_selector("section.problem")
        assert "was cancelled" in str(page.locator("section.problem").text_content())
        complaints = page.evaluate("document.getElementById('said').textContent")
        assert "was cancelled" in complaints
        page.click("text=Ask again")
        page.wait_for_selector(".making")
        assert asked(page)["gpus"] == "32"
        # htmx reports the requests that newer ones replaced.
        assert [text for text in window.complaints if not text.startswith("htmx:")] == []
        window.context.close()
