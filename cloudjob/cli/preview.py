"""Shows what a submit would do: as a page, as one JSON value, or as the platform's own request."""

from __future__ import annotations

import json
import shlex

from cloudjob.cli.messages import print_json, print_message
from cloudjob.cli.tables import print_table
from cloudjob.model.text import counted, one_line, size_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from cloudjob import Preview
    from cloudjob.model.job import JobSpec

# The most left-out files, and the most characters of a command, on the page.
_MAX_FILES, _MAX_LETTERS = 5, 300


def show(
    spec: JobSpec,
    options: argparse.Namespace,
    sweep: Sequence[tuple[str, str]] = (),
) -> None:
    """Show what would be sent for a job; nothing is sent.

    Args:
        sweep: Rows about the sweep whose first job this is.
    """
    import cloudjob

    # The page shows the head and one worker.
    planned = 0 if options.show_request else None if options.json else 2
    result = cloudjob.preview(spec, planned_nodes=planned)
    if options.show_request or options.json:
        for note in result.notes:
            print_message(note)
        for name, text in sweep:
            print_message(f"{name}: {text}")
    if options.show_request:
        # In the format of the platform's own tool, or as JSON.
        print(result.text or json.dumps(result.request, indent=2) + "\n", end="")
    elif options.json:
        print_all(result)
    else:
        print_page(result, spec, sweep)


def print_all(preview: Preview) -> None:
    """Print everything as one JSON value."""
    package = preview.package
    print_json(
        {
            "submission": preview.submission,
            "package": {
                "digest": package.digest,
                "size_bytes": package.size_bytes,
                "files": package.files,
                "left_out": [{"path": path, "reason": why} for path, why, _ in package.left_out],
            },
            "request": preview.request,
            "plans": list(preview.plans),
        }
    )


def print_page(preview: Preview, spec: JobSpec, sweep: Sequence[tuple[str, str]] = ()) -> None:
    """Print the plan on one page."""
    rows = [
        *sweep,
        *_summary_rows(preview, spec),
        *_data_rows(preview.submission, spec),
        *_node_rows(preview, spec.nodes),
    ]
    print_table(rows)
    print("\nNothing was sent. Add --json for everything, --show-request for the request.")


def _summary_rows(preview: Preview, spec: JobSpec) -> Iterator[tuple[str, str]]:
    submission, package = preview.submission, preview.package
    ranks = submission["procs_per_node"]
    yield "job", f"{spec.name}, on the backend {spec.backend}"
    total = f", {spec.nodes * ranks} in all" if spec.nodes > 1 and ranks else ""
    each = f"{counted(ranks, 'rank')} each" if ranks else "one rank for each GPU or NPU"
    yield "size", f"{counted(spec.nodes, 'node')} with {each}{total}"
    if ranks and preview.ranks:
        yield "", preview.ranks
    why = f": {preview.choice.why}" if preview.choice else ""
    yield "launcher", f"{submission['launcher']}{why}"
    yield "command", shlex.join([spec.script, *submission["args"]])
    yield from zip(("python", "", ""), preview.python, strict=False)
    if spec.image:
        yield "image", spec.image
    if spec.flavor:
        yield "flavor", spec.flavor
    yield (
        "source",
        f"{spec.source}: {counted(package.files, 'file')}, {size_text(package.size_bytes)}",
    )
    for path, reason, _ in package.left_out[:_MAX_FILES]:
        yield "", f"left out: {path}: {reason}"
    if len(package.left_out) > _MAX_FILES:
        yield "", f"left out: {len(package.left_out) - _MAX_FILES} more, which --json lists"
    yield "store", submission["code"]["uri"].rpartition(f"/{submission['job']}/")[0]


def _data_rows(submission: Mapping[str, Any], spec: JobSpec) -> Iterator[tuple[str, str]]:
    for name, value in submission["env"].items():
        yield "variable", f"{name}={value}"
    for name in submission["secrets"]:
        yield "secret", name
    for name, uri in submission["inputs"].items():
        nodes = spec.input_nodes.get(name, "")
        yield "input", f"{name} from {uri}{f' on the nodes {nodes}' if nodes else ''}"
    for name, uri in submission["outputs"].items():
        yield "output", f"{name} to {uri if spec.outputs[name] else 'the store'}"
    limit = f"{spec.timeout_min:g} min" if spec.timeout_min else "no time limit"
    retries = f", {spec.retries} retries" if spec.retries else ""
    yield (
        "limits",
        f"{limit}, {spec.start_timeout_min:g} min to start, {spec.grace_s:g} s to end{retries}",
    )


def _node_rows(preview: Preview, nodes: int) -> Iterator[tuple[str, str]]:
    for node, plan in enumerate(preview.plans):
        of = (
            f"node {node}"
            if node == 0 or nodes <= len(preview.plans)
            else f"nodes {node}-{nodes - 1}"
        )
        command = one_line(shlex.join(plan["argv"])) if plan["argv"] else "waits for the head"
        more = "…" if len(command) > _MAX_LETTERS else ""
        yield of, f"{plan['role']}: {command[:_MAX_LETTERS]}{more}"
        for note in plan.get("notes", ()):
            yield "", one_line(note)
