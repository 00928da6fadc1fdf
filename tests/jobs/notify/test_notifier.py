"""Notifications: what is sent, when, by whom, and what stays secret."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import cloudjob
from cloudjob.cli import main
from cloudjob.errors import SpecError, UsageError
from cloudjob.home import locks
from cloudjob.model import grid
from cloudjob.model.sections import Notify
from cloudjob.model.status import Failure, JobState
from cloudjob.notify import message, process, send, start
from cloudjob.notify.send import NotSent
from cloudjob.retries import RequestLimits
from cloudjob.tracking.sweep import Sweep
from tests.support.homes import make_used_home
from tests.support.polling import poll
from tests.support.statuses import status_of

LIMIT_S = 180.0
QUICK = RequestLimits(total_s=60.0, answer_s=60.0, pause_s=0.01, longest_pause_s=0.02)
# Part of the webhook's URL that must not appear in any output.
KEY = "T0PSECRETKEY"
TRAIN = """
import os, sys, time
print("the token is", os.environ.get("TOKEN"), flush=True)
while "--wait-for" in sys.argv and not os.path.exists(sys.argv[-1]):
    time.sleep(0.02)
if "--read" in sys.argv:
    open(sys.argv[-1]).close()
sys.exit(7 if "--fail" in sys.argv else 0)
"""
ENDED = status_of("train-2k83", state=JobState.SUCCEEDED, exit_code=0)


@dataclass
class Webhook:
    """A server on loopback that records the requests it receives.

    Args:
        codes: Status codes of the first answers; later answers have 200.
    """

    url: str = ""
    codes: list[int] = field(default_factory=list)
    received: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    hook = Webhook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            hook.paths.append(self.path)
            hook.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(hook.codes.pop(0) if hook.codes else 200)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hook.url = f"http://127.0.0.1:{server.server_port}/services/{KEY}"
        yield hook
        server.shutdown()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, webhook: Webhook) -> Path:
    """The state folder; the current folder has a script, and HOOK is the webhook's URL."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(TRAIN)
    monkeypatch.chdir(project)
    make_used_home(tmp_path / "home")
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOOK", webhook.url)
    monkeypatch.setenv("TOKEN", "very-secret-token")
    return tmp_path / "home"


def submit(*args: str, **options: Any) -> cloudjob.Job:
    notify = {"webhook": "HOOK", **options.pop("notify", {})}
    return cloudjob.submit("train.py", args, launcher="python", notify=notify, **options)


def notifiers(job: str) -> dict[int, bytes]:
    """Return the argv of each running notifier of a job, by process id.

    A submit can return just before the argv of a new notifier is visible in /proc.
    """
    argv_of = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            argv = path.read_bytes()
        except OSError:
            continue
        if f"cloudjob-notifier-{job}".encode() in argv.split(b"\0"):
            argv_of[int(path.parent.name)] = argv
    return argv_of


def send_end(
    webhook_url: str = "", command: tuple[str, ...] = (), limits: RequestLimits = QUICK
) -> None:
    targets = message.Targets(("end",), webhook_url, command, 60, [webhook_url] * bool(webhook_url))
    send.send(message.of_end(ENDED), targets, limits)


# -- whole jobs ---------------------------------------------------------------------------------


def test_a_failure_is_sent_once_with_the_verdict_and_without_secrets(
    home: Path, webhook: Webhook, capfd: pytest.CaptureFixture[str]
):
    argv = ["--secret", "TOKEN", "--notify", "HOOK", "--launcher", "python", "train.py", "--fail"]

    assert main(["submit", *argv]) == 7
    printed = "".join(capfd.readouterr())
    [sent] = webhook.received
    assert webhook.paths == [f"/services/{KEY}"]
    assert (sent["event"], sent["state"], sent["exit_code"]) == ("failure", "FAILED", 7)
    assert (sent["node"], sent["rank"], sent["message"]) == (0, 0, "sys.exit(7)")
    assert sent["last_lines"] == ["the token is ***"]
    assert sent["text"].startswith(f"job {sent['job']}: FAILED in ")
    assert "sys.exit(7) (node 0 rank 0)\n| the token is ***" in sent["text"]
    files = [path.read_bytes() for path in home.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [data for data in files if KEY.encode() in data]
    assert KEY not in printed
    assert "warning" not in printed
    assert list((home / "notify").iterdir()) == []


def test_a_hang_is_sent_with_the_rank_and_the_line_that_it_is_at(
    home: Path, webhook: Webhook, tmp_path: Path
):
    os.mkfifo(tmp_path / "pipe")
    job = submit("--read", str(tmp_path / "pipe"), hang={"scale": 0.01})
    poll(lambda: webhook.received, "report of the hang", LIMIT_S)
    os.close(os.open(tmp_path / "pipe", os.O_RDWR))
    poll(lambda: len(webhook.received) > 1, "report of the end", LIMIT_S)

    hang, end = webhook.received
    assert (hang["event"], hang["state"], hang["rank"]) == ("hang", "RUNNING", 0)
    assert hang["text"].startswith(
        f"job {job.id}: hangs: rank 0 on node 0 is stuck at train.py:7 ("
    )
    assert (end["event"], end["state"]) == ("end", "SUCCEEDED")


def test_a_detached_silent_job_that_then_ends_is_reported_without_a_follower(
    home: Path, webhook: Webhook, tmp_path: Path
):
    job = submit("--wait-for", str(tmp_path / "go"), notify={"silent_min": "0.01"})
    poll(lambda: notifiers(job.id), "start of the notifier", LIMIT_S)
    [argv] = notifiers(job.id).values()
    poll(lambda: webhook.received, "report of the hang", LIMIT_S)
    (tmp_path / "go").touch()
    poll(lambda: len(webhook.received) > 1, "report of the end", LIMIT_S)
    poll(lambda: not notifiers(job.id), "end of the notifier", LIMIT_S)

    hang, end = webhook.received
    assert (hang["event"], hang["state"], hang["node"], hang["rank"]) == ("hang", "RUNNING", 0, 0)
    assert "may hang: no rank prints anything; rank 0 on node 0 stopped first" in hang["text"]
    assert (end["event"], end["state"]) == ("end", "SUCCEEDED")
    assert KEY.encode() not in argv
    assert main(["wait", job.id]) == 0
    assert len(webhook.received) == 2


def test_wait_sends_in_place_of_a_notifier_that_was_killed(
    home: Path, webhook: Webhook, tmp_path: Path
):
    job = submit("--wait-for", str(tmp_path / "go"))
    poll(lambda: notifiers(job.id), "start of the notifier", LIMIT_S)
    [process] = notifiers(job.id)
    os.kill(process, signal.SIGKILL)
    poll(lambda: not locks.is_held(home / "notify" / job.id), "end of the notifier", LIMIT_S)
    (tmp_path / "go").touch()

    assert main(["wait", job.id]) == main(["wait", job.id]) == 0
    assert [sent["event"] for sent in webhook.received] == ["end"]


def test_a_notification_that_fails_is_one_warning_and_changes_no_exit_code(
    home: Path, webhook: Webhook, capfd: pytest.CaptureFixture[str]
):
    webhook.codes = [404] * 9

    assert main(["submit", "--notify", "HOOK", "--launcher", "python", "train.py"]) == 0
    printed = capfd.readouterr().err
    warnings = [line for line in printed.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: sending the notification of the end of train-")
    assert warnings[0].endswith(": webhook: it answered 404")
    assert KEY not in printed
    assert len(webhook.received) == 1
    job = warnings[0].partition(" of the end of ")[2].partition(":")[0]
    assert main(["status", job]) == 0
    failed = warnings[0].removeprefix("warning: ")
    assert re.search(f"^notify +{re.escape(failed)}$", capfd.readouterr().out, re.MULTILINE)


def test_a_webhook_that_never_answers_delays_neither_the_job_nor_the_submit(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/{KEY}"
        monkeypatch.setenv("HOOK", url)
        assert main(["submit", "--notify", "HOOK", "--launcher", "python", "train.py"]) == 0
        assert "SUCCEEDED" in capfd.readouterr().err
        # The notifier may still be waiting for an answer.
        for path in (home / "notify").iterdir():
            for process in notifiers(path.name):
                os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize(
    ("notes", "expected", "sent_count"),
    [
        ("", "", 1),
        ("sending hang\n", "", 1),
        ("sending end\n", "sending the notification of train-2k83: interrupted", 0),
        ("sending end\nfailed one: two\n", "one: two", 0),
    ],
)
def test_a_notification_that_a_killed_notifier_may_have_sent_is_not_sent_again(
    notes: str, expected: str, sent_count: int, home: Path, webhook: Webhook
):
    (home / "notify").mkdir(parents=True)
    path = home / "notify" / ENDED.job
    path.write_text(notes)
    described = {"notify": {"webhook": "HOOK"}}

    assert start.settle(home, message.of_end(ENDED), described).startswith(expected)
    assert start.settle(home, message.of_end(ENDED), described).startswith(expected)
    assert start.failure(home, ENDED.job).startswith(expected)
    assert len(webhook.received) == sent_count
    assert path.exists() == bool(expected)


def test_a_module_of_the_current_folder_does_not_replace_one_of_the_notifier(
    home: Path, webhook: Webhook, monkeypatch: pytest.MonkeyPatch
):
    """A notebook and `python -m cloudjob` search the current folder for modules first."""
    Path("json.py").write_text("raise SystemExit(9)")
    monkeypatch.syspath_prepend("")
    submit().wait(timeout_s=LIMIT_S)

    poll(lambda: webhook.received, "report of the end", LIMIT_S)


def test_a_submit_that_fails_leaves_no_notifier(home: Path):
    with pytest.raises(SpecError):
        submit(inputs={"DATA": "file:///nowhere"}, procs_per_node=2)
    with pytest.raises(cloudjob.CloudJobError):
        submit(process={"python": "/nowhere/python"})

    assert not list((home / "notify").glob("*"))


def test_no_notification_is_sent_for_a_job_that_was_removed(
    home: Path, webhook: Webhook, tmp_path: Path
):
    job = submit("--wait-for", str(tmp_path / "go"))
    job.remove()
    poll(lambda: not notifiers(job.id), "end of the notifier", LIMIT_S)

    assert webhook.received == []
    assert not list((home / "notify").iterdir())


def test_a_notifier_ends_if_the_platform_does_not_know_the_job(home: Path, tmp_path: Path):
    """The job may have been removed before the notifier requested its log."""
    job = cloudjob.submit("train.py", launcher="python")
    job.wait(timeout_s=LIMIT_S)
    job.remove()
    path = tmp_path / "file"
    targets = message.Targets(("hang",), "", ("false",), 60, ())
    with path.open("wb") as file:
        outbox = process.Outbox(path, targets, file.fileno())
        thread = threading.Thread(target=process.follow_job, args=(job, outbox), daemon=True)
        thread.start()
        thread.join(LIMIT_S)

    assert not thread.is_alive()
    assert not path.exists()


# -- sweeps ---------------------------------------------------------------------------------------


def test_a_sweep_is_one_notification_with_each_job_and_the_failed_first(
    home: Path, webhook: Webhook, capfd: pytest.CaptureFixture[str]
):
    argv = ["--notify", "HOOK", "--launcher", "python", "--sweep", "way=--well,--fail,--fine"]

    assert main(["submit", *argv, "train.py", "{way}"]) == 7
    printed = "".join(capfd.readouterr())
    poll(lambda: not list((home / "notify").iterdir()), "end of the notifier", LIMIT_S)

    [sent] = webhook.received
    sweep = sent["job"]
    assert (sent["event"], sent["state"], sent["exit_code"]) == ("failure", "FAILED", 7)
    assert [(each["job"], each["state"], each["message"]) for each in sent["jobs"]] == [
        (f"{sweep}-1", "FAILED", "sys.exit(7) (node 0 rank 0)"),
        (f"{sweep}-0", "SUCCEEDED", ""),
        (f"{sweep}-2", "SUCCEEDED", ""),
    ]
    head, *lines = sent["text"].splitlines()
    assert head.startswith(f"sweep {sweep}: 1 FAILED, 2 SUCCEEDED in ")
    assert lines == [
        f"{sweep}-1 (way=--fail): FAILED: sys.exit(7) (node 0 rank 0)",
        f"{sweep}-0 (way=--well): SUCCEEDED",
        f"{sweep}-2 (way=--fine): SUCCEEDED",
    ]
    assert "warning" not in printed


def test_wait_sends_the_notification_of_a_sweep_whose_notifier_was_killed(
    home: Path, webhook: Webhook, tmp_path: Path
):
    argv = ["--notify", "HOOK", "--launcher", "python", "--detach", "--max-parallel", "2"]
    words = ["--sweep", "way=a,b", "train.py", "{way}", "--wait-for", str(tmp_path / "go")]
    assert main(["submit", *argv, *words]) == 0
    # Those of its jobs look for hangs.
    [path] = (each for each in (home / "notify").iterdir() if not grid.sweep_of(each.name))
    poll(lambda: notifiers(path.name), "start of the notifier", LIMIT_S)
    [number] = notifiers(path.name)
    os.kill(number, signal.SIGKILL)
    poll(lambda: not locks.is_held(path), "end of the notifier", LIMIT_S)
    (tmp_path / "go").touch()

    assert main(["wait", path.name]) == 0
    [sent] = webhook.received
    assert (sent["event"], sent["job"], len(sent["jobs"])) == ("end", path.name, 2)
    assert not path.exists()


def test_jobs_of_a_sweep_report_hangs_only_and_the_sweep_reports_its_end():
    notify = Notify(webhook="HOOK", events=["failure", "hang"])

    assert start.events_of_sweep(notify) == ("failure",)
    assert start.events_of(notify, "lr-2k83xnf2-0") == ("hang",)
    assert start.events_of(notify, "lr-2k83xnf2") == ("failure", "hang")


def test_a_sweep_of_many_jobs_is_a_short_notification(tmp_path: Path):
    jobs = [status_of(f"lr-2k83xnf2-{n}", state=JobState.SUCCEEDED) for n in range(500)]
    jobs[400] = status_of("lr-2k83xnf2-400", state=JobState.FAILED, exit_code=3)
    notice = message.of_sweep("lr-2k83xnf2", jobs, lambda job: {"lr": "x" * 5000})
    sent = message.body(notice, ())

    assert sent["jobs"][0]["message"].startswith("exit code 3")
    assert sent["text"].splitlines()[-1] == "and 480 more jobs"
    assert len(json.dumps(sent)) < 30_000
    # Linux refuses a variable of more than 128 KiB.
    send.send(notice, message.Targets((), "", (sys.executable, "-c", ""), 0, ()))


def test_what_a_notifier_could_not_learn_is_left_to_the_next_command(tmp_path: Path):
    """The platform did not answer for as long as the notifier asks."""
    path = tmp_path / "file"
    targets = message.Targets(("end",), "", ("false",), 0, ())
    with path.open("wb") as file:
        outbox = process.Outbox(path, targets, file.fileno(), retry_s=0.0)
        process.follow_sweep(Sweep("lr-2k83xnf2", tmp_path), outbox)

        assert path.exists()


def test_the_notifier_of_a_sweep_without_jobs_sends_nothing(tmp_path: Path):
    path = tmp_path / "file"
    with path.open("wb") as file:
        outbox = process.Outbox(
            path, message.Targets(("end",), "", ("false",), 0, ()), file.fileno()
        )
        process.follow_sweep(Sweep("lr-2k83xnf2", tmp_path / "home"), outbox)

    assert not path.exists()


# -- the webhook's URL ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "HOOK is not set in your environment"),
        ("", "HOOK does not contain a URL"),
        (f"ftp://127.0.0.1/{KEY}", "HOOK does not contain a URL"),
        (f"https:///{KEY}", "HOOK does not contain a URL"),
        (f"https://[{KEY}", "HOOK does not contain a URL"),
        (f"https://example.org/{KEY} x", "HOOK does not contain a URL"),
        (f"http://example.org/{KEY}", "HOOK contains an http:// URL, and others"),
        (f"http://127.0.0.1.example.org/{KEY}", "HOOK contains an http:// URL"),
    ],
)
def test_a_webhook_url_that_cannot_be_used_is_refused_and_not_shown(
    value: str | None, expected: str
):
    environ = {} if value is None else {"HOOK": value}
    with pytest.raises(UsageError) as caught:
        message.targets_of(Notify(webhook="HOOK"), [], environ)

    assert caught.value.message.startswith(f"reading the URL of notify.webhook: {expected}")
    assert KEY not in caught.value.message + caught.value.hint


def test_a_webhook_url_in_a_job_file_is_refused_and_not_shown(home: Path):
    Path("job.yaml").write_text(f"notify: {{webhook: 'https://example.org/{KEY}'}}")
    with pytest.raises(SpecError) as caught:
        cloudjob.submit("train.py", job_file="job.yaml")

    [problem] = caught.value.problems
    assert problem.startswith("job.yaml:1: notify.webhook: is a secret")
    assert KEY not in problem


def test_a_webhook_url_is_read_from_a_file_beside_the_job_file_but_not_in_the_source(
    home: Path, tmp_path: Path, webhook: Webhook
):
    (tmp_path / "hook").write_text(f"{webhook.url}\n")
    (tmp_path / "job.yaml").write_text("notify: {webhook: '@hook', events: [failure]}")
    Path("hook").write_text(webhook.url)

    spec = cloudjob.job_spec("train.py", job_file=tmp_path / "job.yaml", launcher="python")
    assert cloudjob.submit(spec).wait(timeout_s=LIMIT_S).exit_code == 0
    spec = cloudjob.job_spec(spec.script, ["--fail"], job_file=tmp_path / "job.yaml")
    job = cloudjob.submit(spec.with_values(launcher="python"))
    poll(lambda: webhook.received, "the notification", LIMIT_S)
    poll(lambda: not notifiers(job.id), "end of the notifier", LIMIT_S)
    assert [sent["job"] for sent in webhook.received] == [job.id]
    with pytest.raises(UsageError, match="hook is in the source folder"):
        submit(notify={"webhook": "@hook"})


# -- sending --------------------------------------------------------------------------------------


def test_a_refused_notification_is_sent_again(webhook: Webhook):
    webhook.codes = [503, 429]
    send_end(webhook.url)

    assert len(webhook.received) == 3


def test_a_redirect_is_not_followed(webhook: Webhook):
    webhook.codes = [302]
    with pytest.raises(NotSent, match=r"it answered 302; redirects are not followed$") as caught:
        send_end(webhook.url)

    assert webhook.paths == [f"/services/{KEY}"]
    assert KEY not in str(caught.value)


def test_a_webhook_that_answers_byte_by_byte_times_out_and_is_not_called_again():
    calls, stop = [], threading.Event()

    def drip(server: socket.socket) -> None:
        with server.accept()[0] as connection:
            calls.append(connection)
            while not stop.wait(0.02):
                connection.sendall(b"H")

    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/{KEY}"
        thread = threading.Thread(target=drip, args=(server,), daemon=True)
        thread.start()
        with pytest.raises(NotSent, match="webhook: no answer"):
            send_end(url, limits=QUICK._replace(answer_s=0.3))
        stop.set()
        thread.join()
        assert len(calls) == 1


def test_a_command_gets_the_text_and_the_values(tmp_path: Path):
    code = (
        "import os, sys\n"
        "with open(sys.argv[1], 'w') as file:\n"
        "    file.write(sys.stdin.read() + os.environ['CLOUDJOB_NOTIFICATION'])\n"
    )
    send_end(command=(sys.executable, "-c", code, str(tmp_path / "out; echo")))
    text, _, values = (tmp_path / "out; echo").read_text().partition("\n")

    assert text == "job train-2k83: SUCCEEDED"
    assert json.loads(values)["state"] == "SUCCEEDED"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("/nowhere/beep",), "command /nowhere/beep: No such file or directory"),
        (("sh", "-c", "echo one >&2; echo two >&2; exit 3"), "command sh: exit code 3: two"),
        (("sh", "-c", "exec 9>&2; yes | head -c 9m >&9; echo z >&9; exit 3"), "exit code 3: z"),
    ],
)
def test_a_command_that_fails_is_named(command: tuple[str, ...], expected: str):
    with pytest.raises(NotSent) as caught:
        send_end(command=command)

    assert caught.value.message.endswith(expected)


def test_output_of_a_command_does_not_fill_the_disk():
    """The command succeeds only if the file of its output is truncated while it runs."""
    code = (
        "import os, sys, time\n"
        "os.write(2, b'x' * 5_000_000)\n"
        "for _ in range(1000):\n"
        "    if os.fstat(2).st_blocks == 0: sys.exit(0)\n"
        "    time.sleep(0.05)\n"
        "sys.exit('not emptied')\n"
    )
    send_end(command=(sys.executable, "-c", code))


def test_secrets_are_masked_wherever_they_occur(webhook: Webhook):
    """The values of secrets, each line of a value, and the webhook's URL are masked."""
    targets = message.targets_of(
        Notify(webhook="HOOK"), ["s3cr3t", "-- KEY --\nQUJDREVGRw==\n"], {"HOOK": webhook.url}
    )
    lines = (f"calling {webhook.url}", "QUJDREVGRw== is the key")
    failure = Failure(message="it is s3cr3t", last_lines=lines)
    status = status_of("train-2k83", state=JobState.FAILED, failure=failure)
    send.send(message.of_end(status), targets, QUICK)

    [sent] = webhook.received
    assert sent["message"] == "it is ***"
    assert sent["last_lines"] == ["calling ***", "*** is the key"]
    assert sent["text"].endswith("\nit is ***\n| calling ***\n| *** is the key")


def test_a_secret_at_the_end_of_a_text_that_is_cut_is_masked(tmp_path: Path):
    """No part of it may remain in the notification or in the error of a failed one."""
    secret = "b7c1d2e3f4a5"
    line = f"{'x' * 295}{secret} and more"
    failure = Failure(message=line, last_lines=(line,))
    status = status_of("train-2k83", state=JobState.FAILED, failure=failure)
    code = f"import sys; print(sys.stdin.read()); sys.exit('{secret}' + 'y' * 295)"
    targets = message.Targets(("end",), "", (sys.executable, "-c", code), 60, (secret,))

    sent = str(message.body(message.of_end(status), (secret,)))
    assert "b7c1" not in sent
    assert sent.count("x***") == 4
    with pytest.raises(NotSent) as caught:
        send.send(message.of_end(status), targets)
    assert "a5yy" not in str(caught.value)


def test_output_of_a_rank_can_neither_flood_a_channel_nor_mention_its_members():
    """Slack would read <!channel> as a mention of all members."""
    lines = tuple(f"<!channel> {number} {'x' * 5000}\x1b[31m" for number in range(50))
    failure = Failure(rank=1, message="a\nb", last_lines=lines)
    status = status_of("train-2k83", state=JobState.FAILED, failure=failure)
    text = message.body(message.of_end(status), ())["text"]

    assert len(text) < 5000
    assert "\x1b" not in text
    assert "a\\nb" in text
    assert send.for_slack(text).count("&lt;!channel&gt; 4") == 10
