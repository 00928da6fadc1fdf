"""``doctor --nodes``: a full check of nodes, as a job whose script does nothing."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import cloudjob
from cloudjob.cli.messages import print_json, print_message
from cloudjob.cli.tables import print_table
from cloudjob.model import summary
from jobentry.contract.preflight import Weight

TYPE_CHECKING = False
if TYPE_CHECKING:
    from jobentry.contract.preflight import Report

_SCRIPT = "preflight.py"
_KEYS = ("nodes", "backend", "store", "image", "flavor")


def check_nodes(options: argparse.Namespace) -> int:
    """Check the nodes and print what was found; return 1 if no job could work on them."""
    with tempfile.TemporaryDirectory(prefix="cloudjob-doctor-") as source:
        Path(source, _SCRIPT).write_text("", encoding="ascii")
        requested = {name: getattr(options, name) for name in _KEYS if getattr(options, name)}
        spec = cloudjob.job_spec(
            _SCRIPT,
            [],
            job_file=options.config,
            **{
                **requested,
                "source": source,
                "name": "doctor",
                "preflight": "full",
                "launcher": "python",
                "retries": 0,
            },
        )
        job = cloudjob.submit(spec)
    print_message(f"job {job.id} started ({job.handle})")
    try:
        status = job.wait()
    except KeyboardInterrupt:
        job.cancel(is_urgent=True)
        raise
    report = job.preflight_report()
    if report is None:
        why = summary.reason(status) or f"the job {job.id} is {status.state}"
        print_message(f"error: checking the nodes: {why}")
        print_message(f"hint: `cloudjob logs {job.id}` shows its log")
        return 1
    show(report, is_json=options.json)
    if any(finding.weight is Weight.FAULT for finding in report.findings):
        return 1
    if status.exit_code != 0:
        # The check found no fault, but a script that does nothing has not succeeded.
        print_message(f"error: checking the nodes: {summary.reason(status) or status.state}")
        return 1
    return 0


def show(report: Report, *, is_json: bool) -> None:
    """Print the table of the nodes, and what is wrong with them."""
    heading, *rows = report.rows
    if is_json:
        names = [name or "result" for name in heading]
        print_json(
            {
                "nodes": [dict(zip(names, row, strict=False)) for row in rows],
                "findings": [finding._asdict() for finding in report.findings],
            }
        )
        return
    print_table(rows, heading)
    for finding in report.findings:
        nodes = ", ".join(str(node) for node in finding.nodes)
        print(f"{finding.weight.value}: node {nodes}: {finding.text}")
        if finding.hint:
            print(f"  -> {finding.hint}")
