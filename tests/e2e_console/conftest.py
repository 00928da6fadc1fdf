"""Fixtures for a console with real jobs and a real browser."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from tests.support import surroundings
from tests.support.browser import Laptop, Page
from tests.support.polling import poll

_AXE = "4.14.1"
_AXE_SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
_LINK = re.compile(r"http://127\.0\.0\.1:\d+/login\?token=\S+")


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    folder.chmod(0o700)
    return folder


@pytest.fixture
def laptop(home: Path, tmp_path: Path, surround: Callable[[Laptop], None]) -> Laptop:
    """What starts cloudjob, in the surroundings of the test."""
    value = Laptop(tmp_path, home / "store")
    surround(value)
    return value


@pytest.fixture
def start_console(tmp_path: Path, laptop: Laptop) -> Iterator[Callable[[Path], str]]:
    """Return a function that starts a console for a state folder and returns its login link."""
    started = []

    def start(home: Path) -> str:
        log = tmp_path / f"console-{len(started)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*surroundings.words(laptop), "console", "--no-open"],
                env={**os.environ, "CLOUDJOB_HOME": str(home), **laptop.environ},
                stdout=subprocess.DEVNULL,
                stderr=out,
            )
        started.append(process)
        poll(lambda: _LINK.search(log.read_text()) or process.poll() is not None, "link")
        link = _LINK.search(log.read_text())
        assert link, log.read_text()
        return link.group()

    yield start
    for process in started:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    names = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    assert all(names.values()), f"apt-get install chromium chromium-driver: {names}"
    options = Options()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    options.binary_location = str(names["chromium"])
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(names["chromedriver"]))
    yield started
    started.quit()


@pytest.fixture
def open_page(
    driver: webdriver.Chrome, start_console: Callable[[Path], str]
) -> Callable[[Path], Page]:
    """Return a function that starts a console for a state folder and logs the browser in."""
    return lambda home: Page(driver, start_console(home))


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the source of axe, which checks a page for what makes it hard to use."""
    assert shutil.which("npm"), "apt-get install npm"
    folder = tmp_path_factory.mktemp("axe")
    pack = ["npm", "pack", "--silent", f"axe-core@{_AXE}"]
    subprocess.run(pack, cwd=folder, stdout=subprocess.DEVNULL, check=True, timeout=300)
    with tarfile.open(folder / f"axe-core-{_AXE}.tgz") as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member
        source = member.read()
    assert hashlib.sha256(source).hexdigest() == _AXE_SHA256
    return source.decode()
