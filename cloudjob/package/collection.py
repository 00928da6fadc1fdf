"""Deletes the layers that no job needs; ``claims`` explains why that is safe at any time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from cloudjob.errors import ObjectMissing, StoreError
from cloudjob.package import claims
from cloudjob.store.base import ObjectStore
from cloudjob.times import seconds_of
from jobentry.contract import exits
from jobentry.contract.packages import LAYERS, FormatError, damage_key, load_descriptor
from jobentry.contract.paths import JobPaths

_CODE = "/code.json"

EndedAt = Callable[[str], "str | None"]


class Collected(NamedTuple):
    """What ``collect`` deleted, or would delete.

    Args:
        keys: The layers, and the notes of processes that were killed.
        spared: How many layers stay.
    """

    keys: tuple[str, ...]
    spared: int


def collect(
    store: ObjectStore, *, keep_s: float, ended_at: EndedAt, dry_run: bool = False
) -> Collected:
    """Delete the layers that no job needs.

    A job needs its package until it has ended, and for ``keep_s`` seconds longer.

    Args:
        ended_at: Returns when a job ended, in RFC 3339; empty if it is running; None if that is
            not known here, so that the record in the store decides.
        dry_run: Delete nothing.

    Raises:
        StoreError: The store refused, or a descriptor cannot be read: nothing is deleted then.
    """
    begun = time.monotonic()
    candidates = set(store.list(LAYERS))
    condemned = candidates - _needed(store, keep_s, ended_at)
    notes = claims.stale_notes(store)
    if dry_run or not condemned:
        if not dry_run:
            _delete(store, notes)
        return Collected((*sorted(condemned), *notes), len(candidates) - len(condemned))
    sweep = f"{claims.SWEEPS}{os.urandom(8).hex()}.json"
    try:
        store.put_bytes(claims.note(condemned), sweep)
        # Claims first: a submit deletes its claim only when its job is there to be seen.
        claimed = claims.noted(store, claims.CLAIMS)
        condemned -= claimed | _needed(store, keep_s, ended_at)
        deleted = []
        for key in sorted(condemned):
            if time.monotonic() - begun > claims.WORK_LIMIT_S:
                break
            store.delete(key)
            deleted.append(key)
        stale = [
            key for key in claims.damaged_layers(store) if key in deleted or key not in candidates
        ]
        _delete(store, [*notes, *map(damage_key, stale)])
    finally:
        with suppress(StoreError):
            store.delete(sweep)
    return Collected((*deleted, *notes), len(candidates) - len(deleted))


def _needed(store: ObjectStore, keep_s: float, ended_at: EndedAt) -> set[str]:
    """Return the layers of all jobs that need theirs."""
    keys = [key for key in store.list() if key.endswith(_CODE) and key.count("/") == 1]
    needed: set[str] = set()
    for key in keys:
        job = key.removesuffix(_CODE)
        if _is_over(store, job, keep_s, ended_at):
            continue
        try:
            needed.update(layer.key for layer in load_descriptor(store.get_bytes(key)).layers)
        except FormatError as error:
            raise StoreError(
                f"collecting layers: {key} in the store cannot be read: {error}",
                hint="was it written by a later cloudjob? Nothing has been deleted",
            ) from error
        except ObjectMissing:
            pass
    return needed


def _is_over(store: ObjectStore, job: str, keep_s: float, ended_at: EndedAt) -> bool:
    """Whether a job ended more than ``keep_s`` seconds ago."""
    ended = ended_at(job)
    if ended is None:
        with suppress(exits.RecordError, ObjectMissing):
            ended = exits.load(store.get_bytes(JobPaths(job).record)).ended_at
    ended_s = seconds_of(ended or "")
    return ended_s > 0 and time.time() - ended_s > keep_s


def _delete(store: ObjectStore, keys: Iterable[str]) -> None:
    for key in keys:
        store.delete(key)
