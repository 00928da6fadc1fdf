"""Shows what a submit would do, without sending anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cloudjob import installation
from cloudjob.backends import delivery
from cloudjob.errors import SpecError
from cloudjob.model import submission as submissions
from cloudjob.model.text import hide, why_failed
from cloudjob.package import CodePackage
from cloudjob.submission import checks, preparation
from cloudjob.submission.launcher_choice import Choice
from cloudjob.submission.preparation import Target
from jobentry.contract import messages

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

    @property
    def notes(self) -> tuple[str, ...]:
        """What was chosen, and why: the launcher and the number of ranks."""
        return tuple(preparation.choices(self.choice, self.ranks))


def preview(spec: JobSpec, home: Path, *, planned_nodes: int | None = None) -> Preview:
    """Return what ``submit`` would do; nothing is sent.

    Args:
        planned_nodes: The number of nodes to plan, starting with the head; None for all.

    Raises:
        BackendError: The entry, which plans the nodes, cannot be read.
    """
    script = checks.check_script(spec)
    # Only to see that it is there, before a node's plan fails without it.
    delivery.entry()
    target = Target.open(spec, home)
    with TemporaryDirectory(prefix="cloudjob-pack-") as scratch:
        decision = preparation.decide(spec, script, target, Path(scratch), may_query=False)
    job = preparation.new_id(spec.name)
    prepared = preparation.prepare(job, decision, target, Path(scratch))
    spec, backend, request = prepared.spec, target.backend, prepared.request
    masked_texts = submissions.masked_texts(prepared.submission)
    return Preview(
        package=decision.package,
        choice=decision.choice,
        ranks=decision.ranks,
        submission=submissions.show(prepared.submission, masked_texts),
        request=hide(backend.show(request), masked_texts),
        plans=tuple(
            hide(_plan(environment, (spec.script, *spec.args)), masked_texts)
            for environment in islice(backend.environments(request), planned_nodes)
        ),
        text=hide(backend.text(request), masked_texts),
        python=checks.python_described(spec, script.files),
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
