"""The commands on this machine: image and doctor."""

from __future__ import annotations

import argparse
import threading
import time

from cloudjob.cli.commands.settings import described
from cloudjob.cli.live import LiveLines, is_terminal
from cloudjob.cli.messages import print_json, print_message
from cloudjob.cli.options import actions_of, add_action, json_flag, state_home
from cloudjob.cli.tables import print_table
from cloudjob.model import summary
from cloudjob.model.text import one_line

# Seconds between two updates of the line on a terminal.
_FRAME_S = 0.5


def _image_build(options: argparse.Namespace) -> int:
    from cloudjob.cli.live import Transfers
    from cloudjob.machine import images

    with Transfers("pulled") as transfers, BuildSteps() as steps:
        transfers.start()
        built = images.build(
            options.name,
            base=options.base,
            ca_bundle=options.ca_bundle,
            pip_config=options.pip_config,
            on_step=steps.report,
            on_pull=transfers.update,
        )
    print_message("built" if built.is_new else "already built: none of its inputs has changed")
    print(built.tag)
    return 0


class BuildSteps:
    """Prints the engine's reports of a build, with the time since its start.

    A terminal also shows the current step and its time, as some steps are silent for minutes.
    """

    def __init__(self) -> None:
        self._live = LiveLines(2 if is_terminal(2) else None)
        self._started_s = self._step_s = time.monotonic()
        self._step = ""
        self._has_ended = threading.Event()

    def __enter__(self) -> BuildSteps:
        self._live.__enter__()
        threading.Thread(target=self._show, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._live.__exit__()

    def report(self, text: str) -> None:
        """Print a line of the engine."""
        now_s = time.monotonic()
        if text.startswith("Step "):
            self._step, self._step_s = one_line(text), now_s
        print_message(f"{_elapsed(now_s - self._started_s):>12}  {text}")

    def _show(self) -> None:
        while not self._has_ended.wait(_FRAME_S):
            if self._step:
                lasted = _elapsed(time.monotonic() - self._step_s)
                self._live.show([f"{self._step} ({lasted})".encode()])


def _elapsed(seconds: float) -> str:
    return summary.span(int(seconds))


def _doctor(options: argparse.Namespace) -> int:
    from cloudjob import api
    from cloudjob.machine import doctor, image_checks

    if options.nodes is not None:
        from cloudjob.cli.preflight import check_nodes

        return check_nodes(options)
    if options.image:
        checks = image_checks.check_image(options.image)
    elif options.backend:
        checks = doctor.check_backend(described(options), state_home())
    else:
        # The store that a submit from here would use.
        store = api.store_of(described(options))
        checks = [*doctor.check_machine(state_home()), *doctor.check_store(store)]
    if options.json:
        print_json([check._asdict() for check in checks])
    else:
        rows = []
        for check in checks:
            result = "OK" if check.is_ok else "MISSING" if check.is_needed else "no"
            rows.append((check.name, result, check.found))
            if not check.is_ok and check.hint:
                rows.append(("", "", f"-> {check.hint}"))
        print_table(rows)
    return 0 if doctor.all_needed_ok(checks) else 1


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Give the command doctor its options."""
    parser.set_defaults(run=_doctor)
    parser.add_argument(
        "--backend", metavar="NAME", default="", help="check what this backend needs"
    )
    parser.add_argument("--image", metavar="REF", default="", help="check this container image")
    text = "check so many nodes of the backend, as a job of about half a minute"
    parser.add_argument("--nodes", metavar="N", help=text)
    parser.add_argument("--flavor", metavar="ID", default="", help="the kind of these nodes")
    parser.add_argument("--store", metavar="URI", help="check this store")
    parser.add_argument("--config", metavar="FILE.yaml", help="check what this job file needs")
    json_flag(parser)


def add_image(parser: argparse.ArgumentParser) -> None:
    """Give the command image its actions."""
    inner = actions_of(parser)
    text = "build an image if its inputs have changed"
    build = add_action(inner, "build", _image_build, text)
    build.add_argument("name", metavar="NAME", help="the image: base, examples, …")
    build.add_argument(
        "--base",
        metavar="REF",
        default="",
        help="build on this image, without moving the tag `latest`",
    )
    build.add_argument(
        "--ca-bundle",
        metavar="FILE",
        default="",
        help="certificates for pip to trust; not kept in the image",
    )
    build.add_argument(
        "--pip-config",
        metavar="FILE",
        default="",
        help="pip's configuration; not kept in the image",
    )
