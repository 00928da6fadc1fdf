"""The commands on packages and stores: package and store."""

from __future__ import annotations

import argparse

from cloudjob.cli.commands.settings import described
from cloudjob.cli.messages import print_json, print_message, print_name
from cloudjob.cli.options import actions_of, add_action, json_flag, state_home
from cloudjob.model.text import counted, one_line, size_text


def _package_ls(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cloudjob.package import scan

    spec = described(options)
    tree = scan(Path(spec.source), home=state_home(), follow_links=spec.links == "follow")
    if options.json:
        files = [
            {"path": each.name, "kind": each.kind, "mode": f"{each.mode:04o}",
             "size_bytes": each.size_bytes}
            for each in tree.entries
        ]  # fmt: skip
        left_out = [{"path": path, "reason": reason} for path, reason, _ in tree.left_out]
        print_json({"source": spec.source, "entries": files, "left_out": left_out})
        return 0
    for each in tree.entries:
        if each.kind != "folder":
            print(f"{each.size_bytes:>12}  {one_line(each.name)}")
    for path, reason, _ in tree.left_out:
        print(f"{'left out':>12}  {one_line(path)}  ({one_line(reason)})")
    total = sum(each.size_bytes for each in tree.entries)
    count = sum(each.kind == "file" for each in tree.entries)
    others = counted(len(tree.left_out), "path")
    print_message(f"{counted(count, 'file')}, {size_text(total)}; {others} left out")
    return 0


def _package_explain(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cloudjob.package import explain

    spec = described(options)
    decision = explain(
        Path(spec.source), options.path, home=state_home(), follow_links=spec.links == "follow"
    )
    if options.json:
        print_json(decision._asdict())
        return 0
    at = "" if decision.decided_at.rstrip("/") == decision.path.rstrip("/") else decision.decided_at
    where = f" (through {one_line(at)})" if at else ""
    outcome = "included" if decision.is_packed else "left out"
    print(f"{one_line(decision.path)}: {outcome}: {one_line(decision.rule)}{where}")
    return 0


def _store_gc(options: argparse.Namespace) -> int:
    from cloudjob import api

    collected = api.collect_packages(
        described(options), keep_days=options.keep_days, dry_run=options.dry_run
    )
    if options.json:
        print_json({"deleted": list(collected.keys), "spared": collected.spared})
        return 0
    for key in collected.keys:
        print_name(key)
    outcome = "would be deleted" if options.dry_run else "deleted"
    count = counted(len(collected.keys), "object")
    print_message(f"{count} {outcome}; {counted(collected.spared, 'layer')} kept")
    return 0


def add_package(parser: argparse.ArgumentParser) -> None:
    """Give the command package its actions."""
    inner = actions_of(parser)
    text = "list what is packed, and what is left out and why"
    ls = add_action(inner, "ls", _package_ls, text)
    text = "show whether a path is packed, and which line of which file decides"
    explain = add_action(inner, "explain", _package_explain, text)
    explain.add_argument("path", metavar="PATH", help="relative to the source")
    for each in (ls, explain):
        each.add_argument("--source", metavar="DIR", help="the folder; by default the current one")
        each.add_argument(
            "--follow-links", dest="links", action="store_const", const="follow",
            help="follow symbolic links that point outside the source folder",
        )  # fmt: skip
        each.add_argument("--config", metavar="FILE.yaml", help="the job file")
        json_flag(each)


def add_store(parser: argparse.ArgumentParser) -> None:
    """Give the command store its actions."""
    inner = actions_of(parser)
    text = "delete the layers of packages that no job needs"
    gc = add_action(inner, "gc", _store_gc, text)
    gc.add_argument("--dry-run", action="store_true", help="list what would be deleted")
    text = "keep the packages of jobs that ended less than D days ago [default 7]"
    gc.add_argument("--keep-days", type=float, default=7.0, metavar="D", help=text)
    gc.add_argument("--store", metavar="URI", help="the store; by default that of your settings")
    gc.add_argument("--config", metavar="FILE.yaml", help="the job file")
    json_flag(gc)
