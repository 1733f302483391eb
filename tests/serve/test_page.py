"""The page in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Request, expect, sync_playwright

from llamaspec import Pair
from llamaspec.measure.verdict import gain_in_words
from patience import PATIENCE, until
from serving import TEMPLATE, Gate, Served, served
from shelf import NAMES, Shelf, several

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
    """The page in a new browser profile. Any error in its console fails the test."""
    context = browser.new_context()
    context.set_default_timeout(1000 * PATIENCE)
    expect.set_options(timeout=1000 * PATIENCE)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.goto(server.url)
    yield page
    context.close()
    assert [said for said in complaints if "429" not in said] == []  # some tests provoke these


@pytest.fixture(scope="module")
def scripts(browser: Browser, server: Served) -> Page:
    """A page whose modules are called."""
    page = browser.new_context().new_page()
    page.goto(server.url)
    return page


def ask(page: Page, text: str, n: int = 24) -> str:
    """Send a message and wait for the whole answer."""
    settle(page, "Maximum tokens per answer", str(n))
    before = page.locator("article.assistant").count()
    field(page, "Message").fill(text)
    field(page, "Message").press("Enter")
    expect(page.locator("article.assistant")).to_have_count(before + 1)
    expect(page.locator("article.assistant").last.locator(".how strong")).to_contain_text("tokens/s")
    return answer(page)


def field(page: Page, label: str) -> Locator:
    return page.get_by_label(label, exact=True)


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).last.click()


def messages(page: Page) -> list[dict[str, Any]]:
    """Return the messages that the browser has stored of the open conversation."""
    kept = "JSON.parse(localStorage.getItem('llamaspec/chat/' + location.hash.slice(1))).messages"
    return list(page.evaluate(kept))


def body_of(request: Request) -> dict[str, Any]:
    """Return the JSON of a request."""
    return dict(request.post_data_json or {})


def answer(page: Page) -> str:
    return str(messages(page)[-1]["content"])


def settle(page: Page, label: str, value: str) -> None:
    page.get_by_role("button", name="Settings").click()
    field(page, label).fill(value)
    press(page, "Done")


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
    expect(field(page, "Message")).to_have_value("")


def test_how_an_answer_was_generated(browser: Browser, demo: Pair) -> None:
    """With drafts of a fixed length: whether drafting is worth it depends on the machine."""
    with served(demo) as running:
        page = browser.new_context().new_page()
        page.goto(running.url)
        said = ask(page, "import os\nimport sys\n", 48)
        page.locator(".how summary").last.click()
        drafted = page.locator(".how .plain .drafted:not(p > *)").first
        expect(drafted).to_be_attached()  # it may be a line break, which is not visible
        assert page.locator(".how .plain").last.inner_text().endswith(said)
        plain = page.locator(".how .plain").last.evaluate("e => getComputedStyle(e).backgroundColor")
        assert drafted.evaluate("e => getComputedStyle(e).backgroundColor") != plain
        assert page.locator(".chart").last.locator("rect.verify").count() > 0
        expect(page.locator(".how > p").last).to_contain_text("Generated 48 in")
        page.context.close()


def test_an_answer_is_stopped_and_regenerated(
    browser: Browser, demo: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(demo) as running:
        gate = Gate(demo, monkeypatch)
        page = browser.new_context().new_page()
        page.goto(running.url)
        field(page, "Message").fill("import os")
        press(page, "Send")
        expect(page.get_by_role("button", name="Stop (Esc)")).to_be_visible()
        expect(page.get_by_role("button", name="Send")).to_be_hidden()
        until(lambda: running.n_running() == 1)
        page.keyboard.press("Escape")
        gate.open()
        expect(page.get_by_role("button", name="Stop (Esc)")).to_be_hidden()
        until(lambda: running.n_running() == 0)
        expect(page.locator(".notes")).to_have_text("Stopped.")
        expect(page.locator(".status")).to_be_hidden()
        expect(page.get_by_role("button", name="Continue")).to_be_hidden()  # there is no text yet
        press(page, "Regenerate")
        expect(page.locator(".how strong")).to_contain_text("tokens/s")
        assert [message["role"] for message in messages(page)] == ["user", "assistant"]
        page.context.close()


def test_the_page_scrolls_with_the_text_only_at_its_end(
    browser: Browser, demo: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(demo) as running:
        gate = Gate(demo, monkeypatch)
        page = browser.new_context(viewport={"width": 390, "height": 400}).new_page()
        page.goto(running.url)
        field(page, "Message").fill("x\n" * 60)
        field(page, "Message").press("Enter")
        until(lambda: running.n_running() == 1)
        position = "document.getElementById('conversation').scrollTop"
        assert page.evaluate(position) > 0
        page.evaluate(f"{position} = 0")
        gate.open()
        expect(page.locator(".how strong")).to_contain_text("tokens/s")
        assert page.evaluate(position) == 0
        page.context.close()


def test_the_same_text_without_the_draft(page: Page) -> None:
    ask(page, "class Stack:", 40)
    with page.expect_request("**/v1/chat/completions") as asked:
        press(page, "Compare without drafts")
    assert body_of(asked.value)["speculative"] == {"enabled": False}
    measured = page.locator(".notes .note", has_text="Measured")
    expect(measured).to_contain_text("The text is the same.")
    expect(measured).to_contain_text("tokens/s without.")
    expect(page.locator("article.assistant")).to_have_count(1)


def test_a_reload_keeps_conversations(page: Page) -> None:
    settle(page, "Seed", "3")
    said = ask(page, "a = comment")
    page.reload()
    assert answer(page) == said
    expect(page.locator("article.user .text")).to_have_text("a = comment")
    page.get_by_role("button", name="Settings").click()
    expect(field(page, "Seed")).to_have_value("3")
    press(page, "Done")
    press(page, "New chat")
    expect(page.locator("article")).to_have_count(0)
    ask(page, "x = 1")
    page.once("dialog", lambda dialog: dialog.accept("The <b>second</b>"))
    press(page, "Rename x = 1")
    page.reload()
    titles = page.locator("#list .title")
    expect(titles).to_have_text(["The <b>second</b>", "a = comment"])
    page.once("dialog", lambda dialog: dialog.accept())
    press(page, "Delete The <b>second</b>")
    expect(titles).to_have_text(["a = comment"])
    page.get_by_role("button", name="a = comment", exact=True).click()
    expect(page.locator("article.user .text")).to_have_text("a = comment")
    assert answer(page) == said


def shown(page: Page) -> list[str]:
    """Return what the messages of the open conversation say."""
    return [str(message["content"]) for message in messages(page)]


def test_versions_of_a_conversation(page: Page, tmp_path: Path) -> None:
    page.set_viewport_size({"width": 390, "height": 700})
    old = ["first", ask(page, "first", 8)]
    with page.expect_request("**/v1/chat/completions") as asked:
        old += ["second", ask(page, "second", 8)]
    assert [message["content"] for message in body_of(asked.value)["messages"]] == old[:3]
    page.get_by_role("button", name="Edit", exact=True).first.click()
    field(page, "Edited message").fill("third")
    field(page, "Edited message").press("Enter")
    expect(page.locator(".how strong")).to_have_count(1)
    edited = shown(page)
    press(page, "Regenerate")
    expect(page.locator(".versions")).to_have_text(["‹2/2›", "‹2/2›"])
    expect(page.locator(".how strong")).to_have_count(1)
    regenerated = shown(page)
    assert regenerated[0] == edited[0] == "third"
    assert regenerated != edited  # another seed
    press(page, "Previous version")
    expect(page.locator(".versions")).to_have_text(["‹2/2›", "‹1/2›"])
    assert shown(page) == edited
    page.reload()
    page.get_by_role("button", name="Previous version").first.click()
    expect(page.locator("article.user .text")).to_have_text(["first", "second"])
    assert shown(page) == old
    expect(page.get_by_role("button", name="Previous version")).to_be_focused()
    assert page.evaluate("document.documentElement.scrollWidth") == 390

    press(page, "Chats")
    with page.expect_download() as download:
        press(page, "Export")
    download.value.save_as(tmp_path / "chats.json")
    page.evaluate("localStorage.clear()")
    page.reload()
    page.locator("#chats-file").set_input_files(tmp_path / "chats.json")
    press(page, "Chats")
    page.get_by_role("button", name="first", exact=True).click()
    press(page, "Next version")
    assert shown(page) == edited
    press(page, "Next version")
    assert shown(page) == regenerated


def test_an_answer_is_continued(page: Page) -> None:
    settle(page, "Seed", "7")
    whole = ask(page, "def add(a, b):", 16)
    press(page, "New chat")
    begun = ask(page, "def add(a, b):", 8)
    assert whole.startswith(begun)
    with page.expect_request("**/v1/chat/completions") as asked:
        press(page, "Continue")
    assert body_of(asked.value)["messages"][-1] == {"role": "assistant", "content": begun}
    expect(page.locator(".notes .note").last).to_have_text(
        "These are the figures of the part that was added last."
    )
    assert answer(page) == whole
    press(page, "Compare without drafts")
    expect(page.locator(".notes .note", has_text="Measured")).to_contain_text("The text is the same.")


def test_a_partial_answer_survives_a_reload(
    browser: Browser, demo: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(demo) as running:
        gate = Gate(demo, monkeypatch, n_free=8)
        page = browser.new_context().new_page()
        page.goto(running.url)
        field(page, "Message").fill("import os")
        press(page, "Send")
        expect(page.locator("article.assistant .text")).not_to_be_empty()
        until(lambda: messages(page)[-1].get("cut") is True)  # so it survives a crash, too
        page.reload()
        expect(page.locator("article .error")).to_contain_text("connection was lost")
        begun = answer(page)
        assert begun
        gate.open()
        settle(page, "Maximum tokens per answer", "8")
        press(page, "Continue")
        expect(page.locator(".how strong")).to_contain_text("tokens/s")
        assert answer(page).startswith(begun)
        assert answer(page) != begun
        page.context.close()


def test_a_request_in_the_queue_waits(browser: Browser, demo: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page said that its prompt was processed."""
    with served(demo, parallel=1) as running:
        gate = Gate(demo, monkeypatch)
        page = browser.new_context().new_page()
        page.goto(running.url)
        status = page.locator(".status")
        with running.sent("/v1/completions", {"prompt": "x"}):
            until(lambda: running.n_running() == 1)
            field(page, "Message").fill("import os")
            press(page, "Send")
            expect(status).to_have_text("Waiting for other requests…")
        expect(status).to_have_text("Processing the prompt…")
        gate.open()
        expect(page.locator(".how strong")).to_contain_text("tokens/s")
        page.context.close()


def test_the_speed_so_far_is_shown(page: Page) -> None:
    """After half a second, from the first text on: here 10 and 20 tokens in about .6 and 1.2 seconds."""
    shown = page.evaluate(
        """async () => {
            const chunk = { choices: [{ delta: { content: "a" } }], n_tokens: 10 };
            const body = new ReadableStream({
                async start(controller) {
                    const send = (data) => controller.enqueue(new TextEncoder().encode(`data: ${data}\n\n`));
                    for (let i = 0; i < 3; i++) {
                        send(JSON.stringify(chunk));
                        await new Promise((resolve) => setTimeout(resolve, 600));
                    }
                    send("[DONE]");
                },
            });
            const asked = window.fetch;
            window.fetch = async (path, request) =>
                path === "v1/chat/completions" ? new Response(body) : asked(path, request);
            const shown = [];
            const { receive } = await import("/answers.js");
            await receive({ content: "" }, {}, "", undefined, ({ status }) => shown.push(status));
            return shown;
        }"""
    )
    assert shown[0] == ""
    for status in shown[1:]:
        number, unit = status.split(" ")
        assert unit == "tokens/s"
        assert 5 < float(number) < 20


def test_chats_are_searched(page: Page) -> None:
    expect(field(page, "Search chats")).to_be_hidden()
    settle(page, "Seed", "7")
    said = ask(page, "Alpha", 8)
    press(page, "New chat")
    ask(page, "beta", 8)
    page.get_by_role("button", name="Edit", exact=True).click()
    field(page, "Edited message").fill("gamma")
    field(page, "Edited message").press("Enter")
    expect(page.locator(".versions")).to_have_text("‹2/2›")
    titles, search = page.locator("#list .title"), field(page, "Search chats")
    search.fill("ALPH")
    expect(titles).to_have_text(["Alpha"])
    search.fill(max(said.splitlines(), key=len).strip())
    expect(titles.last).to_have_text("Alpha")
    search.fill("gamma")  # the title is "beta"
    expect(titles).to_have_text(["beta"])
    search.fill("omega")
    expect(page.locator("#list")).to_have_text("No chat contains this.")
    search.press("Escape")
    expect(titles).to_have_text(["beta", "Alpha"])


def test_themes(browser: Browser, server: Served) -> None:
    page = browser.new_context(color_scheme="dark").new_page()
    page.goto(server.url)
    paper = "getComputedStyle(document.body).backgroundColor"
    of = {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 28)"}
    assert page.evaluate(paper) == of["dark"]
    for theme in ("light", "dark"):
        page.get_by_role("button", name="Settings").click()
        field(page, "Theme").select_option(theme)
        press(page, "Done")
        assert page.evaluate(paper) == of[theme]
        page.reload()
        assert page.evaluate(paper) == of[theme]
    page.context.close()


HOSTILE = (
    "<img src=x onerror=alert(1)> **bold <b>x</b>** `<i>`\n```<u>\n<script>alert(2)</script>\n```\n"
    "- <a href=x>\n- [a](javascript:alert(3)) ![b](http://x.example/y.png) [c](data:text/html,x)"
)
RENDER = """async (texts) => {
    const place = document.createElement("div");
    const { render } = await import("/markdown.js");
    for (const text of texts) render(place, text);
    return [[...place.querySelectorAll("*")].map((e) => e.localName), place.textContent,
            [...place.querySelectorAll("a")].map((e) => [e.getAttribute("href"), e.rel]), place.innerHTML];
}"""


def test_nothing_is_parsed_as_html(page: Page, server: Served) -> None:
    ask(page, HOSTILE, 8)
    expect(page.locator("article.user .text")).to_contain_text("<script>alert(2)</script>")
    tags, text, links, _ = page.evaluate(RENDER, [HOSTILE])
    known = {"p", "strong", "code", "pre", "ul", "li", "figure", "figcaption", "span", "button", "a"}
    assert set(tags) == known
    assert "<script>alert(2)</script>" in text
    assert "[a](javascript:alert(3))" in text
    assert links == [["http://x.example/y.png", "noopener noreferrer"]]
    # An answer may have a link of its own.
    assert page.locator("article img, article script, article.user a[href^='javascript']").count() == 0
    policy = server.client.get("/").headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "trusted-types 'none'" in policy


def test_text_that_grows_looks_like_the_whole_text(scripts: Page) -> None:
    text = "# a\n\n1. b\n   - c\n\n```py\nx = 1\n\ny\n```\n\n$$\nx\n= \\frac{1}{2}\n$$\n"
    text += "\n| d | e |\n|---|--:|\n| f | *g* |\n\nh\ni"
    grown = scripts.evaluate(RENDER, [text[:n] for n in range(len(text) + 1)])
    assert grown == scripts.evaluate(RENDER, [text])
    assert {"h1", "ol", "ul", "table", "em", "br", "mfrac"} <= set(grown[0])


@pytest.mark.parametrize(
    ("text", "n"),
    [
        (r"so $x^2$ and \(y_1\), twice", 2),
        ("$$\na\n= b\n$$", 1),
        (r"\[ \frac{1}{2} \]", 1),
        ("it costs $5 or $6, `$x$` and \\$y$", 0),
        ("```tex\n$x$\n```", 0),
        (r"$\unknown{x}$ and $\href{javascript:alert(1)}{x}$", 0),
    ],
)
def test_formulas(scripts: Page, text: str, n: int) -> None:
    tags, shown, links, _ = scripts.evaluate(RENDER, [text])
    assert tags.count("math") == n
    assert links == []
    assert n > 0 or all(part in shown for part in re.findall(r"\$.+?\$", text))


def test_code_is_coloured(scripts: Page) -> None:
    tags, text, _, markup = scripts.evaluate(
        RENDER, ["```python\ndef f(): return '<b>'\n```\n```nonsense\ndef\n```"]
    )
    assert "b" not in tags
    assert "def f(): return '<b>'\n" in text
    assert markup.count('class="hl-keyword"') == 2  # none in a language that is not known


def test_a_chat_keeps_its_system_prompt(page: Page) -> None:
    settle(page, "System prompt of this chat", "Be brief.")
    settle(page, "Top-p", "0.5")
    with page.expect_request("**/chat/completions") as sent:
        ask(page, "`import os`\n", 4)
    body = body_of(sent.value)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["top_p"] == 0.5
    assert "chat_template_kwargs" not in body
    expect(page.locator("#list .title")).to_have_text("import os")
    press(page, "New chat")
    settle(page, "System prompt of this chat", "Be long.")
    page.get_by_role("button", name="Settings").click()
    field(page, "Reasoning").select_option("off")
    press(page, "Done")
    with page.expect_request("**/chat/completions") as sent:
        ask(page, "a", 4)
    assert body_of(sent.value)["messages"][0]["content"] == "Be long."
    assert body_of(sent.value)["chat_template_kwargs"] == {"enable_thinking": False}
    page.get_by_role("button", name="import os", exact=True).click()
    assert page.locator("#system").input_value() == "Be brief."


def test_code_is_copied(page: Page, server: Served) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    page.evaluate(
        """async () => (await import("/markdown.js")).render(conversation, "```py\\n<b>x</b> = 1\\n```")"""
    )
    page.evaluate("window.setTimeout = () => {}")  # otherwise the label would change back
    page.locator("figure.code button").click()
    expect(page.locator("figure.code button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "<b>x</b> = 1\n"


def test_files(page: Page) -> None:
    def attach(name: str, content: bytes) -> None:
        page.locator("#file").set_input_files({"name": name, "mimeType": "text/plain", "buffer": content})

    attach("a.py", b"x = '```'\n")
    attach("b.bin", b"\xff\x00")
    expect(page.get_by_role("alert").first).to_have_text("b.bin is not a text file.")
    attach("c.txt", 256001 * b"c")
    expect(page.get_by_role("alert").first).to_have_text("c.txt is larger than 256 kB.")
    expect(page.locator("#files li")).to_have_count(1)
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "Why?", 8)
    expect(page.locator("#files li")).to_have_count(0)
    assert body_of(asked.value)["messages"] == [
        {"role": "user", "content": "Why?\n\na.py:\n````\nx = '```'\n````"}
    ]


def test_errors_are_shown(page: Page) -> None:
    path = "**/v1/chat/completions"
    page.route(path, lambda route: route.fulfill(status=429, json={"error": {"message": "full"}}))
    field(page, "Message").fill("hello")
    field(page, "Message").press("Enter")
    said = page.locator("article.assistant .error")
    expect(said).to_have_text("full")
    page.reload()  # an error is kept, too
    expect(said).to_have_text("full")
    page.unroute(path)
    page.route(path, lambda route: route.fulfill(body=': prompt 1/2\n\ndata: {"choices": []}\n\n'))
    press(page, "Retry")
    expect(said).to_contain_text("connection was lost")
    page.unroute(path)
    press(page, "Retry")
    expect(page.locator(".how strong")).to_contain_text("tokens/s")
    assert [message["role"] for message in messages(page)] == ["user", "assistant"]
    expect(page.locator(".versions")).to_have_count(0)  # what has no text is no version


def test_the_progress_of_a_prompt(page: Page) -> None:
    body = ": loading a b\n\n: waiting\n\n: working\n\n: prompt 5/20\n\ndata: {}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    events = page.evaluate(
        """async () => {
            const events = [];
            for await (const event of (await import("/client.js")).chat({}, "")) events.push(event);
            return events;
        }"""
    )
    assert events == [
        {"loading": "a b"},
        {"waiting": True},
        {"working": True},
        {"processed": 5, "of": 20},
        {},
    ]


TIMINGS = {
    "predicted_n": 187,
    "predicted_per_second": 25.0,
    "draft_n": 140,
    "draft_n_accepted": 122,
    "rounds": 65,
}
UNUSED = {"reading_seconds": 3.14, "saved_seconds": 1.2}


WORDS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"speedup_estimate": 1.87},
        "25.0 tokens/s, 1.9 times as fast as without drafts (estimate)",
        "122 of 140 draft tokens were accepted, so 187 tokens took 65 evaluations of the model.",
    ),
    (
        {"speedup_estimate": 0.98, "copied": {"drafted": 20, "accepted": 9}},
        "25.0 tokens/s, about as fast as without drafts (estimate)",
        "122 of 140 draft tokens were accepted, 9 of them copied, "
        "so 187 tokens took 65 evaluations of the model.",
    ),
    (
        {"speedup_estimate": 0.812, "copied": {"drafted": 140, "accepted": 8}, "draft_n_accepted": 8},
        "25.0 tokens/s, 19% slower than without drafts (estimate)",
        "Only 8 of 140 draft tokens were accepted, all copied: drafting took more time than it saved.",
    ),
    (
        {"speedup_estimate": 1.0, "draft_n": 0, "unused_draft": UNUSED},
        "25.0 tokens/s",
        "The draft model was not used: it would have taken 3.1 s to process the prompt, "
        "and saved about 1.2 s.",
    ),
    (
        {"draft_n": 0, "unused_draft": {**UNUSED, "saved_seconds": 0.0}},
        "25.0 tokens/s",
        "The draft model was not used, because no gain was expected.",
    ),
    (
        {"draft_n": 0, "draft_fault": "out of memory"},
        "25.0 tokens/s",
        "The draft model failed and is no longer used: out of memory.",
    ),
    (
        {"draft_n": 0},
        "25.0 tokens/s",
        "No draft token was verified, because none was expected to save time.",
    ),
]


def test_speed_in_words(scripts: Page) -> None:
    say = (
        "async (all) => { const speed = await import('/speed.js'); "
        "return all.map((t) => [speed.claim(t), speed.reason(t)]); }"
    )
    told = scripts.evaluate(say, [{**TIMINGS, **timings} for timings, *_ in WORDS])
    assert told == [[claim, reason] for _, claim, reason in WORDS]


def test_tokens_from_text_prediction_and_earlier_answers_are_copied(scripts: Page) -> None:
    sources = ("model", "ngram", "prediction", "earlier")
    rounds = [{"source": source, "drafted": 4, "accepted": 3} for source in sources]
    say = "async (rounds) => (await import('/answers.js')).copied(rounds)"
    assert scripts.evaluate(say, rounds) == {"drafted": 12, "accepted": 9}


def test_the_page_and_the_log_tell_a_gain_in_the_same_words(scripts: Page) -> None:
    """The log said .92 where the page said "about as fast"."""
    gains = [0.5, 0.92, 0.98, 1.02, 1.05, 1.096, 1.1, 1.87]
    say = "async (all) => { const { claim } = await import('/speed.js'); return all.map(claim); }"
    told = scripts.evaluate(say, [{**TIMINGS, "speedup_estimate": gain} for gain in gains])
    assert told == [f"25.0 tokens/s, {gain_in_words(gain)}" for gain in gains]


def test_on_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 700})
    ask(page, "import os\n" * 12, 64)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    speed, form = page.locator(".how").bounding_box(), page.locator("#form").bounding_box()
    assert speed is not None
    assert form is not None
    assert speed["y"] + speed["height"] <= form["y"]
    expect(page.locator("#chats")).to_be_hidden()
    press(page, "Chats")
    expect(page.get_by_role("button", name="New chat")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#chats")).to_be_hidden()
    expect(page.get_by_role("button", name="Chats")).to_be_focused()


def test_files_that_are_no_chats(page: Page) -> None:
    chosen = page.locator("#chats-file")
    chosen.set_input_files({"name": "x.json", "mimeType": "text/plain", "buffer": b"[1]"})
    expect(page.locator("#problem")).to_contain_text("x.json is not a file of chats")
    message = {"role": "user", "content": "hello", "versions": [[]]}
    chat = {"id": "x", "title": "odd", "messages": [message]}
    odd = json.dumps({"kind": "llamaspec-chats", "chats": [chat]})
    chosen.set_input_files({"name": "y.json", "mimeType": "text/plain", "buffer": odd.encode()})
    expect(page.locator("#problem")).to_be_empty()
    expect(page.locator("#list .title")).to_have_count(0)


def test_a_model_is_chosen(browser: Browser, shelf: Shelf) -> None:
    with several(shelf) as running:
        page = browser.new_context(viewport={"width": 390, "height": 700}).new_page()
        page.goto(running.url)
        menu = page.get_by_label("Model", exact=True)
        expect(menu.locator("option")).to_have_text(list(NAMES))
        menu.select_option("gamma")
        with page.expect_request("**/v1/chat/completions") as asked:
            ask(page, "Hello", 8)
        assert body_of(asked.value)["model"] == "gamma"
        page.locator(".how summary").click()
        expect(page.locator(".how > p")).to_contain_text("Model: gamma")
        expect(menu.locator("option:checked")).to_have_text("gamma (loaded)")
        page.reload()
        expect(menu).to_have_value("gamma")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.context.close()


def test_with_a_key(browser: Browser, demo: Pair) -> None:
    with served(demo, keys=("secret",), template=TEMPLATE) as running:
        page = browser.new_context().new_page()
        page.goto(running.url)
        expect(page.locator("#problem")).to_contain_text("API key")
        settle(page, "API key", "secret")
        expect(page.locator("#problem")).to_be_empty()
        ask(page, "x = 1", 8)
        stored = page.evaluate("JSON.stringify(localStorage)")
        assert "secret" not in stored
        page.context.close()
