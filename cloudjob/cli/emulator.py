"""The command emulator: a ModelArts on this machine."""

from __future__ import annotations

import argparse

from cloudjob.cli.options import (
    actions_of,
    add_action,
    json_flag,
    port_number,
    state_home,
    whole_number,
)
from cloudjob.cli.say import print_json, say
from cloudjob.cli.tables import print_table
from cloudjob.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _emulator_up(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cloudjob.emulator import daemon

    config = Path(options.settings) if options.settings else None
    found = daemon.up(state_home(), config=config, port=options.port)
    if found.note:
        say(found.note)
    _print_emulator(found.shown(), is_json=options.json)
    return 0


def _emulator_down(_options: argparse.Namespace) -> int:
    from cloudjob.emulator import daemon

    say("the emulator has ended" if daemon.down(state_home()) else "no emulator runs")
    return 0


def _emulator_status(options: argparse.Namespace) -> int:
    from cloudjob.emulator import daemon

    _print_emulator(daemon.status(state_home()), is_json=options.json)
    return 0


def _emulator_reset(_options: argparse.Namespace) -> int:
    from cloudjob.emulator import daemon

    ran = daemon.reset(state_home())
    say("all is forgotten" + (", and the emulator runs again with new keys" if ran else ""))
    return 0


def _emulator_fault(options: argparse.Namespace) -> int:
    from cloudjob.emulator import daemon
    from cloudjob.emulator.fault_injection import KINDS

    if options.kind == "clear":
        say(f"{daemon.clear_faults(state_home())} fault(s) ended")
    elif options.kind == "list":
        print_json(daemon.faults(state_home()))
    elif options.kind in KINDS:
        names = ("kind", "count", "seconds", "amount", "job", "node", "path")
        print_json(
            daemon.add_fault(state_home(), **{name: getattr(options, name) for name in names})
        )
    else:
        raise UsageError(
            f"emulator fault {options.kind}: there is no such fault",
            hint=f"choose one of {', '.join((*KINDS, 'list', 'clear'))}",
        )
    return 0


def _print_emulator(values: dict[str, Any], *, is_json: bool) -> None:
    if is_json:
        print_json(values)
        return
    print_table([(key, value) for key, value in values.items() if value != ""])


def add_emulator(parser: argparse.ArgumentParser) -> None:
    """Give the command emulator its actions."""
    from cloudjob.emulator.fault_injection import KINDS

    inner = actions_of(parser)
    up = add_action(inner, "up", _emulator_up, "start it, and print where it is")
    up.add_argument("--settings", metavar="FILE.yaml", default="", help="what the account has")
    up.add_argument(
        "--port", type=port_number, metavar="N", default=0, help="where the API listens"
    )
    json_flag(up)
    add_action(inner, "down", _emulator_down, "end it; its jobs go on")
    status = add_action(inner, "status", _emulator_status, "say what it does")
    json_flag(status)
    add_action(inner, "reset", _emulator_reset, "forget all jobs and objects")
    fault = add_action(inner, "fault", _emulator_fault, "let something go wrong")
    fault.epilog = "; ".join(f"{kind}: {text}" for kind, text in KINDS.items())
    fault.add_argument("kind", metavar="KIND", help="what goes wrong; or list, or clear")
    fault.add_argument("--count", type=whole_number, metavar="N", default=0, help="so many times")
    fault.add_argument("--seconds", type=float, metavar="S", default=0.0, help="for so long")
    fault.add_argument(
        "--amount", type=float, metavar="S", default=0.0, help="how slow, how skewed"
    )
    fault.add_argument("--job", metavar="ID", default="", help="only this job, by the service's id")
    fault.add_argument("--node", type=whole_number, metavar="I", default=0, help="which node")
    fault.add_argument("--path", metavar="TEXT", default="", help="only requests to such a path")
