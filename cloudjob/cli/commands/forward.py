"""The command forward: reach a port of a job's node from this machine."""

from __future__ import annotations

import argparse

import cloudjob
from cloudjob.cli.messages import print_message
from cloudjob.cli.options import job_argument, port_number, whole_number
from cloudjob.errors import UsageError


def add_forward(parser: argparse.ArgumentParser) -> None:
    """Give the command forward its options."""
    parser.set_defaults(run=_forward)
    job_argument(parser)
    parser.add_argument("remote", metavar="PORT", type=port_number, help="the port of the node")
    parser.add_argument(
        "--node", type=whole_number, default=0, metavar="N", help="the node, by default 0"
    )
    parser.add_argument(
        "--port", type=port_number, metavar="P", help="the port of this machine, by default PORT"
    )


def _forward(options: argparse.Namespace) -> int:
    job = cloudjob.attach(options.job)
    port = options.remote if options.port is None else options.port

    def warn(user: int | None) -> None:
        who = "that has left" if user is None else f"of another user ({user})"
        print_message(f"warning: refused a program {who}")

    try:
        forwarding = job.forwarding(options.remote, node=options.node, port=port, on_refusal=warn)
    except OSError as error:
        raise UsageError(
            f"listening on port {port} of this machine: {error.strerror}",
            hint="--port 0 takes any free port",
        ) from error
    print(f"http://127.0.0.1:{forwarding.port}", flush=True)
    print_message(
        f"port {options.remote} of node {options.node} of {job.id}; Ctrl-C ends this, not the job"
    )
    try:
        forwarding.serve()
    except KeyboardInterrupt:
        print_message("")
    return 0
