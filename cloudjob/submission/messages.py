"""The messages of a submit about its launcher, its ranks and its package."""

from __future__ import annotations

from collections.abc import Iterator

from cloudjob.model.progress import Progress
from cloudjob.model.text import counted, size_text
from cloudjob.package import CodePackage
from cloudjob.package.claims import StoredLayers
from cloudjob.submission.launcher_choice import Choice

_SHOWN_LEFT_OUT = 5
# Words in the reasons to report: files that usually hold secrets, and cloudjob's own folder.
_REPORTED = ("secret", "CLOUDJOB_HOME")


def launcher(choice: Choice | None) -> Iterator[Progress]:
    """Report the launcher that was chosen, if the job named none."""
    if choice:
        yield Progress("note", f"launcher {choice.launcher}: {choice.why}")


def ranks(chosen: str) -> Iterator[Progress]:
    """Report the number of ranks that was chosen; nothing if it is obvious."""
    if chosen:
        yield Progress("note", chosen)


def left_out(package: CodePackage) -> Iterator[Progress]:
    """Report files that cloudjob left out by itself, without a rule of the user."""
    found = [item for item in package.left_out if any(word in item.reason for word in _REPORTED)]
    for path, reason in found[:_SHOWN_LEFT_OUT]:
        yield Progress("note", f"left out of the package: {path}: {reason}")
    if len(found) > _SHOWN_LEFT_OUT:
        more = len(found) - _SHOWN_LEFT_OUT
        yield Progress("note", f"… and {more} more; `--dry-run --json` lists all")


def sent(package: CodePackage, kept: StoredLayers) -> Progress:
    """Report how much of the package was sent."""
    total = size_text(sum(layer.size_bytes for layer in kept.layers))
    layers = "1 layer new" if kept.sent_layers else "nothing new"
    message = (
        f"sent {size_text(kept.sent_bytes)} of {total}, {layers}: {counted(package.files, 'file')}"
    )
    return Progress("sent", message)
