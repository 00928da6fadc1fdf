"""What is delivered to nodes, from an installation that may be incomplete."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudjob import installation
from cloudjob.backends import delivery, interpreters
from cloudjob.errors import BackendError


@pytest.mark.parametrize("is_checkout", [True, False])
def test_a_missing_entry_is_an_error_of_one_line(
    is_checkout: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A fresh checkout has none; a wheel always has one."""
    monkeypatch.setattr(installation, "ENTRY", tmp_path / "cloudjob" / "jobentry.pyz")
    if not is_checkout:
        monkeypatch.setattr(installation, "FOLDER", tmp_path / "cloudjob")

    with pytest.raises(BackendError, match=r"jobentry\.pyz: No such file") as caught:
        interpreters.entry_of(tmp_path / "home")
    assert caught.value.hint.startswith(
        "build it: python " if is_checkout else "install cloudjob again"
    )
    assert not (tmp_path / "home").exists()
    with pytest.raises(BackendError, match=r"jobentry\.pyz: No such file"):
        delivery.entry()
