"""Shows what a submit would do, without sending anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cloudjob import installation
from cloudjob.errors import SpecError
from cloudjob.model import submission as submissions
from cloudjob.model.text import hide, why_failed
from cloudjob.package import CodePackage
from cloudjob.submission import preparation, ranks, script_check, script_python
from cloudjob.submission.launcher_choice import Choice
from cloudjob.submission.preparation import PreparedJob, Target
from jobentry.contract import messages
from jobentry.contract.paths import JobPaths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec


@dataclass(frozen=True, slots=True)
class Preview:
    """The request that ``submit`` would send, and the plan of each node.

    Args:
        choice: The launcher that was chosen, if the job names none.
        ranks: The number of ranks of a node and the reason; empty if it is obvious.
        python: The interpreter of the script and the reason, one text for each; empty where only
            the nodes know it.
        plans: One object per node, as ``jobentry --dry-run --json`` prints it.
        text: The request in the format of the platform's own tool; empty if there is no such tool.
    """

    package: CodePackage
    choice: Choice | None
    ranks: str
    submission: dict[str, Any]
    request: dict[str, Any]
    plans: tuple[dict[str, Any], ...]
    text: str = ""
    python: tuple[str, ...] = ()


def preview(spec: JobSpec, home: Path, *, planned_nodes: int | None = None) -> Preview:
    """Return what ``submit`` would do; nothing is sent.

    Args:
        planned_nodes: The number of nodes to plan, starting with the head; None for all.
    """
    script = script_check.check(spec)
    target = Target.open(spec, home)
    with TemporaryDirectory(prefix="cloudjob-pack-") as scratch:
        package = preparation.pack_source(spec, home, Path(scratch), target.uri)
    spec, choice = preparation.with_launcher(spec, script)
    spec, chosen = ranks.choose(spec, target.backend, may_query=False)
    paths = JobPaths(preparation.new_id(spec.name))
    submission = preparation.prepare_for(
        PreparedJob(spec, package, target), paths, package, package.layers
    )
    request = target.backend.build(submission)
    masked_texts = submissions.masked_texts(submission)
    return Preview(
        package=package,
        choice=choice,
        ranks=chosen,
        submission=submissions.show(submission),
        request=hide(target.backend.show(request), masked_texts),
        plans=tuple(
            hide(_plan(environment, (spec.script, *spec.args)), masked_texts)
            for environment in target.backend.environments(request)[:planned_nodes]
        ),
        text=hide(target.backend.text(request), masked_texts),
        python=script_python.described(spec, script.files),
    )


def _plan(environment: Mapping[str, str], argv: tuple[str, ...]) -> dict[str, Any]:
    """Run the entry's dry run for a node and return its plan."""
    entry = str(installation.ENTRY)
    done = subprocess.run(
        [sys.executable, "-I", "-S", entry, "--dry-run", "--json", *argv],
        # Open MPI's wheel reads HOME even for its version; Slurm's nodes have the user's own.
        env={"HOME": os.environ.get("HOME", "/"), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        message = why_failed(done.returncode, done.stderr).removeprefix(messages.MARK)
        raise SpecError([f"planning a node: {message}"])
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan
