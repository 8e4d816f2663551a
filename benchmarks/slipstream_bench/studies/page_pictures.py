"""Pictures of the live page: light, dark and on a phone, while other clients are answered, too.

    python -m slipstream_bench.studies.page_pictures FOLDER

FOLDER gets `page.png`, `page-dark.png` and `page-phone.png`. Needs the extra `dev` and Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import threading
from pathlib import Path
from typing import Any

from slipstream import Client, SamplingParams, Stack

_CHROMIUM = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_QUESTIONS = ("What is an assert statement?", "Explain lambda expressions.")
_NUM_OTHERS = 4
_FILLED_MS = 50_000  # until the charts, which show a minute, have something to show
_PATIENCE_MS = 120_000
_PICTURES: dict[str, dict[str, Any]] = {
    "page": {"viewport": {"width": 1280, "height": 990}, "color_scheme": "light"},
    "page-dark": {"viewport": {"width": 1280, "height": 990}, "color_scheme": "dark"},
    "page-phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"},
}


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    is_over = threading.Event()
    with Stack(http_port=0) as stack:
        others = [
            threading.Thread(target=_ask, args=(stack, number, is_over))
            for number in range(_NUM_OTHERS)
        ]
        for each in others:
            each.start()
        try:
            _take(str(stack.http_address), folder)
        finally:
            is_over.set()
            for each in others:
                each.join()


def _ask(stack: Stack, number: int, is_over: threading.Event) -> None:
    params = SamplingParams(temperature=1, max_tokens=300, seed=number)
    with Client(stack.address) as client:
        while not is_over.is_set():
            client.generate(f"Other {number}", params)


def _take(url: str, folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    path = next((found for name in _CHROMIUM if (found := shutil.which(name))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        pages = {}
        for name, options in _PICTURES.items():
            page = browser.new_context(**options).new_page()
            page.set_default_timeout(_PATIENCE_MS)
            page.goto(url)
            for question in _QUESTIONS:
                page.locator("#prompt").fill(question)
                page.locator("#send").click()
                page.locator("#turns[aria-busy=true]").wait_for()
                page.locator("#turns[aria-busy=false]").wait_for()
            page.locator("#zoom label:has(input[value='200000'])").click()
            pages[name] = page
        next(iter(pages.values())).wait_for_timeout(_FILLED_MS)
        for name, page in pages.items():
            page.bring_to_front()
            page.evaluate("scrollTo(0, 0)")
            page.screenshot(path=folder / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
