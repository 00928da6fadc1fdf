"""The options that select jobs."""

from __future__ import annotations

import argparse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def filter_flags(parser: Any) -> None:
    """Add the options that select jobs."""
    for flag, metavar, text in (
        ("--backend", "NAME", "only jobs of this backend"),
        ("--name", "PATTERN", "only jobs whose name or id matches, such as train-*"),
        ("--state", "STATE", "only jobs in this state, such as RUNNING"),
    ):
        parser.add_argument(flag, action="append", metavar=metavar, default=[], help=text)
    parser.add_argument(
        "--since",
        metavar="TIME",
        default="",
        help="only jobs submitted since then: 2h, 3d, or a date",
    )


def filters_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the given filters as keyword arguments of ``cloudjob.jobs``."""
    return {key: getattr(options, key) for key in ("backend", "name", "state", "since")}
