"""The command config, and the job that files and options describe."""

from __future__ import annotations

import argparse
import os

from cloudjob.cli.messages import print_json, print_message
from cloudjob.cli.options import (
    actions_of,
    add_action,
    given_flags,
    json_flag,
    spec_flags,
)
from cloudjob.cli.tables import print_table
from cloudjob.model.text import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from cloudjob.config import Loaded
    from cloudjob.model.job import JobSpec


def described(options: argparse.Namespace) -> JobSpec:
    """Return the job that the files and options describe; the script may be missing."""
    keys = ("backend", "links", "source", "store")
    flags = {name: getattr(options, name, None) for name in keys}
    return _load({name: value for name, value in flags.items() if value}, options.config).spec


def _load(flags: dict[str, Any], job_file: str | None) -> Loaded:
    from pathlib import Path

    from cloudjob import config

    return config.load(
        flags, job_file=job_file, cwd=Path.cwd(), environ=os.environ, needs_script=False
    )


def _config_show(options: argparse.Namespace) -> int:
    from cloudjob import config

    rows = config.show(_load(given_flags(options), options.config))
    if options.json:
        print_json([{"key": k, "value": v, "origin": origin} for k, v, origin in rows])
        return 0
    visible = [row for row in rows if options.all or row[2] != config.DEFAULT]
    print_table([(key, value, f"({origin})") for key, value, origin in visible])
    if rest := len(rows) - len(visible):
        print_message(f"{counted(rest, 'key')} with their defaults; --all shows all")
    return 0


def _config_schema(_options: argparse.Namespace) -> int:
    from cloudjob.config.schema import json_schema

    print_json(json_schema())
    return 0


def add_config(parser: argparse.ArgumentParser) -> None:
    """Give the command config its actions."""
    inner = actions_of(parser)
    show = add_action(inner, "show", _config_show, "each value and where it comes from")
    spec_flags(show)
    show.add_argument("--all", action="store_true", help="also those that have their defaults")
    json_flag(show)
    show.add_argument("script", nargs="?", metavar="SCRIPT", help="the program of the job")
    show.usage = "cloudjob config show [OPTIONS] [SCRIPT]"
    add_action(inner, "schema", _config_schema, "the JSON Schema of a job file, for editors")
