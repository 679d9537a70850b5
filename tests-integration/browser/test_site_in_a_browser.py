"""Every page of the built site in Chromium, on a phone and on a desktop, light and dark; and its search.

`nox -s site-pages` builds the site and runs these tests, where Debian's Chromium is installed.
"""

from __future__ import annotations

import http.server
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / ".nox" / "site"
WIDTHS = (390, 1280)
SCHEMES = ("light", "dark")

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and prints nothing."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Leave requests out of the output."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the built site is served: its search reads pages, which a browser does not allow for files."""
    if not (SITE / "index.html").exists():
        pytest.skip("needs the site, which `nox -s docs` builds")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any, said: list[str]) -> Iterator[Any]:
    opened = browser.new_page()
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("requestfailed", lambda request: said.append(f"{request.url}: {request.failure}"))
    opened.on("response", lambda answer: said.extend([answer.url] if answer.status >= 400 else []))
    yield opened
    opened.close()


@pytest.fixture
def said() -> list[str]:
    """What pages print, and what they cannot load."""
    return []


def names() -> list[str]:
    """The pages; those that are shown inside of others are tested where they are made."""
    paths = (path.relative_to(SITE) for path in sorted(SITE.rglob("*.html")))
    return [path.as_posix() for path in paths if path.parts[0] != "_static"]


def problems(page: Any) -> list[str]:
    """What does not fit, or is not shown, in the window as it is now."""
    return page.evaluate(
        """() => {
          const found = [], width = document.documentElement.clientWidth;
          if (document.documentElement.scrollWidth > width) {
            const wide = [...document.querySelectorAll("article *")].filter((one) =>
              one.getBoundingClientRect().right > width + 1 && !one.closest("pre, .table-wrapper, .highlight"));
            found.push(`is wider than the window: ${wide.slice(0, 3).map((one) => one.outerHTML.slice(0, 80))}`);
          }
          for (const image of document.images)
            if (image.complete && !image.naturalWidth) found.push(`does not show ${image.src}`);
          for (const image of document.querySelectorAll("article img"))
            if (!image.alt) found.push(`has no text for ${image.src}`);
          return found;
        }"""
    )


@pytest.mark.timeout(1500)
def test_every_page_fits_and_is_silent(page: Any, address: str, said: list[str]) -> None:
    wrong, tried = [], names()
    for name in tried:
        page.goto(f"{address}/{name}")
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 900})
                wrong += [f"{name} at {width} px, {scheme}: {one}" for one in problems(page)]
        wrong += [f"{name}: {text}" for text in said]
        said.clear()
    assert wrong == []
    assert len(tried) > 100


def test_code_of_the_front_page_fits_a_phone(page: Any, address: str) -> None:
    page.set_viewport_size({"width": 390, "height": 900})
    page.goto(f"{address}/index.html")
    blocks = page.evaluate("[...document.querySelectorAll('pre')].map((one) => [one.scrollWidth, one.clientWidth])")
    assert blocks
    assert [widths for widths in blocks if widths[0] > widths[1]] == []


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_the_loop_of_the_front_page_moves_only_for_those_who_want_it(page: Any, address: str, motion: str) -> None:
    page.emulate_media(reduced_motion=motion)
    page.goto(f"{address}/index.html")
    moving = page.evaluate("document.querySelector('.conversion').getAnimations({subtree: true}).length")
    assert (moving > 0) == (motion == "no-preference")
    page.evaluate("Promise.all(document.getAnimations().map((one) => one.finished))")
    lines = page.evaluate(
        "[...document.querySelectorAll('.conversion .gi')].map((one) => getComputedStyle(one).opacity)"
    )
    assert set(lines) == {"1"}


@pytest.mark.parametrize(
    ("typed", "first"),
    [
        ("cannot shard a model", "Cannot shard a model with FSDP."),
        ("accel_state.errors.SettingError: Cannot prepare Linear separately.", "Cannot prepare … separately."),
        ("mixed_precision", "mixed_precision"),
        ("--fsdp-offload-params", "cpu_offload"),
        ("ACCELERATE_MIXED_PRECISION", "mixed_precision"),
    ],
)
def test_the_search_shows_messages_and_settings_first(page: Any, address: str, typed: str, first: str) -> None:
    page.goto(f"{address}/search.html")
    page.evaluate("typed => { window.location.search = '?' + new URLSearchParams({q: typed}) }", typed)
    link = page.locator(".first-results a").first
    link.wait_for()
    assert link.text_content() == first
    link.click()
    page.wait_for_url("**#*")
    anchor = page.url.partition("#")[2]
    assert page.evaluate("name => !!document.getElementById(name)", anchor)


def test_navigation_folds_and_shows_the_group_of_the_page(page: Any, address: str) -> None:
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"{address}/how-to/fsdp.html")
    assert page.locator(".sidebar-tree details[open] > summary").all_text_contents() == ["Scale out"]
    page.locator(".sidebar-tree summary", has_text="Reference").click()
    assert page.locator(".sidebar-tree a", has_text="Glossary").is_visible()
    assert page.locator(".version-links a").count() == 3
    assert page.locator("a[rel=edit]").count() == 1


def test_tabs_of_backends_change_together(page: Any, address: str) -> None:
    page.goto(f"{address}/how-to/which-backend.html")
    page.locator("label.sd-tab-label", has_text="deepspeed").first.click()
    assert page.locator("pre:visible", has_text="--use_deepspeed").count() >= 1
    assert page.locator("pre:visible", has_text="--use_fsdp").count() == 0


@pytest.mark.parametrize("theme", SCHEMES)
def test_pictures_follow_the_theme_that_is_chosen_on_the_page(page: Any, address: str, theme: str) -> None:
    page.emulate_media(color_scheme="light" if theme == "dark" else "dark")
    page.goto(f"{address}/how-to/checkpoints.html")
    page.evaluate("theme => { document.body.dataset.theme = theme }", theme)
    assert page.evaluate("getComputedStyle(document.querySelector('article img')).colorScheme") == theme
