"""The command emulator: ModelArts on this machine."""

from __future__ import annotations

import argparse

from cloudjob.cli.messages import print_json, print_message
from cloudjob.cli.options import (
    actions_of,
    add_action,
    json_flag,
    port_number,
    state_home,
    whole_number,
)
from cloudjob.cli.tables import print_table
from cloudjob.errors import UsageError
from cloudjob.model.text import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _emulator_up(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cloudjob.emulator import daemon

    config = Path(options.settings) if options.settings else None
    emulator = daemon.up(state_home(), config=config, port=options.port)
    _print_emulator(emulator.shown(), is_json=options.json)
    return 0


def _emulator_down(_options: argparse.Namespace) -> int:
    from cloudjob.emulator import daemon

    print_message(
        "the emulator has stopped" if daemon.down(state_home()) else "no emulator is running"
    )
    return 0


def _emulator_status(options: argparse.Namespace) -> int:
    from cloudjob.emulator import daemon

    _print_emulator(daemon.status(state_home()), is_json=options.json)
    return 0


def _emulator_reset(_options: argparse.Namespace) -> int:
    from cloudjob.emulator import daemon

    ran = daemon.reset(state_home())
    print_message(
        "deleted all jobs, objects and keys" + ("; the emulator runs again" if ran else "")
    )
    return 0


def _emulator_fault(options: argparse.Namespace) -> int:
    from cloudjob.emulator import daemon
    from cloudjob.emulator.fault_injection import KINDS

    if options.kind == "clear":
        print_message(f"{counted(daemon.clear_faults(state_home()), 'fault')} ended")
    elif options.kind == "list":
        print_json(daemon.faults(state_home()))
    elif options.kind in KINDS:
        names = ("kind", "count", "seconds", "amount", "job", "node", "path")
        print_json(
            daemon.add_fault(state_home(), **{name: getattr(options, name) for name in names})
        )
    else:
        raise UsageError(
            f"emulator fault {options.kind}: unknown fault",
            hint=f"choose one of {', '.join((*KINDS, 'list', 'clear'))}",
        )
    return 0


def _print_emulator(values: dict[str, Any], *, is_json: bool) -> None:
    if is_json:
        print_json(values)
        return
    print_table([row for key, value in values.items() for row in _rows(key, value)])


def _rows(key: str, value: Any) -> list[tuple[str, Any]]:
    """Return the rows of a value: one for each inner value of a mapping, none if it is empty."""
    if isinstance(value, dict):
        return [row for name, inner in value.items() for row in _rows(f"{key}.{name}", inner)]
    return [] if value == "" else [(key, value)]


def add_emulator(parser: argparse.ArgumentParser) -> None:
    """Give the command emulator its actions."""
    from cloudjob.emulator.fault_injection import KINDS

    inner = actions_of(parser)
    up = add_action(inner, "up", _emulator_up, "start it, and print its addresses and keys")
    up.add_argument("--settings", metavar="FILE.yaml", default="", help="flavors, pools and limits")
    up.add_argument("--port", type=port_number, metavar="N", default=0, help="the port of the API")
    json_flag(up)
    add_action(inner, "down", _emulator_down, "stop it; its jobs continue")
    status = add_action(inner, "status", _emulator_status, "show its addresses, jobs and faults")
    json_flag(status)
    add_action(inner, "reset", _emulator_reset, "delete its jobs, objects and keys")
    fault = add_action(inner, "fault", _emulator_fault, "inject a fault")
    fault.epilog = "faults:\n" + "".join(f"  {kind:15}{text}\n" for kind, text in KINDS.items())
    fault.add_argument("kind", metavar="KIND", help="the fault; or list, or clear")
    fault.add_argument(
        "--count", type=whole_number, metavar="N", default=0, help="for N requests or jobs"
    )
    fault.add_argument("--seconds", type=float, metavar="S", default=0.0, help="for S seconds")
    fault.add_argument("--amount", type=float, metavar="S", default=0.0, help="delay or clock skew")
    fault.add_argument(
        "--job", metavar="ID", default="", help="only the job with this id of the service"
    )
    fault.add_argument(
        "--node", type=whole_number, metavar="I", default=0, help="the index of the node"
    )
    fault.add_argument(
        "--path", metavar="TEXT", default="", help="only requests whose path contains TEXT"
    )
