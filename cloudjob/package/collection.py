"""Deletes the layers that no job needs; ``claims`` explains why that is safe at any time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from cloudjob.errors import InvalidKey, ObjectMissing, StoreError, UnreadableObject
from cloudjob.model.times import seconds_of
from cloudjob.package import claims
from cloudjob.store.base import SMALL_LIMIT_BYTES, ObjectStore
from cloudjob.store.files import logged_if_unreadable, report_refused
from jobentry.contract import exits
from jobentry.contract.packages import (
    DESCRIPTOR_LIMIT_BYTES,
    LAYERS,
    FormatError,
    damage_key,
    load_descriptor,
)
from jobentry.contract.paths import JobPaths

_CODE = "/code.json"

EndedAt = Callable[[str], "str | None"]


class Collected(NamedTuple):
    """The objects that ``collect`` deleted, or would delete.

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
        InvalidKey: An object has a name that we refuse; the others are deleted.
    """
    stop_s = time.monotonic() + claims.WORK_LIMIT_S
    layers = set(store.list(LAYERS))
    unneeded = layers - _needed(store, keep_s, ended_at)
    # Those that killed processes left behind.
    notes = [
        note.key
        for prefix in (claims.CLAIMS, claims.DELETIONS)
        for note in claims.notes_of(store, prefix)
        if note.is_stale
    ]
    if dry_run:
        return Collected((*sorted(unneeded), *notes), len(layers) - len(unneeded))
    deleted: list[str] = []
    # Others may have written objects with names that no store of ours accepts.
    refused: list[InvalidKey] = []
    if unneeded:
        deletion = f"{claims.DELETIONS}{os.urandom(8).hex()}.json"
        try:
            store.put_bytes(claims.note(unneeded), deletion)
            # Claims first: a submit deletes its claim only once its job is in the store.
            unneeded -= claims.noted_keys(store, claims.CLAIMS)
            unneeded -= _needed(store, keep_s, ended_at)
            for key in sorted(unneeded):
                if time.monotonic() > stop_s:
                    break
                try:
                    store.delete(key)
                    deleted.append(key)
                except InvalidKey as error:
                    refused.append(error)
        finally:
            with suppress(StoreError):
                store.delete(deletion)
    damaged = list(claims.damaged_layers(store))
    present = set(store.list(LAYERS)) if damaged else set()
    for key in (*notes, *(damage_key(key) for key in damaged if key not in present)):
        store.delete(key)
    report_refused(refused)
    return Collected((*deleted, *notes), len(layers) - len(deleted))


def _needed(store: ObjectStore, keep_s: float, ended_at: EndedAt) -> set[str]:
    """Return the layers of all jobs that still need their package."""
    keys = [key for key in store.list() if key.endswith(_CODE) and key.count("/") == 1]
    needed: set[str] = set()
    for key in keys:
        job = key.removesuffix(_CODE)
        if _is_over(store, job, keep_s, ended_at):
            continue
        try:
            with logged_if_unreadable():
                data = store.get_bytes(key, limit_bytes=DESCRIPTOR_LIMIT_BYTES)
            needed.update(layer.key for layer in load_descriptor(data).layers)
        except FormatError as error:
            raise StoreError(
                f"collecting layers: {key} in the store cannot be read: {error}",
                hint="was it written by a newer version of cloudjob? Nothing has been deleted",
            ) from error
        except (ObjectMissing, UnreadableObject):
            # No node can read it, either.
            pass
    return needed


def _is_over(store: ObjectStore, job: str, keep_s: float, ended_at: EndedAt) -> bool:
    """Whether a job ended more than ``keep_s`` seconds ago."""
    ended = ended_at(job)
    if ended is None:
        with suppress(exits.RecordError, ObjectMissing, UnreadableObject):
            data = store.get_bytes(JobPaths(job).record, limit_bytes=SMALL_LIMIT_BYTES)
            ended = exits.load(data).ended_at
    ended_s = seconds_of(ended or "")
    return ended_s > 0 and time.time() - ended_s > keep_s
