"""A real browser for tests of pages. Nothing here is a test."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--window-size=1280,900"),
)


@contextmanager
def started(folder: Path) -> Iterator[Any]:
    """Chromium without a window, its profile in `folder`; the test is skipped where there is none."""
    chromium, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium with chromedriver on this machine (Debian: apt-get install chromium chromium-driver)")
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = selenium.Chrome(options=options, service=Service(driver))
    try:
        yield found
    finally:
        found.quit()


class Page:
    """One page in the browser."""

    def __init__(self, browser, path: Path) -> None:
        self.browser = browser
        browser.get(path.as_uri())
        self.wait("return document.readyState === 'complete' && document.body !== null")  # `get` may return before there is one
        if "bokeh.js" in path.read_text(encoding="utf-8"):
            self.wait("return document.body.dataset.charts === 'drawn'")

    def __call__(self, script: str, *values):
        return self.browser.execute_script(script, *values)

    def wait(self, condition: str) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.browser, 20).until(lambda _: self(condition))

    def find(self, selector: str):
        return self.browser.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return self.find(selector).text

    def choose(self, selector: str, value: object) -> None:
        """As a person would: set the control, and tell the page."""
        self(
            "const one = document.querySelector(arguments[0]); one.value = arguments[1];"
            "for (const kind of ['input', 'change']) one.dispatchEvent(new Event(kind, { bubbles: true }));",
            selector,
            str(value),
        )

    def draw(self) -> None:
        """Bring the first chart that is shown into view, and wait until it is drawn."""
        first = "[...document.querySelectorAll('.chart')].find((one) => one.offsetParent)"
        self(f"{first}.scrollIntoView()")
        self.wait(f"return {first}.classList.contains('drawn')")

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
