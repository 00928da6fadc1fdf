"""The command config, and the job that files and options describe."""

from __future__ import annotations

import argparse
import os

from cloudjob.cli.messages import print_json
from cloudjob.cli.options import (
    actions_of,
    add_action,
    given_flags,
    json_flag,
    spec_flags,
)
from cloudjob.cli.tables import print_table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec


def described(options: argparse.Namespace) -> JobSpec:
    """Return the job that the files describe, which need not name a script."""
    from pathlib import Path

    from cloudjob import config

    flags = {"backend": options.backend, "store": options.store}
    return config.load(
        {name: value for name, value in flags.items() if value},
        job_file=options.config,
        cwd=Path.cwd(),
        environ=os.environ,
        needs_script=False,
    ).spec


def _config_show(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cloudjob import config

    loaded = config.load(
        given_flags(options),
        job_file=options.config,
        cwd=Path.cwd(),
        environ=os.environ,
        needs_script=False,
    )
    rows = config.show(loaded)
    if options.json:
        print_json([{"key": k, "value": v, "origin": origin} for k, v, origin in rows])
        return 0
    print_table([(key, value, f"({origin})") for key, value, origin in rows])
    return 0


def _config_schema(_options: argparse.Namespace) -> int:
    from cloudjob import config

    print_json(config.json_schema())
    return 0


def source_spec(options: argparse.Namespace) -> JobSpec:
    """Return what the options and the files say about the source."""
    from pathlib import Path

    from cloudjob import config

    flags = {name: getattr(options, name) for name in ("source", "links", "store")
             if getattr(options, name, None) is not None}  # fmt: skip
    return config.load(
        flags, job_file=options.config, cwd=Path.cwd(), environ=os.environ, needs_script=False
    ).spec


def add_config(parser: argparse.ArgumentParser) -> None:
    """Give the command config its actions."""
    inner = actions_of(parser)
    show = add_action(inner, "show", _config_show, "each value and where it comes from")
    spec_flags(show)
    json_flag(show)
    show.add_argument("script", nargs="?", metavar="SCRIPT", help="the program of the job")
    add_action(inner, "schema", _config_schema, "the JSON Schema of a job file, for editors")
