"""Tests of a job's log, filtered and split into pages."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cloudjob.console import log_table
from cloudjob.console.log_table import Curve, LogTable, Match, Selection, Trial
from cloudjob.console.pages.live import until_read
from cloudjob.errors import BackendError, UsageError
from cloudjob.model.status import Failure
from cloudjob.tracking.log import LogPiece
from cloudjob.tracking.metrics import Column, MetricPoint, MetricReader
from cloudjob.tracking.training import Count
from tests.support.polling import poll


class Job:
    """A job with this log; the test decides when it ends."""

    id = "job-1"

    def __init__(self, *pieces: LogPiece, has_ended: bool = True) -> None:
        self.has_final_status = has_ended
        self._pieces = pieces
        self.end = threading.Event()
        self.error: Exception | None = None
        self.reads = 0

    def metric_reader(self) -> MetricReader:
        return MetricReader({"loss": "loss ([0-9.]+)"})

    def pieces(
        self, *, follow: bool, is_timed: bool, on_journal: object, attempt: int | None = None
    ) -> Iterator[LogPiece]:
        if attempt is not None:
            assert not follow
            yield LogPiece(0, b"[0] of attempt %d\n" % attempt)
            return
        self.reads += 1
        assert is_timed
        assert callable(on_journal)
        assert follow is not self.has_final_status
        yield from self._pieces
        if self.error:
            raise self.error
        while follow and not self.end.wait(0.01):
            yield LogPiece(0, b"")


@contextlib.contextmanager
def open_table(job: Job, attempt: int | None = None, *, is_read: bool = True) -> Iterator[LogTable]:
    """Open the log of a job; with ``is_read``, wait until all of it has been read."""
    log = LogTable(job, attempt)  # type: ignore[arg-type]
    try:
        if is_read:
            poll(lambda: log.page(Selection(), 0, 0).is_complete, "the whole log")
        yield log
    finally:
        job.end.set()
        log.close()


def read(job: Job, **selection: Any) -> list[tuple[int, int | None, str]]:
    """Return node, rank and text of the selected lines of a log that is complete."""
    with open_table(job) as log:
        rows = log.page(Selection(**selection), 0, 1000).rows
    return [(row["node"], row["rank"], row["text"]) for row in rows]


def test_the_log_of_one_attempt_is_what_it_has_stored_while_the_job_runs():
    with open_table(Job(has_ended=False), attempt=2) as log:
        page = log.page(Selection(), 0, 10)

    assert [row["text"] for row in page.rows] == ["of attempt 2"]
    assert not page.is_live


TWO_NODES = (
    LogPiece(0, b"jobentry: starts\n[0] Loss 1\n[1] loss 2\n"),
    LogPiece(1, b"[2] loss 3\n[3] done\n"),
)


@pytest.mark.parametrize(
    ("selection", "texts"),
    [
        ({}, ["jobentry: starts", "Loss 1", "loss 2", "loss 3", "done"]),
        ({"node": 1}, ["loss 3", "done"]),
        ({"rank": 1}, ["loss 2"]),
        ({"text": "LOSS"}, ["Loss 1", "loss 2", "loss 3"]),
        ({"text": "loss", "node": 0}, ["Loss 1", "loss 2"]),
        ({"text": "o", "rank": 3}, ["done"]),
        ({"text": "absent"}, []),
        ({"text": "loss [23]", "is_expression": True}, ["loss 2", "loss 3"]),
        ({"text": "^LOSS", "is_expression": True, "node": 0}, ["Loss 1", "loss 2"]),
        ({"text": "2", "is_expression": True, "rank": 1}, ["loss 2"]),
        # The marks of ranks are not searched.
        ({"text": r"\[0\]", "is_expression": True}, []),
        ({"text": "done", "has_others": True, "node": 1}, ["loss 3", "done"]),
    ],
)
def test_lines_are_selected_by_node_rank_and_text(selection: dict[str, Any], texts: list[str]):
    assert [text for _, _, text in read(Job(*TWO_NODES), **selection)] == texts


def test_a_page_has_the_requested_lines():
    text = b"".join(b"[0] line %d\n" % number for number in range(1000))
    with open_table(Job(LogPiece(0, text))) as log:
        page = log.page(Selection(), 500, 502)
        selection = log.page(Selection(text="line 99"), 0, 1)
        end = log.page(Selection(), 999, 5000)
        before = log.page(Selection(), -5, 0)

    assert [(row["line"], row["text"]) for row in page.rows] == [
        (501, "line 500"),
        (502, "line 501"),
    ]
    assert (page.selected, page.total) == (1000, 1000)
    assert selection.selected == 11
    assert end.rows[0]["text"] == "line 999"
    assert before.rows == []


def test_metrics_are_found_while_the_log_is_read_and_it_is_read_once():
    pieces = (LogPiece(0, b"[0] loss 0.5\n"), LogPiece(0, b"[0] loss 0.4\n", 1000.7))
    job = Job(*pieces, has_ended=False)
    with open_table(job, is_read=False) as log:
        poll(lambda: len(log.metrics()) >= 2, "the metrics")
        metrics = log.metrics()

    assert metrics == [MetricPoint("loss", 0, 0, 0.5), MetricPoint("loss", 0, 1, 0.4, 1000.7)]
    assert job.reads == 1


def test_a_page_has_lines_before_their_metrics_and_says_so():
    may_search = threading.Event()

    class SlowReader(MetricReader):
        def columns(self, node: int, data: bytes) -> Iterator[list[Column]]:
            assert may_search.wait(60)
            return super().columns(node, data)

    job = Job(LogPiece(0, b"[0] loss 0.5\n"), has_ended=False)
    job.metric_reader = lambda: SlowReader({}, detects=True)  # type: ignore[method-assign]
    with open_table(job, is_read=False) as log:
        poll(lambda: log.page(Selection(), 0, 1).rows, "the line")
        assert (log.page(Selection(), 0, 1).has_metrics, log.metrics()) == (False, [])
        may_search.set()
        poll(lambda: log.page(Selection(), 0, 1).has_metrics, "the metrics")
        assert len(log.metrics()) == 1


def test_a_line_has_the_time_of_its_piece():
    pieces = (LogPiece(0, b"[0] first\n"), LogPiece(1, b"[1] second\n[2] third\n", 1000.7))
    with open_table(Job(*pieces)) as log:
        rows = log.page(Selection(), 0, 9).rows

    assert [row["at"] for row in rows] == [0, 1000, 1000]


@pytest.mark.parametrize(
    "selection", [Selection(text="loss"), Selection(rank=1), Selection(rank=0, text="LOSS 4")]
)
def test_a_long_search_continues_with_each_request(
    selection: Selection, monkeypatch: pytest.MonkeyPatch
):
    texts = [b"[%d] loss %d\n" % (number % 2, number) for number in range(5000)]
    pieces = [LogPiece(0, b"".join(texts[at : at + 250])) for at in range(0, 5000, 250)]
    monkeypatch.setattr(log_table, "_STEP_BLOCKS", 10)
    monkeypatch.setattr(log_table, "_SEARCH_S", -1.0)
    with open_table(Job(*pieces)) as log:
        first = log.page(selection, 0, 0)
        poll(lambda: log.page(selection, 0, 0).searched == 5000, "the end of the search")
        row_texts = [row["text"] for row in log.page(selection, 0, 5000).rows]

    assert 0 < first.searched < 1000
    numbers = [n for n in range(5000) if selection.rank in (None, n % 2)]
    assert row_texts == [f"loss {n}" for n in numbers if selection.rank != 0 or str(n)[0] == "4"]


@pytest.mark.parametrize(
    ("failure", "selection", "expected"),
    [
        (Failure(rank=1, last_lines=("step 2", "ValueError: no", "")), {}, (4, 5)),
        (Failure(rank=1, last_lines=("step 2", "ValueError: no")), {"rank": 1}, (1, 5)),
        # If a filter excludes the line, the closest position is found.
        (Failure(rank=1, last_lines=("ValueError: no",)), {"rank": 0}, (0, 5)),
        (Failure(rank=1, message="ValueError: no"), {"text": "absent"}, (0, 5)),
        (Failure(rank=1, last_lines=("what is not there",)), {}, (6, 7)),
        (Failure(node=0, message="the node is gone"), {}, (0, 1)),
        (Failure(rank=9, message="ValueError: no"), {}, None),
    ],
)
def test_the_log_line_of_a_failure_is_found(
    failure: Failure, selection: dict[str, Any], expected: tuple[int, int] | None
):
    pieces = (
        LogPiece(0, b"jobentry: the node is gone\n[0] ValueError: no\n"),
        LogPiece(1, b"[1] step 1\n[2] ValueError: no\n[1] \x1b[31mValueError: no\x1b[0m\n"),
        LogPiece(1, b"[2] ValueError: no\n[1] aborted\n"),
    )
    with open_table(Job(*pieces)) as log:
        assert log.find(failure, Selection(**selection)) == expected


def test_a_progress_bar_is_one_line_with_its_last_state():
    parts = b"[0]+ 10%\r\n[0]+ 20%\r\n[1] other\n[0] 30%\n"

    assert read(Job(LogPiece(0, parts))) == [(0, 1, "other"), (0, 0, "30%")]


@pytest.mark.parametrize(
    ("selection", "ranks"),
    [({}, [0, 1, 2]), ({"node": 1}, [2]), ({"rank": 1}, [1]), ({"text": "B 2"}, [1, 2])],
)
def test_the_moving_progress_bar_of_each_rank_is_shown(selection: dict[str, Any], ranks: list[int]):
    bars = b"[1]+ bar 10%\r\n[0]+ bar 10%\r\n[1]+ \rb 20%\n[0]+ \rbar 30%\n"
    job = Job(LogPiece(1, b"[2]+ b 25%\n"), LogPiece(0, bars), has_ended=False)
    with open_table(job, is_read=False) as log:
        poll(lambda: log.page(Selection(), 0, 0).unfinished == 3, "the bars")
        page = log.page(Selection(**selection), 0, 9)

    bar_of = {0: "bar 30%", 1: "b 20%", 2: "b 25%"}
    text_of = {row["rank"]: row["text"] for row in page.unfinished_rows}
    assert text_of == {rank: bar_of[rank] for rank in ranks}
    assert (list(text_of), page.selected, page.is_live) == (ranks, 0, True)


def test_a_job_that_has_ended_is_not_live_while_its_log_is_read():
    with open_table(Job(LogPiece(0, b"[0] cut")), is_read=False) as log:
        assert not log.page(Selection(), 0, 0).is_live


def test_a_last_line_without_a_newline_is_shown_and_has_metrics():
    with open_table(Job(LogPiece(0, b"[0] whole\n[0]+ loss 1\n"))) as log:
        texts = [row["text"] for row in log.page(Selection(), 0, 10).rows]
        values = [point.value for point in log.metrics()]

    assert (texts, values) == (["whole", "loss 1"], [1])


def test_control_sequences_of_a_terminal_are_left_out():
    text = b"[0] \x1b[31mred\x1b[0m \x1b]52;c;aGk=\x07copied \x9b\xff\n"

    assert read(Job(LogPiece(0, text))) == [(0, 0, "red copied \ufffd\ufffd")]


def test_a_running_job_shows_its_output_so_far():
    job = Job(LogPiece(0, b"[0] first\n"), has_ended=False)
    with open_table(job, is_read=False) as log:
        poll(lambda: log.page(Selection(), 0, 1).rows, "the first line")
        assert not log.page(Selection(), 0, 1).is_complete
        job.end.set()
        poll(lambda: log.page(Selection(), 0, 1).is_complete, "the end of the log")


def test_a_platform_that_does_not_answer_is_reported():
    job = Job(LogPiece(0, b"[0] first\n"))
    job.error = BackendError("reading the log: the cluster does not answer")
    with open_table(job, is_read=False) as log:
        poll(lambda: "does not answer" in log.page(Selection(), 0, 1).error, "the error")


def test_after_an_error_the_lines_stay_and_the_log_is_not_read_again_at_once():
    job = Job(LogPiece(0, b"[0] first\n"))
    job.error = BackendError("reading the log: the cluster does not answer")
    with open_table(job, is_read=False) as log:
        poll(lambda: log.page(Selection(), 0, 1).error, "the error")
        job.error = None
        again = log.page(Selection(), 0, 1)

    assert ([row["text"] for row in again.rows], again.is_complete) == (["first"], False)


def test_a_full_disk_is_reported(monkeypatch: pytest.MonkeyPatch):
    connect = sqlite3.connect

    def connect_to_full_disk(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        connection.execute("PRAGMA max_page_count = 2")
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_to_full_disk)
    with open_table(Job(LogPiece(0, b"[0] line\n" * 10_000)), is_read=False) as log:
        poll(lambda: "disk is full" in log.page(Selection(), 0, 1).error, "the error")


def test_a_log_that_was_closed_has_no_lines():
    with open_table(Job(*TWO_NODES)) as log:
        log.close()

        assert log.page(Selection(text="loss"), 0, 10).rows == ()


def test_nested_progress_bars_leave_one_line_each_and_the_text_after_them():
    inner = b"[0] \rinner: %d/2\x1b[A\n"
    outer = b"[0] \r          \x1b[A\router: 1/1\n"
    bars = (b"[0] \router: 0/1\n", inner % 0, inner % 1, outer)

    lines_read = read(Job(LogPiece(0, b"".join(bars) + b"[0] done\n")))
    assert lines_read == [(0, 0, "outer: 0/1"), (0, 0, "outer: 1/1"), (0, 0, "done")]
    lines_read = read(Job(LogPiece(0, b"".join(bars))))
    assert lines_read == [(0, 0, "outer: 0/1"), (0, 0, "outer: 1/1")]


def test_lines_keep_their_places_in_a_log_of_several_blocks_and_nodes():
    """Lines with parts, empty lines, and a text that is also in the mark of a rank."""
    texts = [b"[0] a\n", b"[1]+ b\n", b"[0] \n", b"[1] c\n", b"jobentry: x\n", b"[2] [0] A\n"]
    job = Job(*(LogPiece(node % 2, b"".join(texts)) for node in range(400)))
    expected = [
        (0, "a"), (0, ""), (1, "bc"), (None, "jobentry: x"), (2, "[0] A"),
    ] * 400  # fmt: skip

    with open_table(job) as log:
        page = log.page(Selection(), 0, 2000)
        of_rank, of_text = Selection(node=1, rank=0), Selection(text="[0] a")
        for selection in (of_rank, of_text):
            poll(lambda which=selection: log.page(which, 0, 0).searched == 2000, "the whole search")
        ranks, texts_found = (log.page(which, 0, 2000).rows for which in (of_rank, of_text))

    assert [(row["rank"], row["text"]) for row in page.rows] == expected
    assert [row["line"] for row in page.rows] == list(range(1, 2001))
    assert [row["line"] for row in ranks] == [
        5 * piece + at for piece in range(1, 400, 2) for at in (1, 2)
    ]
    assert [row["line"] for row in texts_found] == [5 * piece + 5 for piece in range(400)]


def test_the_end_of_a_log_has_the_last_lines_and_the_unfinished_ones():
    job = Job(LogPiece(0, b"[0] a\n[0] b\n[1] c\n[1]+ \r 5%\n"), has_ended=False)
    with open_table(job, is_read=False) as log:
        poll(lambda: len(log.end(9)) == 4, "the whole log")
        texts = [row["text"] for row in log.end(3)]

    assert texts == ["b", "c", " 5%"]


def test_the_last_line_of_each_rank_is_finished_or_not():
    pieces = LogPiece(0, b"[0] a\n[1] b\n[1] c\n"), LogPiece(0, b"[0]+ \r5 %\nof the entry\n")
    blank = LogPiece(0, b"[2] d\n[2]\n[2]+ \r  \n")
    job = Job(*pieces, blank, has_ended=False)
    with open_table(job, is_read=False) as log:
        poll(lambda: log.last_lines() == {0: "5 %", 1: "c", 2: "d"}, "the last lines")


def test_progress_is_that_of_the_lowest_rank_that_tells_it():
    pieces = (
        LogPiece(0, b"[0] loss 1\n[1] step 1/9\n[2] step 2/9\n", 100),
        LogPiece(0, b"[1] step 4/9\n", 110),
    )
    with open_table(Job(*pieces)) as log:
        progress = log.progress()

    assert progress.steps == Count(4, 9)
    assert progress.left_s == pytest.approx(10 * 5 / 3)


def test_the_bar_that_a_rank_moves_counts_as_its_last_line():
    job = Job(LogPiece(0, b"[0] step 1/9\n[0]+ \r2/9 [===>..]\n"), has_ended=False)
    with open_table(job, is_read=False) as log:
        poll(lambda: log.progress().steps == Count(2, 9), "the bar")


def test_the_main_curve_is_the_loss_of_the_lowest_rank():
    with open_table(Job(*TWO_NODES)) as log:
        curve = log.main_curve()

    assert curve == Curve("loss", [(0.0, 2.0)])


def test_a_log_without_metrics_has_no_main_curve():
    with open_table(Job(LogPiece(0, b"[0] a\n"))) as log:
        assert log.main_curve() is None


def test_matches_are_marked_and_the_next_one_is_found_among_all_lines():
    which = Selection(text="loss", has_others=True)
    with open_table(Job(*TWO_NODES)) as log:
        page = log.page(which, 0, 9)
        forward = [log.match(which, line, is_forward=True) for line in (0, 2, 4)]
        back = log.match(which, 3, is_forward=False)

    assert [row["marks"] for row in page.rows] == [[], [(0, 4)], [(0, 4)], [(0, 4)], []]
    assert (page.selected, page.matches) == (5, 3)
    # Place and number of a line, and its place among the matches; after the last comes the first.
    assert forward == [Match(1, 2, 1, 3), Match(2, 3, 2, 3), Match(1, 2, 1, 3)]
    assert back == Match(1, 2, 1, 3)


@pytest.mark.parametrize("text", ["", "absent"])
def test_without_a_match_there_is_no_next_one(text: str):
    with open_table(Job(*TWO_NODES)) as log:
        assert log.match(Selection(text=text), 0, is_forward=True) == Match()


def test_the_marks_of_an_expression_are_those_of_characters():
    with open_table(Job(LogPiece(0, "[0] ä€😀 Loss 1\n".encode()))) as log:
        [row] = log.page(Selection(text=r"€\S+|loss (\d)", is_expression=True), 0, 9).rows

    assert row["marks"] == [(1, 3), (4, 10)]


def test_an_expression_that_cannot_be_used_is_reported_and_the_log_stays():
    with open_table(Job(*TWO_NODES)) as log:
        page = log.page(Selection(text="(", is_expression=True), 0, 9)

        assert page.error.startswith("searching the log for (: it is not a regular expression")
        assert "(?i)" not in page.error
        with pytest.raises(UsageError):
            log.match(Selection(text="(", is_expression=True), 0, is_forward=True)
        assert log.page(Selection(), 0, 9).selected == 5


def test_an_expression_that_would_take_years_elsewhere_is_searched():
    with open_table(Job(LogPiece(0, b"[0] %s\n" % (b"a" * 4000)))) as log:
        assert log.page(Selection(text="(a+)+$b", is_expression=True), 0, 9).selected == 0


def test_the_selected_lines_are_saved_with_the_marks_of_their_ranks():
    with open_table(Job(*TWO_NODES)) as log:
        everything = b"".join(log.texts(Selection()))
        some = b"".join(log.texts(Selection(rank=2)))
        around = b"".join(log.texts(Selection(text="done", node=1, has_others=True)))

    assert everything == b"jobentry: starts\n[0] Loss 1\n[1] loss 2\n[2] loss 3\n[3] done\n"
    assert (some, around) == (b"[2] loss 3\n", b"[2] loss 3\n[3] done\n")


def test_a_line_is_found_among_the_visible_ones():
    with open_table(Job(*TWO_NODES)) as log:
        assert [log.row_of(line, Selection(node=1)) for line in (1, 4, 5, 99)] == [0, 0, 1, 1]


def test_a_pattern_is_tried_on_the_last_lines():
    with open_table(Job(*TWO_NODES)) as log:
        trial = log.try_pattern("(?i)loss ([0-9])")
        nothing = log.try_pattern("absent ([0-9])")

    assert trial == Trial(5, 3, [("loss 3", 3.0), ("loss 2", 2.0), ("Loss 1", 1.0)])
    assert nothing == Trial(5, 0, [])


@pytest.mark.parametrize("pattern", ["(", "no group"])
def test_a_pattern_that_finds_no_value_is_refused(pattern: str):
    with open_table(Job(*TWO_NODES)) as log, pytest.raises(UsageError, match="metric NAME"):
        log.try_pattern(pattern)


class PausedJob(Job):
    """A job whose second piece is there once the test opens the gate."""

    gate = threading.Event()

    def pieces(self, **more: Any) -> Iterator[LogPiece]:
        for number, piece in enumerate(super().pieces(**more)):
            if number:
                self.gate.wait()
            yield piece


def until_read_of(log: LogTable) -> log_table.Page:
    asyncio.run(until_read(log))
    return log.page(Selection(), 0, 10)


def test_a_page_of_an_ended_job_waits_for_all_of_its_log():
    job = PausedJob(LogPiece(0, b"[0] one\n"), LogPiece(0, b"[0] two\n"))
    with open_table(job, is_read=False) as log:
        poll(lambda: log.page(Selection(), 0, 0).total == 1, "the first line")
        timer = threading.Timer(0.5, job.gate.set)
        timer.start()

        page = until_read_of(log)
        timer.join()

    assert (page.total, page.is_complete) == (2, True)


def test_a_page_of_a_running_job_waits_for_what_it_has_written():
    job = Job(LogPiece(0, b"[0] loss 1\n" * 100), has_ended=False)
    with open_table(job, is_read=False) as log:
        page = until_read_of(log)

        assert (page.total, page.is_complete, page.has_metrics) == (100, False, True)
        assert len(log.metrics()) == 100


def test_a_page_does_not_wait_for_a_log_that_cannot_be_read():
    job = Job(LogPiece(0, b"[0] one\n"))
    job.error = BackendError("reading the log: no answer")
    with open_table(job, is_read=False) as log:
        page = until_read_of(log)

    assert page.error == "reading the log: no answer"
