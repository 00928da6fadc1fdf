"""The table of URI schemes, with the modules that read and write their objects on both halves."""

from __future__ import annotations

from typing import Mapping, NamedTuple


class Scheme(NamedTuple):
    """The properties of a URI scheme.

    Args:
        objects: The module in ``jobentry.objects`` with which a node reads and writes objects.
        store: The module in ``cloudjob.store``; empty if a job can only read its inputs there.
        has_section: Whether its settings are a section of the job file.
    """

    objects: str
    store: str = ""
    has_section: bool = False


SCHEMES: Mapping[str, Scheme] = {
    "file": Scheme("directory", "directory"),
    "s3": Scheme("s3", "s3", has_section=True),
    "obs": Scheme("s3", "s3", has_section=True),
    "https": Scheme("web"),
    "http": Scheme("web"),
}
# The schemes of stores, and those of stores that have a section in the job file.
STORE_SCHEMES = tuple(name for name, scheme in SCHEMES.items() if scheme.store)
STORE_SECTIONS = tuple(name for name, scheme in SCHEMES.items() if scheme.has_section)
