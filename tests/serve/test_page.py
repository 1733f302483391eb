"""The page in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from llamaspec import Pair
from serving import PATIENCE_SECONDS, TEMPLATE, Gate, Served, served, until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-proxy-server",
]  # fmt: skip

if CHROMIUM is None and not os.environ.get("CI"):
    pytest.skip("there is no Chromium on this machine", allow_module_level=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, server: Served) -> Iterator[Page]:
    """The page, with nothing kept from earlier; anything that it complains of fails the test."""
    context = browser.new_context()
    context.set_default_timeout(1000 * PATIENCE_SECONDS)
    expect.set_options(timeout=1000 * PATIENCE_SECONDS)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.goto(server.url)
    yield page
    context.close()
    assert [said for said in complaints if "429" not in said] == []  # of one test, which wants to be refused


def ask(page: Page, text: str, n: int = 24) -> str:
    """Send a message and wait for the whole answer."""
    settle(page, "Longest answer, tokens", str(n))
    before = page.locator("article.assistant").count()
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")
    expect(page.locator("article.assistant")).to_have_count(before + 1)
    expect(page.locator("article.assistant").last.locator(".figures")).to_have_count(1)
    return answer(page)


def answer(page: Page) -> str:
    return str(page.locator("article.assistant .text").last.text_content())


def settle(page: Page, label: str, value: str) -> None:
    if page.locator("#settings").is_hidden():
        page.get_by_role("button", name="Settings").click()
    page.get_by_label(label).fill(value)
    page.get_by_label(label).blur()


def test_a_message_is_answered(page: Page, server: Served) -> None:
    settle(page, "Seed", "7")
    said = ask(page, "def add(a, b):")
    body = {
        "messages": [{"role": "user", "content": "def add(a, b):"}],
        "seed": 7,
        "temperature": 0.8,
        "max_tokens": 24,
    }
    assert said == server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    expect(page.locator("#model")).to_have_text(server.service.model_name)
    expect(page.get_by_label("Message")).to_have_value("")


def test_accepted_draft_tokens_are_tinted(page: Page) -> None:
    drafted = page.locator("article.assistant .drafted").first
    for _ in range(30):  # whether drafting pays depends on the machine, and is tried anew in every answer
        ask(page, "import os\nimport sys\n", 48)
        if drafted.count():
            break
    tinted = drafted.evaluate("e => getComputedStyle(e).backgroundColor")
    page.get_by_label("Tint accepted draft tokens").uncheck()
    assert drafted.evaluate("e => getComputedStyle(e).backgroundColor") != tinted


def test_text_comes_while_it_is_written_and_stops(
    browser: Browser, demo: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(demo) as running:
        gate = Gate(demo, monkeypatch)
        page = browser.new_context().new_page()
        page.goto(running.url)
        settle(page, "Longest answer, tokens", "400")
        page.get_by_label("Message").fill("import os")
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("button", name="Stop (Esc)")).to_be_visible()
        expect(page.get_by_role("button", name="Send")).to_be_disabled()
        until(lambda: running.n_running() == 1)
        page.keyboard.press("Escape")
        gate.open()
        expect(page.get_by_role("button", name="Stop (Esc)")).to_be_hidden()
        until(lambda: running.n_running() == 0)
        expect(page.get_by_label("Message")).to_have_value("import os")  # nothing was said, nothing is lost
        page.context.close()


def test_the_same_text_without_the_draft(page: Page) -> None:
    with_draft = ask(page, "class Stack:", 40)
    page.get_by_role("button", name="Again without the draft").click()
    expect(page.locator("article.assistant")).to_have_count(2)
    verdict = page.locator("article.assistant").last.locator(".figures").last
    expect(verdict).to_contain_text("The same text")
    assert answer(page) == with_draft
    expect(page.locator("article.assistant").last.locator(".drafted")).to_have_count(0)


def test_a_reload_keeps_the_conversation(page: Page) -> None:
    settle(page, "Seed", "3")
    said = ask(page, "# a comment")
    page.reload()
    assert answer(page) == said
    expect(page.locator("article.user .text")).to_have_text("# a comment")
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Seed")).to_have_value("3")
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("article")).to_have_count(0)
    page.reload()
    expect(page.locator("article")).to_have_count(0)


HOSTILE = (
    "<img src=x onerror=alert(1)> **bold <b>x</b>** `<i>`\n```\n<script>alert(2)</script>\n```\n- <a href=x>"
)


def test_nothing_is_read_as_html(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Format answers").check()
    ask(page, HOSTILE, 8)
    expect(page.locator("article.user .text")).to_have_text(HOSTILE)
    tags = page.evaluate(
        """async (text) => {
            const place = document.createElement("div");
            place.append(...(await import("/markdown.js")).format(text));
            return [[...place.querySelectorAll("*")].map((e) => e.localName), place.textContent];
        }""",
        HOSTILE,
    )
    assert set(tags[0]) == {"p", "strong", "code", "pre", "ul", "li"}
    assert "<script>alert(2)</script>" in tags[1]
    assert page.locator("article img, article script, article a").count() == 0


def test_what_goes_wrong_is_said(page: Page) -> None:
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=429, json={"error": {"message": "full"}})
    )
    page.get_by_label("Message").fill("hello")
    page.get_by_label("Message").press("Enter")
    expect(page.get_by_role("alert")).to_have_text("full")
    expect(page.get_by_label("Message")).to_have_value("hello")
    expect(page.locator("article")).to_have_count(0)


def test_with_a_key(browser: Browser, demo: Pair) -> None:
    with served(demo, keys=("secret",), template=TEMPLATE) as running:
        page = browser.new_context().new_page()
        page.goto(running.url)
        expect(page.locator("#load")).to_contain_text("key")
        settle(page, "API key", "secret")
        ask(page, "x = 1", 8)
        stored = page.evaluate("JSON.stringify(localStorage)")
        assert "secret" not in stored
        page.context.close()
