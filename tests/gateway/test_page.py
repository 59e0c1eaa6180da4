"""The page that shows speculation live, driven in Debian's Chromium against a gateway without models."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.fakes.scripted_gateway import ScriptedGateway, ScriptedRound, serving
from tests.tools import missing

pytestmark = pytest.mark.slow

ROUNDS = (
    ScriptedRound(("The",)),
    ScriptedRound((" hens", " lay", " 12"), "draft", drafted=5),
    ScriptedRound((" eggs", "\n"), "suffix", drafted=1),
    ScriptedRound(("<b>", " & ", "done"), "prediction", drafted=2),
)
TEXT = "".join(text for one in ROUNDS for text in one.texts)
WIDE = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}
PATIENCE_MS = 60_000
"""However busy the machine is, nothing on the page takes as long."""
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        missing("chromium is not installed; scripts/browser installs the Debian package")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, gateway: ScriptedGateway, **settings: Any) -> Iterator[Page]:
    """Open the page of `gateway`; afterwards, no request has left it and nothing has failed but what it refused."""
    with serving(gateway) as url:
        context = browser.new_context(**{"viewport": WIDE, **settings})
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        hosts: set[str] = set()
        failures: list[str] = []
        page.on("request", lambda request: hosts.add(request.url[: len(url)]))
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.on(
            "console", lambda message: failures.append(message.text) if message.type in ("error", "warning") else None
        )
        page.goto(url)
        yield page
        context.close()
    assert hosts == {url}
    assert [one for one in failures if "responded with a status of 4" not in one] == []


def send(page: Page) -> None:
    page.get_by_role("button", name="Send").click()


def finished(page: Page) -> None:
    expect(page.locator("#status")).to_contain_text("the limit was reached")


def test_an_answer_appears_with_each_token_in_the_class_of_what_proposed_it(browser: Browser) -> None:
    with opened(browser, ScriptedGateway(ROUNDS)) as page:
        send(page)
        finished(page)
        tokens = page.locator("#answer .token")
        assert "".join(tokens.all_text_contents()) == TEXT
        expected = [one.source if at < one.accepted else "own" for one in ROUNDS for at in range(len(one.texts))]
        classes = [str(one.get_attribute("class")).split()[1] for one in tokens.all()]
        assert classes == expected
        expect(page.locator("#legend")).to_contain_text("draft service2 · 22 %")


def test_each_round_draws_a_line_with_its_drafts_and_hops(browser: Browser) -> None:
    with opened(browser, ScriptedGateway(ROUNDS)) as page:
        send(page)
        finished(page)
        expect(page.locator("#rounds .round")).to_have_count(len(ROUNDS))
        drafted = page.locator("#rounds .round").nth(1)
        expect(drafted.locator(".dot.draft")).to_have_count(2)
        expect(drafted.locator(".dot.rejected")).to_have_count(3)
        expect(drafted.locator(".part.propose")).to_have_count(3)
        expect(page.locator("#rounds .round").nth(0).locator(".part.propose")).to_have_count(0)
        expect(page.locator("#totals")).to_contain_text("2.25")
        drafted.hover()
        expect(page.locator("#round-detail")).to_contain_text("Round 2: 2 of 5 drafts accepted (draft service)")
        expect(page.locator("#answer .token.lit")).to_have_text([" hens", " lay", " 12"])


def test_what_the_form_says_is_what_is_asked(browser: Browser) -> None:
    gateway = ScriptedGateway(ROUNDS)
    with opened(browser, gateway) as page:
        page.get_by_label("Prompt").fill("How many?")
        page.get_by_label("Most tokens").fill("7")
        page.get_by_label("Temperature").fill("0.5")
        page.get_by_label("Seed").fill("11")
        page.get_by_label("Drafts a round").select_option("3")
        page.get_by_role("checkbox", name="text that repeats").uncheck()
        page.get_by_text("Prediction", exact=True).click()
        page.get_by_label("What the answer is expected to be").fill("Twelve.")
        send(page)
        finished(page)
        page.get_by_label("chat template").uncheck()
        send(page)
        finished(page)
    chat, plain_text = gateway.asked
    assert chat == {
        "path": "/v1/chat/completions",
        "model": "scripted:target",
        "stream": True,
        "messages": [{"role": "user", "content": "How many?"}],
        "stream_options": {"include_usage": True},
        "max_tokens": 7,
        "temperature": 0.5,
        "seed": 11,
        "prediction": {"type": "content", "content": "Twelve."},
        "paceline": {"tell": True, "sources": ["draft", "prediction", "heads"], "max_draft_count": 3},
    }
    assert (plain_text["path"], plain_text["prompt"]) == ("/v1/completions", "How many?")


def test_a_seed_that_a_browser_would_round_is_not_sent(browser: Browser) -> None:
    """It was sent as another one, whose output is another."""
    gateway = ScriptedGateway(ROUNDS)
    with opened(browser, gateway) as page:
        seed = page.get_by_label("Seed")
        seed.fill("9007199254740993")
        send(page)
        assert seed.evaluate("one => one.validity.rangeOverflow")
        assert not gateway.asked
        seed.fill("9007199254740991")
        send(page)
        finished(page)
    assert [one["seed"] for one in gateway.asked] == [(1 << 53) - 1]


def test_without_a_source_nothing_is_drafted(browser: Browser) -> None:
    gateway = ScriptedGateway(ROUNDS)
    with opened(browser, gateway) as page:
        for box in page.get_by_role("group", name="Drafts from").get_by_role("checkbox").all():
            box.uncheck()
        send(page)
        finished(page)
    assert gateway.asked[0]["paceline"] == {"tell": True, "max_draft_count": 0}


def test_plain_decoding_beside_it_has_the_same_seed_and_is_compared_token_for_token(browser: Browser) -> None:
    gateway = ScriptedGateway(ROUNDS)
    with opened(browser, gateway) as page:
        page.get_by_label("race plain decoding").check()
        send(page)
        expect(page.locator("#verdict")).to_contain_text("✓ equal, token for token")
        assert page.locator("#plain-answer").inner_text().replace("↵", "") == TEXT
        expect(page.locator("#rounds .round")).to_have_count(len(ROUNDS))
    plain, drafted = sorted(gateway.asked, key=lambda one: one["paceline"].get("max_draft_count", 1))
    assert plain["paceline"]["max_draft_count"] == 0
    assert plain["seed"] == drafted["seed"]


def test_a_difference_to_plain_decoding_is_told_with_its_place(browser: Browser) -> None:
    with opened(browser, ScriptedGateway(ROUNDS, plain_texts=("The", " ducks"))) as page:
        page.get_by_label("race plain decoding").check()
        send(page)
        expect(page.locator("#verdict")).to_contain_text("✗ they differ from token 2 on")


def test_a_refusal_and_an_error_within_the_stream_are_told_in_words(browser: Browser) -> None:
    with opened(browser, ScriptedGateway(refusal=(400, "max_tokens is 0; it must be at least 1"))) as page:
        send(page)
        expect(page.locator("#status.bad")).to_have_text("max_tokens is 0; it must be at least 1")
    with opened(browser, ScriptedGateway(ROUNDS, error="no target answers")) as page:
        send(page)
        expect(page.locator("#status.bad")).to_have_text("no target answers")
        expect(page.locator("#answer .token")).to_have_count(9)
        expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_gateway_that_knows_no_models_name_is_asked_all_the_same(browser: Browser) -> None:
    """Coordinators need not describe anything; the page told of a property of undefined then, and asked nothing."""
    gateway = ScriptedGateway(ROUNDS, model_ids=())
    with opened(browser, gateway) as page:
        send(page)
        finished(page)
    assert "model" not in gateway.asked[0]


def test_a_gateway_that_asks_for_a_token_gets_one(browser: Browser) -> None:
    with opened(browser, ScriptedGateway(ROUNDS, bearer_token="let me in")) as page:
        send(page)
        expect(page.get_by_label("Bearer token")).to_be_focused()
        page.keyboard.type("let me in")
        page.keyboard.press("Control+Enter")
        finished(page)
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]


def test_the_keyboard_alone_sends_stops_and_reads_tokens(browser: Browser) -> None:
    gateway = ScriptedGateway(ROUNDS, endless=True)
    with opened(browser, gateway) as page:
        page.keyboard.press("Tab")
        expect(page.get_by_label("Prompt")).to_be_focused()
        page.keyboard.press("Control+Enter")
        expect(page.locator("#answer .token")).to_have_count(9)
        page.keyboard.press("Escape")
        expect(page.locator("#status")).to_have_text("Stopped.")
        assert gateway.left.wait(PATIENCE_MS / 1000)
        while page.evaluate("!document.activeElement.classList.contains('token')"):
            page.keyboard.press("Tab")
        page.keyboard.press("ArrowRight")
        expect(page.locator("#token-detail")).to_contain_text('" hens" · id ')
        expect(page.locator("#token-detail")).to_contain_text("draft service · round 2")
        page.keyboard.press("Tab")
        assert page.evaluate("!document.activeElement.classList.contains('token')")


def test_the_stop_button_takes_the_place_and_the_focus_of_send(browser: Browser) -> None:
    with opened(browser, ScriptedGateway(ROUNDS, endless=True)) as page:
        page.get_by_role("button", name="Send").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Stop")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Send")).to_be_focused()


def test_the_cluster_is_shown_with_its_models_and_replicas(browser: Browser) -> None:
    with opened(browser, ScriptedGateway()) as page:
        shown = page.get_by_role("region", name="Cluster")
        for words in (
            "scripted:target",
            "8.48 M parameters",
            "down, circuit half open",
            "73 % of 5.12 k drafts",
            "71 %",
        ):
            expect(shown).to_contain_text(words)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_shows_everything_without_sideways_scrolling(browser: Browser, scheme: str) -> None:
    with opened(browser, ScriptedGateway(ROUNDS), viewport=PHONE, color_scheme=scheme) as page:
        page.get_by_label("race plain decoding").check()
        send(page)
        expect(page.locator("#verdict")).to_contain_text("✓ equal")
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (max(ground) < 60) == (scheme == "dark")
