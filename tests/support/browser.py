"""A real browser that is logged in to a console."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from selenium import webdriver

from tests.support import surroundings
from tests.support.polling import poll


@dataclass
class Laptop:
    """What starts cloudjob's commands and its console."""

    folder: Path
    store: Path
    python: str = ""
    prefix: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    environ: dict[str, str | bytes] = field(default_factory=dict)

    def chown_to(self, user: int) -> None:
        for path in (self.folder, *self.folder.rglob("*")):
            os.chown(path, user, user)


def run(
    home: Path, *args: str | Path, cwd: Path | None = None, laptop: Laptop | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of cloudjob."""
    laptop = laptop or Laptop(home, home / "store")
    return subprocess.run(
        [*surroundings.words(laptop), *map(str, args)],
        cwd=cwd,
        env={**os.environ, "CLOUDJOB_HOME": str(home), **laptop.environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


class Page:
    """A browser that is logged in to a console."""

    def __init__(self, driver: webdriver.Chrome, link: str) -> None:
        self.driver = driver
        self.base = link.partition("/login")[0]
        self._load(link)
        if "/login" in driver.current_url:
            # The first load was disturbed after it had used the link.
            self.open("/")

    def open(self, path: str) -> None:
        self._load(self.base + path)

    def _load(self, url: str) -> None:
        def is_loaded() -> bool:
            self.driver.get(url)
            # The networks of other tests' containers come and go.
            return "ERR_NETWORK_CHANGED" not in self.text

        poll(is_loaded, "undisturbed load of a page")

    def script(self, text: str) -> object:
        return self.driver.execute_script(text)  # type: ignore[no-untyped-call]

    def shows(self, *texts: str) -> None:
        """Wait until the page shows all of these texts."""
        try:
            poll(lambda: all(text in self.text for text in texts), f"{texts}")
        except AssertionError as error:
            raise AssertionError(f"{error} in {self.text[-800:]!r}") from error

    def await_true(self, expression: str) -> None:
        poll(lambda: self.script(f"return {expression}"), expression)

    @property
    def text(self) -> str:
        return str(self.script("return document.body ? document.body.innerText : ''"))

    def click(self, selector: str, text: str = "") -> None:
        """Click the first element that matches and contains the text."""
        elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
        element = f"{elements}.find(e => e.innerText.includes({json.dumps(text)}))"
        self.await_true(f"!!{element}")
        self.script(f"{element}.click()")

    def enter(self, selector: str, text: str) -> None:
        """Replace the text of a field."""
        self.await_true(f"!!document.querySelector({json.dumps(selector)})")
        field = self.driver.find_element("css selector", selector)
        field.clear()
        field.send_keys(text)

    def resize(self, width: int, height: int) -> None:
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    def problems(self) -> list[str]:
        """Return the browser's errors and warnings since the last call."""
        entries = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]
