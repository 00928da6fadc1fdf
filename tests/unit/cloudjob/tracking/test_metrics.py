"""The metrics of a training run, from printed lines and from TensorBoard event files."""

from __future__ import annotations

import math
import re
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cloudjob.errors import UsageError
from cloudjob.model.kinds import check_pattern
from cloudjob.tracking import event_files
from cloudjob.tracking.journals import Journals, series
from cloudjob.tracking.metrics import Column, MetricPoint, MetricReader, Metrics, thinned
from jobentry.contract import journal
from jobentry.contract.journal import Device, Phase, RankSample, Sample

LOSS = {"loss": r"loss ([0-9.eE+-]+|nan)"}


def test_a_pattern_finds_a_metric_by_rank():
    """Without a step, the values of each rank are numbered."""
    reader = MetricReader(LOSS)

    points = reader.add(0, b"[0] epoch 1  loss 1.5\n[1] loss 2e-3\n[0] no metric\n[0] loss nan\n")
    points += reader.add(0, b"[0] loss .5\njobentry: loss 9\n[1]+ loss 8\n") + reader.finish()

    assert [(point.rank, point.step, str(point.value)) for point in points] == [
        (0, 0, "1.5"), (1, 0, "0.002"), (0, 1, "nan"), (0, 2, "0.5"), (1, 1, "8.0"),
    ]  # fmt: skip


@pytest.mark.parametrize("text", [b"loss 0.125", b'{"loss": 0.125, "step": 0}'])
def test_a_number_that_arrives_in_parts_is_read_whole(text: bytes):
    for cut in range(1, len(text)):
        reader = MetricReader(LOSS)

        assert not reader.add(0, b"[0]+ %s\n[1] other\n" % text[:cut])
        assert reader.add(0, b"[0] %s\n" % text[cut:]) == [MetricPoint("loss", 0, 0, 0.125)]
        assert not reader.finish()


def test_a_state_of_a_progress_bar_is_read_when_the_next_one_begins():
    reader = MetricReader(LOSS)

    assert not reader.add(0, b"[0]+ \r10% loss 0.\n")
    assert [point.value for point in reader.add(0, b"[0]+ 75\r20% lo\n")] == [0.75]
    assert not reader.add(0, b"[0]+ ss 0.5\n")
    assert [point.value for point in reader.finish()] == [0.5]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b" of \xff\n", b"\r\x1b[K\n"])
@pytest.mark.parametrize("patterns", [LOSS, {}])
def test_colours_and_line_ends_hide_no_metric(patterns: dict[str, str], end: bytes):
    reader = MetricReader(patterns, detects=True)
    text = b"[0] \x1b[1mstep 5\x1b[0m \x1b[1;32mloss \x1b[38;5;9m0.5\x1b[0m" + end

    [point] = reader.add(0, text) + reader.finish()
    assert (point.name, point.value) == ("loss", 0.5)


@pytest.mark.parametrize("pattern", ["loss=[0-9]+", "loss=(", "("])
def test_a_pattern_without_a_group_is_refused(pattern: str):
    with pytest.raises(UsageError, match="the pattern of the metric loss"):
        MetricReader({"loss": pattern})


@pytest.mark.parametrize("pattern", [r"\u0041(.)", "(?u)(.)", "(", "loss .*"])
def test_a_pattern_that_cannot_be_used_is_refused_before_the_job_runs(pattern: str):
    with pytest.raises(ValueError, match=r"regular expression|no group"):
        check_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["(?<=loss )([0-9]+)", "(?=a)(a)", r"(a)\1", "(?>a)(b)", "(a)++", r"(a{,3})", "(a|bc){999}"],
)
def test_a_pattern_that_could_take_unlimited_time_is_refused_with_the_reason(pattern: str):
    """RE2 lacks what needs backtracking; a repeat without a beginning means something else."""
    with pytest.raises(ValueError, match=r"unlimited time|repeat without|too large"):
        check_pattern(pattern)


def test_no_pattern_and_line_take_long_together():
    """With Python's ``re``, the first of these would take longer than a life."""
    lines = [b"a" * 16000, b"ab" * 8000, b"x" * 16000, b"(" * 16000, "é".encode() * 8000]
    patterns = [
        "(a+)+b([0-9])",
        "(.*)*(.*)*z([0-9])",
        "(?:a|b)*a(?:a|b){300}c([0-9])",
        "([^y]*y|x)",
    ]
    reader = MetricReader({f"metric{number}": text for number, text in enumerate(patterns)})

    assert not reader.add(0, b"".join(b"[0] %s\n" % line for line in lines) * 20)


def test_patterns_that_are_large_together_are_refused():
    with pytest.raises(UsageError, match="too large together"):
        MetricReader({f"metric{number}": "(a|b){900}" for number in range(9)})


def test_letters_of_several_bytes_are_letters():
    """Also beside bytes that are not UTF-8."""
    reader = MetricReader({"loss": "损失.[:、]([0-9.]+)"})

    points = reader.add(0, "[0] \udcff 损失é、0.5\n".encode("utf-8", "surrogateescape"))

    assert [point.value for point in points] == [0.5]


def test_a_pattern_may_name_the_value_and_the_step():
    reader = MetricReader({"loss": r"step (?P<step>\d+)/(\d+) loss (?P<value>\S+)"})

    assert reader.add(0, b"[2] step 30/90 loss 0.25\n[2] step 40/90 loss x\n") == [
        MetricPoint("loss", 2, 30, 0.25)
    ]


def test_json_lines_are_metrics():
    reader = MetricReader({})

    points = reader.add(0, b'[0] {"step": 7, "loss": 0.5, "lr": 1, "name": "a", "ok": true}\n')
    points += reader.add(0, b'[0] {"loss": NaN}\n[0] {"loss": \n[0] {"loss": 1e999}\n')

    assert points[:2] == [MetricPoint("loss", 0, 7, 0.5), MetricPoint("lr", 0, 7, 1.0)]
    assert math.isnan(points[2].value)
    assert math.isinf(points[3].value)


def test_a_value_has_the_time_of_the_journal_before_it():
    reader = MetricReader(LOSS)
    sample = journal.MARK + journal.dump(Sample(at=100.0))

    points = reader.add(0, b"[0] loss 3\n" + sample + b"[0] loss 2\n")

    assert [point.at for point in points] == [None, 100.0]
    assert reader.add(1, b"[1] loss 2\n")[0].at is None


@given(st.binary(max_size=60))
def test_any_line_is_read_without_an_error(text: bytes):
    MetricReader(LOSS).add(0, b"[0] " + text + b"\n[0] {" + text + b"}\n" + text)


# -- event files --------------------------------------------------------------------------------


def field(number: int, wire: int, data: bytes) -> bytes:
    size = bytes([len(data)]) if wire == 2 else b""
    return bytes([number << 3 | wire]) + size + data


def record(event: bytes) -> bytes:
    return struct.pack("<QI", len(event), 0) + event + b"\0\0\0\0"


def event(step: int, value: bytes) -> bytes:
    summary = field(1, 2, value)
    time = field(1, 1, struct.pack("<d", 5.0))
    return record(time + field(2, 0, bytes([step])) + field(5, 2, summary))


SIMPLE = field(1, 2, b"loss") + field(2, 5, struct.pack("<f", 0.5))
TENSOR = field(1, 2, b"acc") + field(
    8, 2, field(1, 0, b"\1") + field(4, 2, struct.pack("<f", 0.25))
)
HISTOGRAM = field(1, 2, b"weights") + field(5, 2, b"any")


_WORDS = (
    *("loss", "val_loss", "Train Loss:", "acc@1", "step", "iter=", "lr", "epoch", "f1_top5", "x"),
    *("0.5", "1e-3", "-2", "nan", "7/8", "3", ".25", "=", ":", " ", "  ", "\t", "| 3/10 [", "é"),
    *("{'loss': 0.5}", '{"loss": 0.5}', "{", "]", "[1] ", ".", "loss 1 loss 2", "step 4"),
)
_LINES = st.lists(
    st.tuples(
        st.sampled_from(["[0] ", "[12] ", "", "jobentry: "]), st.lists(st.sampled_from(_WORDS))
    ),
    max_size=12,
)


@given(lines=_LINES, is_structured=st.booleans(), has_patterns=st.booleans())
@example([("[0] ", ["loss", "3"]), ("[0] ", ['{"loss": 0.5}'])], True, False)
def test_lines_with_metrics_are_searched_together_as_they_are_one_by_one(
    lines, is_structured, has_patterns
):
    """A log in which most lines have metrics is searched in blocks; the result must not differ."""
    texts = [mark + " ".join(words) + "\n" for mark, words in lines]
    block = "".join(text for text in texts if is_structured or "{" not in text).encode()
    patterns = {
        "a": r"loss (?P<value>[0-9.]+)",
        "b": r"(\S+)$",
        "c": r"x|(?:step (?P<step>\d+))? (\d)",
    }
    patterns = patterns if has_patterns else {}
    points_of_runs = []
    for start in (b"[5] loss 1\n" * 50, b"[5]+ a part, so each line is searched on its own\n"):
        reader = MetricReader(patterns, detects=True)
        reader.add(0, b"[5] loss 1\n" * 50)
        points = reader.add(0, start + block)
        points_of_runs.append([repr(point) for point in points if point.rank != 5])

    assert points_of_runs[0] == points_of_runs[1]


def test_charts_of_many_values_have_the_same_steps_for_all_ranks_and_keep_the_extremes():
    reader = MetricReader(LOSS)
    spikes = {(0, 7): -9.0, (1, 1111): 99.0}
    text = "".join(
        f"[{rank}] loss {spikes.get((rank, number), math.nan if number % 9 == 0 else number % 5)}\n"
        for number in range(2000) for rank in (0, 1)
    )  # fmt: skip
    pieces = re.findall("(?:.*\n){100}", text)
    columns = [c for piece in pieces for part in reader.columns(0, piece.encode()) for c in part]

    for most in (100, 5000):
        points = thinned(columns, most)
        value_of = [{p.step: p.value for p in points if p.rank == rank} for rank in (0, 1)]
        assert {key: value_of[key[0]].get(key[1]) for key in spikes} == spikes
        assert len({*value_of[0]} ^ {*value_of[1]}) <= 2
        assert 1999 in value_of[0]
        assert [*value_of[0]] == sorted(value_of[0])
        assert len(points) == 4000 if most == 5000 else 50 <= len(points) <= 150


def test_a_thinned_curve_whose_steps_are_all_the_same_keeps_its_form():
    point = MetricPoint("loss", 0, 0, 0.0, 1.0)
    columns = (Column(point, [0] * 100, [3] * 100, [float(n)] * 100) for n in range(100))

    points = thinned(columns, 1000)

    assert 500 <= len(points) <= 1002
    assert {point.value for point in points} == set(range(100))


def test_scalars_of_an_event_file_are_read():
    """PyTorch writes a float, TensorFlow 2 a tensor; images and histograms are not scalars."""
    data = record(field(3, 2, b"brain.Event:2")) + event(3, SIMPLE) + event(4, TENSOR)

    assert event_files.read(data + event(5, HISTOGRAM), "LOG/events") == [
        MetricPoint("loss", None, 3, 0.5, 5.0, "LOG/events"),
        MetricPoint("acc", None, 4, 0.25, 5.0, "LOG/events"),
    ]


def test_a_file_that_is_still_written_ends_where_it_is_cut():
    data = event(3, SIMPLE)
    for size in range(len(data)):
        assert event_files.read(data + data[:size], "x") == event_files.read(data, "x")


@given(st.binary(max_size=80))
def test_a_damaged_event_file_is_read_as_far_as_possible(data: bytes):
    event_files.read(data, "x")
    event_files.read(record(data) + data, "x")


def test_event_files_are_known_by_their_names():
    assert event_files.is_event_file("LOG/run/events.out.tfevents.1700000000.host.1.0")
    assert not event_files.is_event_file("LOG/events.txt")


# -- journals -----------------------------------------------------------------------------------


def test_journals_return_phases_ranks_and_resources():
    rank = RankSample(3, 99, 8, 0, "R", 1, 0)
    journals = Journals()
    journals.add(1, [
        journal.dump(Phase("stage", 10.0)), b"junk",
        journal.dump(Phase("stage", 10.0, 12.5, 12.5, 30, 30)),
        journal.dump(Sample(at=20.0, memory=(5.0, 10.0), ranks=(rank,))),
    ])  # fmt: skip

    (phase,) = journals.phases
    assert (phase.node, phase.name, phase.done_bytes) == (1, "stage", 30)
    assert (phase.started_at, phase.ended_at) == (
        "1970-01-01T00:00:10.000Z",
        "1970-01-01T00:00:12.500Z",
    )
    (point,) = journals.ranks[3]
    assert (point.at, point.node, point.sample.cpu_percent) == (20.0, 1, 99)
    assert journals.resources[1][0].memory == (5.0, 10.0)


def test_a_series_has_a_gap_where_nothing_was_measured():
    samples = [
        Sample(at=1.0, memory=(5.0, 10.0)),
        Sample(at=2.0, devices=(Device("gpu", 0, 50.0, power_w=300.0),)),
    ]
    values_of = dict(series(samples))

    assert values_of["memory_mib"] == (5.0, None)
    assert values_of["gpu0_utilisation_percent"] == (None, 50.0)
    assert values_of["oom_kills"] == (0, 0)
    assert "rdma_sent_kib_s" not in values_of


@pytest.mark.parametrize("text", ["(", "loss"])
def test_a_pattern_that_cannot_find_a_value_is_refused(text: str):
    from cloudjob.model.kinds import check_pattern

    with pytest.raises(ValueError, match="given"):
        check_pattern(text)


def test_the_metrics_of_a_job_are_a_table_of_pandas_by_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without pandas, the error says how to install it."""
    metrics = Metrics([MetricPoint("loss", 1, 0, 9.0), MetricPoint("loss", 0, 0, 2.0)])
    assert metrics.last() == {"loss": 2.0}
    # Only the constructor matters: it gets the columns.
    (tmp_path / "pandas.py").write_text("class DataFrame(dict):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pandas", raising=False)
    table = metrics.to_pandas()

    assert list(table) == list(MetricPoint._fields)
    assert (table["rank"], table["value"]) == ([1, 0], [9.0, 2.0])

    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="making a table of metrics") as caught:
        metrics.to_pandas()
    assert caught.value.hint == "pip install pandas"
