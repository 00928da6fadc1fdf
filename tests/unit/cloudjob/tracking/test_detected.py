"""Metrics that scripts and frameworks print are found without a pattern."""

from __future__ import annotations

import math
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudjob.tracking.detected import Finder, prefilter
from cloudjob.tracking.metrics import MetricReader

LINES = {
    "loss 1.57": {"loss": 1.57},
    "loss=0.3": {"loss": 0.3},
    "loss: 3e-4": {"loss": 3e-4},
    "loss nan": {"loss": math.nan},
    "loss: tensor(0.5, grad_fn=<MeanBackward0>)": {"loss": 0.5},
    "epoch 3/10 Train Loss: 0.51, Val Acc: 91.2%": {"train_loss": 0.51, "val_acc": 91.2},
    "Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.30": {"loss": 2.30},
    "Test set: Average loss: 0.05, Accuracy: 9834/10000 (98%)": {
        "average_loss": 0.05, "accuracy": 0.9834,
    },
    "{'loss': 0.4, 'learning_rate': 5e-05, 'epoch': 0.02}": {"loss": 0.4, "learning_rate": 5e-5},
    "{'train_runtime': '12.3', 'train_loss': '0.5'}": {"train_runtime": 12.3, "train_loss": 0.5},
    "469/469 - 2s - 5ms/step - accuracy: 0.98 - loss: 0.05 - val_loss: 0.1": {
        "accuracy": 0.98, "loss": 0.05, "val_loss": 0.1,
    },
    "Epoch 0: 100%|##| 20/20 [00:00<00:00, 96.9it/s, v_num=0, train_loss=0.5]": {"train_loss": 0.5},
    "loss 0.5, acc 0.7. Next: lr=0.1...": {"loss": 0.5, "acc": 0.7, "lr": 0.1},
    " * Acc@1 71.2 Acc@5 90.1": {"acc@1": 71.2, "acc@5": 90.1},
}  # fmt: skip
NO_METRICS = (
    "loss of 3 nodes", "a lossless 4", "listening on port=8080", "loss.py:12: warning",
    "accuracy was good", "release loss-1.2.3", "{'port': 8080, 'workers': 4}", "glossary 7", "",
    "loss 0,25", "loss: 1,234.5", "loss 12:30:11", "loss 2026-11-28", "loss 10.0.0.1:80", "mae 3-4",
    "precision=16-mixed", "loss 1.2.x",
)  # fmt: skip


def find(line: str) -> list[tuple[str, float]]:
    return [(name, value) for group in Finder().find([line]) for name, (value,) in group.values]


@pytest.mark.parametrize("line", LINES)
def test_the_numbers_of_usual_lines_are_metrics(line: str):
    assert repr(dict(find(line))) == repr(LINES[line])


@pytest.mark.parametrize("line", NO_METRICS)
def test_other_numbers_are_no_metrics(line: str):
    assert not find(line)


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("step 120 loss 0.5", 120),
        ("iteration: 7 | loss 0.5", 7),
        ("[Iter 20/300] loss 0.5", 20),
        ("{'loss': 0.5, 'step': 30}", 30),
        (" 12%|#  | 7/60 [00:01<00:08, loss=0.5]", 7),
        ("epoch 3 loss 0.5", None),
        ("loss 0.5", None),
    ],
)
def test_a_line_may_name_its_step(line: str, step: int | None):
    assert [group.steps for group in Finder().find([line])] == [[step]]


@given(st.binary(max_size=200))
def test_the_filter_of_whole_blocks_leaves_out_no_metric(line: bytes):
    for text in (line, b"x loss" + line, line + b" val_acc=" + line):
        if find(text.decode("utf-8", "replace").replace("\n", " ")):
            assert prefilter().search(text)


@pytest.mark.parametrize("line", LINES)
def test_the_filter_finds_usual_lines(line: str):
    assert prefilter().search(line.encode())


def test_no_line_takes_long():
    """Every repeat has a limit; with one that has none, some of these take seconds."""
    size = 16_000
    parts = ("loss ", "a_", "train ", "1", "loss 1", "'a': 1, ", " ", "| ", "step ", "{'", "a/b-")
    begun = time.process_time()

    for part in parts:
        for start, end in (("", ""), ("loss", "1"), ("{'", "}"), ("step", "loss 1")):
            find(start + part * (size // len(part)) + end)

    assert time.process_time() - begun < 20


@given(
    st.lists(
        st.lists(
            st.sampled_from(
                ["loss", "f1", "F2", "top5", "acc@1", "acc@5", "a2/loss", " ", "=", ": ", "|", "/",
                 "step", "1", "0", "27", ",", "-x", "0.5", "30", "5e-05", "nan", ".", "-",
                 "\u0663", "_", "["]
            ),
            max_size=12,
        ).map("".join),
        min_size=1,
        max_size=30,
    )
)  # fmt: skip
def test_lines_of_one_shape_are_searched_as_each_alone(lines: list[str]):
    """Those that differ only in digits: places are remembered, names and fractions are not."""
    lines += [
        re.sub("[0-9]", lambda digit: str((int(digit[0]) * 3 + 1) % 10), line) for line in lines
    ]
    lines += [f"{{'{line}': 0.5, 'loss': 2}}" for line in lines]

    together = sorted(
        (number, step, name, repr(values[place]))
        for group in Finder().find(lines)
        for place, (number, step) in enumerate(
            zip(group.numbers, map(str, group.steps), strict=True)
        )
        for name, values in group.values
    )

    alone = sorted(
        (number, str(group.steps[0]), name, repr(value))
        for number, line in enumerate(lines)
        for group in Finder().find([line])
        for name, (value,) in group.values
    )
    assert together == alone


@pytest.mark.parametrize(
    ("others", "lines"),
    [
        ((), ["{'f2': 0.5}", "{'f1': 0.7}"]),
        ((), ["top3 0.5", "top5 0.7"]),
        (("acc@1",), ["acc@1 0.5", "acc@5 0.7"]),
    ],
)
def test_a_metric_is_found_after_a_line_of_its_shape_without_one(
    others: tuple[str, ...], lines: list[str]
):
    [group] = Finder(others).find(lines)

    assert (group.numbers, [values for _, values in group.values]) == ([1], [[0.7]])


def test_a_letter_that_only_looks_like_one_of_a_number_is_no_number():
    """Regular expressions that ignore the case take the Turkish dotless i for an i."""
    assert find("{'loss': \u0131nf, 'acc': INF}") == [("acc", math.inf)]


def test_a_pattern_of_the_same_name_and_a_json_line_come_first():
    reader = MetricReader({"loss": "LOSS ([0-9]+)"}, detects=True)

    points = reader.add(0, b'[0] loss 3 acc 0.5\n[0] LOSS 4\n[0] {"lr": 0.1, "note": "acc 9"}\n')

    assert [(point.title, point.value) for point in points] == [
        ("acc (detected)", 0.5), ("loss", 4.0), ("lr", 0.1),
    ]  # fmt: skip


def test_the_steps_of_a_detected_metric_always_grow():
    """A progress bar starts anew in each epoch."""
    reader = MetricReader({}, detects=True)
    bar = b"[0] | %d/9 [00:01, loss=0.5]\n"

    points = reader.add(0, b"".join(bar % step for step in (4, 8, 4, 8)) + b"[0] loss 0.5\n")

    assert [point.step for point in points] == [4, 8, 9, 10, 11]


def test_a_result_without_a_step_has_the_step_before_it():
    reader = MetricReader({}, detects=True)
    epochs = b"[0] step 10 loss 3\n[0] val_acc 0.5\n[0] step 20 loss 2\n[0] val_acc 0.6\n"

    points = [point for point in reader.add(0, epochs) if point.name == "val_acc"]

    assert [(point.step, point.value) for point in points] == [(10, 0.5), (20, 0.6)]


@pytest.mark.parametrize("step", ["nan", "inf", "-inf", "1e300"])
def test_a_step_that_is_no_whole_number_counts_as_none(step: str):
    reader = MetricReader({}, detects=True)

    points = reader.add(0, f"[0] step 7 loss 3\n[0] {{'loss': 2, 'step': {step}}}\n".encode())

    assert [(point.step, point.value) for point in points] == [(7, 3.0), (8, 2.0)]


def test_nothing_is_detected_unless_asked():
    assert not MetricReader({}).add(0, b"[0] loss 0.5\n")
