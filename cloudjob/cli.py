"""The command line: parses, calls, prints and exits; nothing else in cloudjob prints."""

from __future__ import annotations

import argparse
import os
import sys

from cloudjob import __version__
from cloudjob.errors import CloudJobError, NotReady, SpecError, UsageError

# What a command needs it imports itself, so that `cloudjob --help` costs next to nothing.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Any, NoReturn

    from cloudjob.backends.base import Check
    from cloudjob.console import Transfer
    from cloudjob.detection import Choice
    from cloudjob.job import Filter, Job
    from cloudjob.layers import Kept
    from cloudjob.package import CodePackage
    from cloudjob.pipeline import Preview
    from cloudjob.spec import Field, JobSpec
    from cloudjob.status import JobStatus

_DESCRIPTION = "Takes a training script to the cloud; what runs here runs there unchanged."
_INTERRUPTED = 130
_BROKEN_PIPE = 141
_SPEC_HINT = "`cloudjob submit --help` lists the options, docs/job-file.md every key"
# Between two looks at what a job waits for.
_LOOK_S = 10.0
_SHOWN_LEFT_OUT = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except CloudJobError as error:
        _tell_error(error)
        return error.exit_code
    except BrokenPipeError:
        # The reader has gone (`| head`); Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        return _INTERRUPTED


def _tell_error(error: CloudJobError) -> None:
    """Say everything that is wrong, each with what to do about it."""
    if isinstance(error, SpecError):
        for problem in error.problems:
            _say(f"error: {problem}")
        _say(f"hint: {error.hint or _SPEC_HINT}")
    elif isinstance(error, NotReady):
        for found, hint in error.problems:
            _say(f"error: {found}")
            if hint:
                _say(f"hint: {hint}")
    else:
        _say(f"error: {error.message}")
        _hint(error)


def _run(words: list[str]) -> int:
    parser = _parser(words[0] if words else "")
    # What follows the script is the script's, byte for byte; argparse would take "--" from it.
    own, rest = _split_at_script(parser, words)
    options = parser.parse_args(own)
    if options.command is None:
        parser.print_help()
        return 2
    options.rest = rest
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


# -- commands -----------------------------------------------------------------------------------


def _submit(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cloudjob import config

    return _send(
        config.load(
            _flags(options), job_file=options.config, cwd=Path.cwd(), environ=os.environ
        ).spec,
        options,
    )


def _cp(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cloudjob import config
    from cloudjob import job as jobs

    job = jobs.find(_home(), options.job)
    flags = _flags(options)
    if options.rest is not None:
        flags["args"] = tuple(options.rest)
    made = config.load(
        flags,
        job_file=options.config,
        cwd=Path.cwd(),
        environ=os.environ,
        copied=(f"job {job.id}", job.spec()),
    )
    return _send(made.spec, options)


def _send(spec: JobSpec, options: argparse.Namespace) -> int:
    """Send a job, and stay with it if that is wanted."""
    from cloudjob import pipeline

    if options.dry_run:
        preview = pipeline.preview(spec, _home(), as_text=not options.json)
        _tell_launcher(preview.choice)
        _print_preview(preview, is_json=options.json)
        return 0
    with _Transfers("sent") as transfers:
        job = pipeline.submit(
            spec,
            _home(),
            tell=_tell_package,
            tell_sent=_tell_sent,
            watch=transfers.watch,
            warn=_tell_check,
        )
    if options.detach:
        if options.json:
            _print_json(_status_json(job.status()))
        else:
            print(job.handle)
        return 0
    _say(f"job {job.id} started ({job.handle})")
    status = _attend(job, is_json=options.json)
    if options.json:
        _print_json(_status_json(status))
    return _exit_code(status)


def _status(options: argparse.Namespace) -> int:
    from cloudjob import job as jobs

    status = jobs.find(_home(), options.job).status()
    if options.json:
        _print_json(_status_json(status))
    else:
        _print_status(status)
    return 0


def _logs(options: argparse.Namespace) -> int:
    from cloudjob import job as jobs

    job = jobs.find(_home(), options.job)
    _check_range("--node", options.node, job.nodes)
    _check_range("--rank", options.rank, job.ranks)
    if options.raw:
        if options.rank is None:
            raise UsageError("logs --raw: of which rank?", hint="add --rank R")
        for line in job.lines(options.node, options.rank, follow=options.follow):
            sys.stdout.buffer.write(line.data)
            if options.follow:
                sys.stdout.buffer.flush()
        return 0
    _stream(job, sys.stdout.buffer.fileno(), follow=options.follow, options=options)
    return 0


def _check_range(flag: str, number: int | None, count: int) -> None:
    if number is not None and number >= count:
        raise UsageError(f"{flag} {number}: the job has {count}", hint=f"0 to {count - 1}")


def _wait(options: argparse.Namespace) -> int:
    from cloudjob import job as jobs

    status = jobs.find(_home(), options.job).wait()
    if options.json:
        _print_json(_status_json(status))
    else:
        _report(status)
    return _exit_code(status)


def _list(options: argparse.Namespace) -> int:
    from cloudjob import job as jobs

    statuses = [status for _, status in jobs.find_all(_home(), _filter(options))]
    if options.limit is not None:
        statuses = statuses[: options.limit]
    if options.json:
        _print_json([_status_json(status) for status in statuses])
        return 0
    if not statuses:
        is_all = _filter(options) == jobs.Filter()
        _say("no jobs yet; `cloudjob submit SCRIPT` starts one" if is_all else "no such jobs")
        return 0
    width = max(len(status.job) for status in statuses)
    print(f"{'JOB':<{width}}  {'STATE':<9}  {'BACKEND':<10}  {'NODES':>5}  CREATED")
    for status in statuses:
        print(
            f"{status.job:<{width}}  {status.state:<9}  {status.backend:<10}  "
            f"{status.nodes:>5}  {status.created_at}"
        )
    return 0


def _cancel(options: argparse.Namespace) -> int:
    from cloudjob import job as jobs

    which = _filter(options)
    is_bulk = options.all or which != jobs.Filter()
    if is_bulk == (options.job is not None):
        raise UsageError("cancel: which job?", hint="cloudjob cancel JOB, or --all, or a filter")
    if is_bulk:
        return _cancel_all(which, is_urgent=options.now)
    job = jobs.find(_home(), options.job)
    job.cancel(is_urgent=options.now)
    status = job.wait()
    _say(f"job {job.id}: {status.state}")
    return 0


def _cancel_all(which: Filter, *, is_urgent: bool) -> int:
    """Ask every job that passes to end, then wait for all; one that cannot be asked is told of."""
    from cloudjob import job as jobs

    found = [job for job, status in jobs.find_all(_home(), which) if not status.state.is_final]
    asked, code = [], 0
    for job in found:
        try:
            job.cancel(is_urgent=is_urgent)
            asked.append(job)
        except CloudJobError as error:
            _tell_error(error)
            code = error.exit_code
    for job in asked:
        try:
            _say(f"job {job.id}: {job.wait().state}")
        except CloudJobError as error:
            _tell_error(error)
            code = error.exit_code
    _say(f"{len(asked)} of {len(found)} job(s) cancelled")
    return code


def _diff(options: argparse.Namespace) -> int:
    from cloudjob import job as jobs

    rows = jobs.differences(*(jobs.find(_home(), job) for job in (options.first, options.second)))
    if options.json:
        _print_json({key: [first, second] for key, first, second in rows})
    else:
        for key, first, second in rows:
            print(f"{key}: {_printable(str(first))} -> {_printable(str(second))}")
    return 1 if rows else 0


def _events(options: argparse.Namespace) -> int:
    from cloudjob import job as jobs

    events = jobs.find(_home(), options.job).events()
    if options.json:
        _print_json([event._asdict() for event in events])
    else:
        for event in events:
            print(f"{event.at}  {event.level:<7}  {_printable(event.message)}")
    return 0


def _metrics(options: argparse.Namespace) -> int:
    from cloudjob import job as jobs

    metrics = jobs.find(_home(), options.job).metrics()
    if options.json:
        _print_json([metric._asdict() for metric in metrics])
        return 0
    print(f"{'NODE':>4}  {'METRIC':<12}  {'LAST':>8}  {'MEAN':>8}  {'MOST':>8}")
    for metric in metrics:
        known = [value for value in metric.values if value is not None]
        shown = (known[-1], sum(known) / len(known), max(known)) if known else ()
        numbers = "  ".join(f"{value:8.1f}" for value in shown) or f"{'-':>8}"
        print(f"{metric.node:>4}  {metric.name:<12}  {numbers}")
    return 0


def _outputs(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cloudjob import job as jobs

    job = jobs.find(_home(), options.job)
    found = job.outputs()
    if not found:
        _say(f"job {job.id} has left no outputs")
    elif options.to is None:
        print("\n".join(found))
    else:
        for path in job.fetch_outputs(Path(options.to)):
            print(path)
    return 0


def _rm(options: argparse.Namespace) -> int:
    from cloudjob import job as jobs

    if options.orphans == (options.job is not None):
        raise UsageError("rm: of which job?", hint="cloudjob rm JOB, or cloudjob rm --orphans")
    if options.orphans:
        removed = jobs.sweep(_home())
        for name in removed:
            _say(f"removed what {name} had left")
        _say(f"{len(removed)} orphan(s)")
        return 0
    job = jobs.find(_home(), options.job)
    if job.status().state in ("PENDING", "RUNNING"):
        raise UsageError(f"removing {job.id}: it has not ended", hint=f"cloudjob cancel {job.id}")
    outputs = job.outputs(is_own=True)
    if outputs and not options.force:
        raise UsageError(
            f"removing {job.id}: it has {len(outputs)} output file(s)",
            hint=f"cloudjob outputs {job.id} --to DIR keeps them; --force removes them too",
        )
    job.remove()
    _say(f"removed {job.id}")
    return 0


def _image_build(options: argparse.Namespace) -> int:
    from cloudjob import images

    built = images.build(
        options.name,
        base=options.base,
        ca_bundle=options.ca_bundle,
        pip_config=options.pip_config,
        tell=_say,
    )
    _say("built" if built.is_new else "it is there already: nothing that goes into it has changed")
    print(built.tag)
    return 0


def _emulator_up(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cloudjob.emulator import daemon

    config = Path(options.settings) if options.settings else None
    found = daemon.up(_home(), config=config, port=options.port)
    if found.note:
        _say(found.note)
    _print_emulator(found.shown(), is_json=options.json)
    return 0


def _emulator_down(_options: argparse.Namespace) -> int:
    from cloudjob.emulator import daemon

    _say("the emulator has ended" if daemon.down(_home()) else "no emulator runs")
    return 0


def _emulator_status(options: argparse.Namespace) -> int:
    from cloudjob.emulator import daemon

    _print_emulator(daemon.status(_home()), is_json=options.json)
    return 0


def _emulator_reset(_options: argparse.Namespace) -> int:
    from cloudjob.emulator import daemon

    ran = daemon.reset(_home())
    _say("all is forgotten" + (", and the emulator runs again with new keys" if ran else ""))
    return 0


def _emulator_fault(options: argparse.Namespace) -> int:
    from cloudjob.emulator import daemon
    from cloudjob.emulator.faults import KINDS

    if options.kind == "clear":
        _say(f"{daemon.clear_faults(_home())} fault(s) ended")
    elif options.kind == "list":
        _print_json(daemon.faults(_home()))
    elif options.kind in KINDS:
        names = ("kind", "count", "seconds", "amount", "job", "node", "path")
        _print_json(daemon.add_fault(_home(), **{name: getattr(options, name) for name in names}))
    else:
        raise UsageError(
            f"emulator fault {options.kind}: there is no such fault",
            hint=f"choose one of {', '.join((*KINDS, 'list', 'clear'))}",
        )
    return 0


def _print_emulator(values: dict[str, Any], *, is_json: bool) -> None:
    if is_json:
        _print_json(values)
        return
    for key, value in values.items():
        if value != "":
            print(f"{key:<14} {value}")


def _doctor(options: argparse.Namespace) -> int:
    from cloudjob import doctor

    if options.image:
        checks = doctor.check_image(options.image)
    elif options.backend:
        checks = doctor.check_backend(_described(options), _home())
    else:
        checks = [*doctor.check_machine(_home()), *doctor.check_store(_doctors_store(options))]
    if options.json:
        _print_json([check._asdict() for check in checks])
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            word = "OK" if check.is_ok else "MISSING" if check.is_needed else "no"
            print(f"{check.name:<{width}}  {word:<7}  {_printable(check.found)}")
            if not check.is_ok and check.hint:
                print(f"{'':<{width}}  {'':<7}  -> {check.hint}")
    return 0 if doctor.is_well(checks) else 1


def _described(options: argparse.Namespace) -> JobSpec:
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


def _doctors_store(options: argparse.Namespace) -> str:
    """Return the store that a submit from here would use."""
    return _full_store(_described(options))


def _full_store(spec: JobSpec) -> str:
    from cloudjob.home import store_uri
    from cloudjob.store import full_uri

    return full_uri(spec.store or store_uri(_home()), spec.sections)


def _config_show(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cloudjob import config

    loaded = config.load(
        _flags(options),
        job_file=options.config,
        cwd=Path.cwd(),
        environ=os.environ,
        needs_script=False,
    )
    rows = config.show(loaded)
    if options.json:
        _print_json([{"key": k, "value": v, "origin": origin} for k, v, origin in rows])
        return 0
    width = max(len(key) for key, _, _ in rows)
    for key, value, origin in rows:
        print(f"{key:<{width}}  {_printable(value)}  ({origin})")
    return 0


def _config_schema(_options: argparse.Namespace) -> int:
    from cloudjob import config

    _print_json(config.json_schema())
    return 0


def _package_ls(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cloudjob.package import scan

    spec = _source_spec(options)
    tree = scan(Path(spec.source), follow_links=spec.links == "follow")
    if options.json:
        files = [
            {"path": each.name, "kind": each.kind, "mode": f"{each.mode:04o}",
             "size_bytes": each.size_bytes}
            for each in tree.entries
        ]  # fmt: skip
        left_out = [{"path": path, "reason": reason} for path, reason in tree.left_out]
        _print_json({"source": spec.source, "entries": files, "left_out": left_out})
        return 0
    for each in tree.entries:
        if each.kind != "folder":
            print(f"{each.size_bytes:>12}  {_printable(each.name)}")
    for path, reason in tree.left_out:
        print(f"{'left out':>12}  {_printable(path)}  ({_printable(reason)})")
    total = sum(each.size_bytes for each in tree.entries)
    count = sum(each.kind == "file" for each in tree.entries)
    _say(f"{count} file(s), {_size(total)}; {len(tree.left_out)} path(s) left out")
    return 0


def _package_explain(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cloudjob.package.explain import explain

    spec = _source_spec(options)
    found = explain(Path(spec.source), options.path, follow_links=spec.links == "follow")
    if options.json:
        _print_json(found._asdict())
        return 0
    at = "" if found.decided_at.rstrip("/") == found.path.rstrip("/") else found.decided_at
    where = f" (through {_printable(at)})" if at else ""
    word = "goes" if found.goes else "left out"
    print(f"{_printable(found.path)}: {word}: {_printable(found.rule)}{where}")
    return 0


def _source_spec(options: argparse.Namespace) -> JobSpec:
    """Return what the options and the files say about the source."""
    from pathlib import Path

    from cloudjob import config

    flags = {name: getattr(options, name) for name in ("source", "links", "store")
             if getattr(options, name, None) is not None}  # fmt: skip
    return config.load(
        flags, job_file=options.config, cwd=Path.cwd(), environ=os.environ, needs_script=False
    ).spec


def _store_gc(options: argparse.Namespace) -> int:
    from cloudjob import job as jobs

    spec = _source_spec(options)
    store = _full_store(spec)
    found = jobs.collect(_home(), store, keep_days=options.keep_days, dry_run=options.dry_run)
    if options.json:
        _print_json({"deleted": list(found.keys), "spared": found.spared})
        return 0
    for key in found.keys:
        print(key)
    word = "would be deleted" if options.dry_run else "deleted"
    _say(f"{len(found.keys)} object(s) {word}; {found.spared} layer(s) stay")
    return 0


def _home() -> Path:
    from cloudjob.home import home

    return home()


# -- an attached job ----------------------------------------------------------------------------


def _attend(job: Job, *, is_json: bool) -> JobStatus:
    """Show the job's log until it has ended; Ctrl-C and SIGTERM cancel it."""
    import signal
    import threading

    asked = 0

    def cancel(_number: int, _frame: object) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            _say(f"cancelling {job.id}; once more ends it at once")
        # Not in the handler: it may have cut into anything, also into a lock that this needs.
        threading.Thread(target=job.cancel, kwargs={"is_urgent": asked > 1}).start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, cancel)
    # With --json the one object owns stdout.
    try:
        _stream(job, 2 if is_json else 1, follow=True, options=None)
    except BrokenPipeError:
        _say(f"nobody reads the log any more; job {job.id} goes on")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    status = job.wait()
    _report(status)
    return status


class _Waiting:
    """Says what a job waits for, as long as it has written nothing."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._said = ""
        self._look_at = 0.0

    def heard(self, data: bytes) -> None:
        """Take in what came; nothing is a reason to look, now and then."""
        import time

        if data:
            self._look_at = float("inf")
        elif time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_S
            word = self._job.waits_for()
            if word not in ("", self._said):
                _say(f"job {self._job.id} waits: {_printable(word)}")
                self._said = word


def _stream(job: Job, descriptor: int, *, follow: bool, options: argparse.Namespace | None) -> None:
    from cloudjob.console import Screen

    node = options.node if options else None
    screen = Screen(is_live=os.isatty(descriptor), rank=options.rank if options else None)
    waiting = _Waiting(job)
    for piece in job.pieces(node, follow=follow):
        waiting.heard(piece.data)
        if piece.data:
            ranks, words = screen.show(piece.data)
            _write(descriptor, ranks)
            _write(2, words)
    _write(descriptor, screen.finish())


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _report(status: JobStatus) -> None:
    """Say how a job ended: where, who and why."""
    seconds = _seconds(status)
    took = f" in {seconds:.1f} s" if seconds is not None else ""
    _say(f"job {status.job}: {status.state}{took}")
    failure = status.failure
    if failure is None:
        return
    where = [
        f"node {failure.node}" if failure.node is not None else "",
        f"({failure.host})" if failure.host else "",
        f"rank {failure.rank}" if failure.rank is not None else "",
    ]
    place = " ".join(part for part in where if part)
    code = f" [exit code {failure.exit_code}]" if failure.exit_code is not None else ""
    _say(f"  {place + ': ' if place else ''}{_printable(failure.message)}{code}")
    for line in failure.last_lines:
        _say(f"  | {_printable(line)}")


def _seconds(status: JobStatus) -> float | None:
    from datetime import datetime

    if status.started_at is None or status.ended_at is None:
        return None
    start, end = (
        datetime.fromisoformat(text.replace("Z", "+00:00"))
        for text in (status.started_at, status.ended_at)
    )
    return (end - start).total_seconds()


def _exit_code(status: JobStatus) -> int:
    if status.exit_code is None:
        return 0 if status.state == "SUCCEEDED" else 1
    return status.exit_code


# -- printing -----------------------------------------------------------------------------------


def _print_status(status: JobStatus) -> None:
    rows: list[tuple[str, object]] = [
        ("job", status.job),
        ("state", status.state),
        ("backend", f"{status.backend} ({status.native_state})"),
        ("size", f"{status.nodes} node(s) x {status.procs_per_node} rank(s)"),
        ("created", status.created_at),
        ("started", status.started_at or "-"),
        ("ended", status.ended_at or "-"),
    ]
    if status.exit_code is not None:
        rows.append(("exit code", status.exit_code))
    if status.cause:
        rows.append(("cause", status.cause))
    for key, value in rows:
        print(f"{key:<10} {value}")
    if status.failure:
        _report(status)


def _print_preview(preview: Preview, *, is_json: bool) -> None:
    if preview.text:
        print(preview.text, end="")
        return
    import json

    package = preview.package
    shown = {
        "submission": preview.submission,
        "package": {
            "digest": package.digest,
            "size_bytes": package.size_bytes,
            "files": package.files,
            "left_out": [{"path": path, "reason": reason} for path, reason in package.left_out],
        },
        "request": preview.request,
        "plans": list(preview.plans),
    }
    print(json.dumps(shown, indent=None if is_json else 2))


def _tell_check(check: Check) -> None:
    _say(f"warning: {check.name}: {_printable(check.found)}")
    if check.hint:
        _say(f"hint: {check.hint}")


def _tell_launcher(choice: Choice | None) -> None:
    if choice:
        _say(f"launcher {choice.launcher}: {_printable(choice.why)}")


def _tell_package(package: CodePackage, choice: Choice | None) -> None:
    _tell_launcher(choice)
    secrets = [item for item in package.left_out if "secret" in item.reason]
    for path, reason in secrets[:_SHOWN_LEFT_OUT]:
        _say(f"left out of the package: {_printable(path)}: {reason}")
    if len(secrets) > _SHOWN_LEFT_OUT:
        _say(f"… and {len(secrets) - _SHOWN_LEFT_OUT} more; `--dry-run` lists them all")


class _Transfers:
    """Shows transfers, one after the other, on stderr."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._current: Transfer | None = None

    def __enter__(self) -> _Transfers:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def watch(self, size_bytes: int) -> Callable[[int], None]:
        import time

        from cloudjob.console import Transfer

        self._end()
        is_live = os.isatty(2)
        shown = Transfer(self._verb, size_bytes, time.monotonic(), is_live=is_live)
        self._current = shown
        return lambda count: _show(shown.move(count, time.monotonic()))

    def _end(self) -> None:
        import time

        if self._current is not None:
            _show(self._current.end(time.monotonic()))
            self._current = None


def _tell_sent(package: CodePackage, kept: Kept) -> None:
    whole = _size(sum(layer.size_bytes for layer in kept.layers))
    words = "1 layer new" if kept.sent_layers else "nothing new"
    _say(f"sent {_size(kept.sent_bytes)} of {whole}, {words}: {package.files} file(s)")


def _size(size_bytes: int) -> str:
    from cloudjob.package.words import size_text

    return size_text(size_bytes)


def _status_json(status: JobStatus) -> dict[str, Any]:
    from cloudjob.status import to_json

    return to_json(status)


def _print_json(value: object) -> None:
    import json

    print(json.dumps(value))


def _printable(text: str) -> str:
    """Return ``text`` in one line that cannot play tricks on a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _say(text: str) -> None:
    _show(text + "\n")


def _show(text: str) -> None:
    if not text:
        return
    try:
        sys.stderr.write(text.encode("utf-8", "backslashreplace").decode("utf-8"))
        sys.stderr.flush()
    except OSError:
        pass  # whoever read our words has gone; the job matters more


def _hint(error: CloudJobError) -> None:
    if error.hint:
        _say(f"hint: {error.hint}")


# -- the parser ---------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports a fault as every other fault is reported."""

    command = ""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing a page of usage."""
        hint = f"{self.prog} --help"
        unknown = message.partition("unrecognized arguments: ")[2].split()
        if unknown:
            import difflib

            word = unknown[0].partition("=")[0]
            close = difflib.get_close_matches(word, self._all_options(), n=1)
            hint = f"did you mean {close[0]}? {hint}" if close else hint
        raise UsageError(f"reading the command line: {message}", hint=hint)

    def _all_options(self) -> list[str]:
        options = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                options += action.choices[self.command]._option_string_actions
        return options


def _parser(command: str) -> _Parser:
    """Return the parser of all commands, with the options of ``command`` alone."""
    parser = _Parser(prog="cloudjob", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"cloudjob {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    _add_submit(commands, is_asked=command == "submit")
    job = _command(commands, "status", _status, "say where a job stands")
    _json_flag(job)
    logs = _command(commands, "logs", _logs, "show the log of a job")
    logs.add_argument("-f", "--follow", action="store_true", help="until the job has ended")
    logs.add_argument("--node", type=_count, metavar="I", help="only this node's")
    logs.add_argument("--rank", type=_count, metavar="R", help="only this rank's")
    logs.add_argument("--raw", action="store_true", help="the rank's bytes, without marks")
    _json_flag(_command(commands, "wait", _wait, "wait for a job; exits with its exit code"))
    _add_many(commands, is_cp=command == "cp")
    outputs = _command(commands, "outputs", _outputs, "list or fetch what a job left")
    outputs.add_argument("--to", metavar="DIR", help="copy them below DIR")
    rm = _command(commands, "rm", _rm, "remove all that is left of a job", job=False)
    rm.add_argument("job", nargs="?", metavar="JOB", help="its id, its name or its handle")
    rm.add_argument("--force", action="store_true", help="its outputs too")
    rm.add_argument("--orphans", action="store_true", help="what submits that broke off have left")
    _add_image(commands)
    _add_emulator(commands, is_asked=command == "emulator")
    doctor = _command(commands, "doctor", _doctor, "check this machine, or an image", job=False)
    doctor.add_argument("--backend", metavar="NAME", default="", help="check what it needs")
    doctor.add_argument("--image", metavar="REF", default="", help="check this container image")
    doctor.add_argument("--store", metavar="URI", help="check this store")
    doctor.add_argument("--config", metavar="FILE.yaml", help="check what this job file needs")
    _json_flag(doctor)
    _add_config(commands, is_asked=command == "config")
    _add_package(commands)
    _add_store(commands)
    parser.command = command
    return parser


def _add_many(commands: Any, *, is_cp: bool) -> None:
    """Add the commands on several jobs, and those that compare or repeat one."""
    listed = _command(commands, "list", _list, "list the jobs submitted from here", job=False)
    _filter_flags(listed)
    listed.add_argument("--limit", type=_count, metavar="N", help="only the newest N")
    _json_flag(listed)
    cancel = _command(commands, "cancel", _cancel, "end a job, or all that pass", job=False)
    cancel.add_argument("job", nargs="?", metavar="JOB", help="its id, its name or its handle")
    _filter_flags(cancel)
    cancel.add_argument("--all", action="store_true", help="every job that has not ended")
    cancel.add_argument("--now", action="store_true", help="without the grace period")
    _add_cp(commands, is_asked=is_cp)
    diff = _command(commands, "diff", _diff, "show in what two jobs differ", job=False)
    diff.add_argument("first", metavar="JOB", help="its id, its name or its handle")
    diff.add_argument("second", metavar="OTHER", help="the other one")
    _json_flag(diff)
    _json_flag(_command(commands, "events", _events, "show what happened to a job"))
    _json_flag(_command(commands, "metrics", _metrics, "show what the nodes of a job used"))


def _command(
    commands: Any, name: str, run: Callable[..., int], text: str, *, job: bool = True
) -> Any:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    if job:
        parser.add_argument("job", metavar="JOB", help="its id, its name or its handle")
    return parser


def _add_submit(commands: Any, *, is_asked: bool) -> None:
    parser = _command(commands, "submit", _submit, "run a script as a job", job=False)
    if not is_asked:
        return
    _spec_flags(parser)
    parser.add_argument("--detach", action="store_true", help="print the handle and return")
    parser.add_argument("--dry-run", action="store_true", help="print what would be sent")
    _json_flag(parser)
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="relative to the source")
    parser.usage = "cloudjob submit [OPTIONS] SCRIPT [ARGS]..."


def _add_cp(commands: Any, *, is_asked: bool) -> None:
    text = "submit a job again, with changes"
    parser = _command(commands, "cp", _cp, text)
    if not is_asked:
        return
    _spec_flags(parser)
    parser.add_argument("--detach", action="store_true", help="print the handle and return")
    parser.add_argument("--dry-run", action="store_true", help="print what would be sent")
    _json_flag(parser)
    parser.set_defaults(script=None)
    parser.usage = "cloudjob cp [OPTIONS] JOB [-- ARGS...]"


def _filter_flags(parser: Any) -> None:
    """Add what says which jobs are meant."""
    for flag, metavar, text in (
        ("--backend", "NAME", "those of a backend"),
        ("--name", "PATTERN", "those whose name or id is like it, train-* for example"),
        ("--state", "STATE", "those in a state, RUNNING for example"),
    ):
        parser.add_argument(flag, action="append", metavar=metavar, default=[], help=text)
    parser.add_argument(
        "--since", metavar="TIME", default="", help="those since then: 2h, 3d, or a date"
    )


def _filter(options: argparse.Namespace) -> Filter:
    """Return which jobs are meant."""
    from cloudjob.job import Filter
    from cloudjob.spec import BACKENDS, nearest
    from cloudjob.status import JobState

    states = tuple(state.upper() for state in options.state)
    for flag, words, allowed in (
        ("--backend", options.backend, BACKENDS),
        ("--state", states, tuple(state.value for state in JobState)),
    ):
        for word in words:
            if word not in allowed:
                raise UsageError(
                    f"reading {flag} {word}: there is no such one{nearest(word, allowed)}",
                    hint=f"one of {', '.join(allowed)}",
                )
    return Filter(
        backends=tuple(options.backend),
        names=tuple(options.name),
        states=states,
        since=_since(options.since) if options.since else "",
    )


def _since(text: str) -> str:
    """Return a time as records have it: so long ago, or a date, or a date and a time."""
    import re
    from datetime import datetime, timedelta, timezone

    ago = re.fullmatch(r"([0-9]{1,6})([smhdw])", text)
    if ago:
        units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
        moment = datetime.now(timezone.utc) - timedelta(**{units[ago[2]]: int(ago[1])})
    else:
        try:
            moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
        except ValueError as error:
            raise UsageError(
                f"reading --since {text}: this is no time", hint="2h, 3d, or 2026-01-31"
            ) from error
    return moment.astimezone(timezone.utc).isoformat(timespec="milliseconds")[:23] + "Z"


def _add_image(commands: Any) -> None:
    parser = commands.add_parser("image", help="build the images that jobs run in")
    inner = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    text = "build an image, unless all that goes into it is as it was"
    build = inner.add_parser("build", help=text, description=text, allow_abbrev=False)
    build.set_defaults(run=_image_build)
    build.add_argument("name", metavar="NAME", help="base, or one of the others in images/")
    build.add_argument("--base", metavar="REF", default="", help="begin with this image")
    build.add_argument(
        "--ca-bundle", metavar="FILE", default="", help="pip trusts these; not kept in the image"
    )
    build.add_argument(
        "--pip-config", metavar="FILE", default="", help="pip reads this; not kept in the image"
    )


def _add_emulator(commands: Any, *, is_asked: bool) -> None:
    parser = commands.add_parser("emulator", help="a ModelArts on this machine")
    if not is_asked:
        return
    from cloudjob.emulator.faults import KINDS

    inner = parser.add_subparsers(dest="action", metavar="COMMAND", required=True)
    up = _command(inner, "up", _emulator_up, "start it, and print where it is", job=False)
    up.add_argument("--settings", metavar="FILE.yaml", default="", help="what the account has")
    up.add_argument("--port", type=_count, metavar="N", default=0, help="where the API listens")
    _json_flag(up)
    _command(inner, "down", _emulator_down, "end it; its jobs go on", job=False)
    status = _command(inner, "status", _emulator_status, "say what it does", job=False)
    _json_flag(status)
    _command(inner, "reset", _emulator_reset, "forget all jobs and objects", job=False)
    fault = _command(inner, "fault", _emulator_fault, "let something go wrong", job=False)
    fault.epilog = "; ".join(f"{kind}: {text}" for kind, text in KINDS.items())
    fault.add_argument("kind", metavar="KIND", help="what goes wrong; or list, or clear")
    fault.add_argument("--count", type=_count, metavar="N", default=0, help="so many times")
    fault.add_argument("--seconds", type=float, metavar="S", default=0.0, help="for so long")
    fault.add_argument(
        "--amount", type=float, metavar="S", default=0.0, help="how slow, how skewed"
    )
    fault.add_argument("--job", metavar="ID", default="", help="only this job, by the service's id")
    fault.add_argument("--node", type=_count, metavar="I", default=0, help="which node")
    fault.add_argument("--path", metavar="TEXT", default="", help="only requests to such a path")


def _add_config(commands: Any, *, is_asked: bool) -> None:
    parser = commands.add_parser("config", help="show the configuration and its origin")
    if not is_asked:
        return
    inner = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = inner.add_parser("show", help="each value and where it comes from", allow_abbrev=False)
    show.set_defaults(run=_config_show)
    _spec_flags(show)
    _json_flag(show)
    show.add_argument("script", nargs="?", metavar="SCRIPT")
    schema = inner.add_parser("schema", help="the JSON Schema of a job file, for editors")
    schema.set_defaults(run=_config_schema)


def _add_package(commands: Any) -> None:
    parser = commands.add_parser("package", help="what of the source goes into the package")
    inner = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    text = "list what goes, and what is left out and why"
    ls = inner.add_parser("ls", help=text, description=text, allow_abbrev=False)
    ls.set_defaults(run=_package_ls)
    text = "say of a path whether it goes, and which line of which file decides"
    explain = inner.add_parser("explain", help=text, description=text, allow_abbrev=False)
    explain.set_defaults(run=_package_explain)
    explain.add_argument("path", metavar="PATH", help="relative to the source")
    for each in (ls, explain):
        each.add_argument("--source", metavar="DIR", help="the folder (by default the current)")
        each.add_argument(
            "--follow-links", dest="links", action="store_const", const="follow",
            help="take along what links outside the source lead to",
        )  # fmt: skip
        each.add_argument("--config", metavar="FILE.yaml", help="the job file")
        _json_flag(each)


def _add_store(commands: Any) -> None:
    parser = commands.add_parser("store", help="look after the store of packages")
    inner = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    text = "delete the layers of packages that no job needs"
    gc = inner.add_parser("gc", help=text, description=text, allow_abbrev=False)
    gc.set_defaults(run=_store_gc)
    gc.add_argument("--dry-run", action="store_true", help="say what would be deleted")
    gc.add_argument("--keep-days", type=float, default=7.0, metavar="D",
                    help="keep the package of a job for so long after its end (7)")  # fmt: skip
    gc.add_argument("--store", metavar="URI", help="the store (by default that of your settings)")
    gc.add_argument("--config", metavar="FILE.yaml", help="the job file")
    _json_flag(gc)


def _spec_flags(parser: Any) -> None:
    """Add the option of every field that has one."""
    from cloudjob.spec import FIELDS

    for field in FIELDS:
        if not field.flag:
            continue
        names = [field.short, field.flag] if field.short else [field.flag]
        if field.const:
            kind: dict[str, Any] = {"action": "store_const", "const": field.const}
        else:
            action = "append" if field.kind in ("map", "secrets") else "store"
            kind = {"action": action, "metavar": field.metavar}
        parser.add_argument(*names, dest=field.name, help=_escaped(field), **kind)
    parser.add_argument(
        "--env-file", action="append", metavar="FILE", help="read variables from FILE"
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="the job file")


def _escaped(field: Field) -> str:
    return field.help.replace("%", "%%")


def _json_flag(parser: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON value")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _split_at_script(parser: _Parser, words: list[str]) -> tuple[list[str], list[str] | None]:
    """Part the words of cloudjob, up to and with SCRIPT, from those of the script."""
    if words[:1] == ["cp"]:
        end = words.index("--") if "--" in words else len(words)
        return words[:end], words[end + 1 :] if end < len(words) else None
    if words[:1] != ["submit"]:
        return words, []
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    submit = commands.choices["submit"]
    takes_value = {
        name for action in submit._actions for name in action.option_strings if action.nargs is None
    }
    index = 1
    while index < len(words):
        word = words[index]
        if word == "--":
            return words[:index] + words[index : index + 2], words[index + 2 :]
        if not word.startswith("-") or word == "-":
            return words[: index + 1], words[index + 1 :]
        index += 2 if word in takes_value else 1
    return words, []


def _flags(options: argparse.Namespace) -> dict[str, object]:
    """Return what the user gave on the command line, by field."""
    from cloudjob.config import read_env_file
    from cloudjob.spec import FIELDS

    flags: dict[str, object] = {}
    for field in FIELDS:
        value = getattr(options, field.name, None) if field.flag else None
        if value is not None:
            flags[field.name] = _pairs(field, value) if isinstance(value, list) else value
    if options.env_file:
        variables: dict[str, str] = {}
        for path in options.env_file:
            variables.update(read_env_file(path, os.environ))
        given = flags.get("env", {})
        assert isinstance(given, dict)
        flags["env"] = {**variables, **given}
    if options.script is not None:
        flags["script"] = options.script
        flags["args"] = tuple(options.rest)
    return flags


def _pairs(field: Field, texts: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals and field.name == "env":
            if name not in os.environ:
                raise UsageError(
                    f"reading {field.flag} {text}: {name} is not set in your environment",
                    hint=f"{field.flag} {name}=VALUE",
                )
            value = os.environ[name]
        elif not equals and field.name == "inputs":
            raise UsageError(f"reading {field.flag} {text}: no '='", hint=f"give {field.metavar}")
        pairs[name] = value
    return pairs


if __name__ == "__main__":
    sys.exit(main())
