"""Tests of how far a training is, by the lines that it prints."""

from __future__ import annotations

import pytest

from cloudjob.tracking.training import Count, Line, Training, counters, read


@pytest.mark.parametrize(
    ("text", "epochs", "steps"),
    [
        ("epoch 3/10 loss 0.5", Count(3, 10), None),
        ("Epoch [3/10], Step [120/1000], Loss: 0.5", Count(3, 10), Count(120, 1000)),
        ("step=120 of 1000", None, Count(120, 1000)),
        ("iter 7 / 9", None, Count(7, 9)),
        ("train:  12%|█▏   | 120/1000 [00:10<01:20, 11.0it/s]", None, Count(120, 1000)),
        ("Epochs:  30%|███  | 3/10 [00:30<01:10,  7.0s/it]", Count(3, 10), None),
        ("Epoch 3/10:  12%|█ | 120/1000 [00:10<01:20]", Count(3, 10), Count(120, 1000)),
        ("Epoch 3:  12%|█ | 120/1000 [00:10<01:20, 11.0it/s]", None, Count(120, 1000)),
        ("120/1000 ━━━━━━━━ 1s 10ms/step - loss: 0.5", None, Count(120, 1000)),
        ("120/1000 [====>.....] - ETA: 3s", None, Count(120, 1000)),
        # These count nothing.
        ("step 120 loss 0.5", None, None),
        ("serving 10/12 files", None, None),
        ("epoch 11/10", None, None),
        ("step 1/0", None, None),
        ("timestep 1/20.5", None, None),
        ("", None, None),
    ],
)
def test_epochs_and_steps_count_with_their_totals(
    text: str, epochs: Count | None, steps: Count | None
):
    count = counters(text)

    assert (count.epochs, count.steps) == (epochs, steps)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("step 5/9 3.5 samples/sec", "3.5 samples/s"),
        ("1200 tokens/s", "1200 tokens/s"),
        ("x:  12%|█ | 1/8 [00:10<01:20,  7.0s/it]", "7.0 s/it"),
        ("epoch 1/5 loss: 0.91 images/s: 1032.9", "1032.9 images/s"),
        ("loss 0.5 tokens/sec=2e3", ""),
        ("5 samples/sample", ""),
    ],
)
def test_a_rate_is_that_of_the_log(text: str, rate: str):
    assert counters(text).rate == rate


def lines(*pairs: tuple[float, str]) -> list[Line]:
    return [Line(*pair) for pair in pairs]


def test_the_time_left_follows_from_the_times_of_the_lines():
    progress = read(lines((100, "step 10/100"), (110, "a message"), (120, "step 30/100")))

    assert progress == Training(
        steps=Count(30, 100), share=0.3, left_s=pytest.approx(70), rate="1 steps/s"
    )


def test_steps_belong_to_the_epoch_before_them():
    progress = read(lines((100, "Epoch 1/4"), (110, "50/100 [==>..]"), (120, "Epoch 2/4"),
                       (130, "50/100 [==>..]")))  # fmt: skip

    assert progress.epochs == Count(2, 4)
    assert progress.steps == Count(50, 100)
    assert progress.share == pytest.approx(0.375)
    assert progress.left_s == pytest.approx(50)


def test_steps_that_a_new_epoch_does_not_begin_anew_count_through_all_epochs():
    progress = read(lines((100, "epoch 1/2 step 90/400"), (110, "epoch 1/2 step 190/400"),
                       (120, "epoch 2/2 step 290/400")))  # fmt: skip

    assert (progress.epochs, progress.steps) == (Count(2, 2), Count(290, 400))
    assert (progress.share, progress.rate) == (pytest.approx(0.725), "10 steps/s")
    assert progress.left_s == pytest.approx(11)


def test_a_result_of_an_epoch_ends_its_steps():
    progress = read(lines((0, "Epoch 1/4 step 9/10"), (0, "epoch 2/4 val_loss 0.5")))

    assert (progress.epochs, progress.steps, progress.share) == (Count(2, 4), None, 0.5)


def test_the_bar_of_one_epoch_tells_only_how_long_that_takes():
    progress = read(lines((0, "Epoch 3:  25%|██ | 25/100 [00:10<00:30,  2.50it/s]")))

    assert (progress.left_s, progress.is_left_in_epoch, progress.rate) == (30, True, "2.50 it/s")


def test_the_bar_of_all_steps_tells_how_long_they_take():
    progress = read(lines((0, "25%|██ | 25/100 [00:10<1:00:30, 2.50it/s]")))

    assert (progress.left_s, progress.is_left_in_epoch) == (3630, False)


@pytest.mark.parametrize(
    "pairs",
    [
        # Lines that are too close, a counter that began anew, a clock that was set back.
        [(100, "step 1/9"), (101, "step 5/9")],
        [(100, "step 8/9"), (200, "step 1/9")],
        [(200, "step 1/9"), (100, "step 5/9")],
        [(0, "step 1/9"), (0, "step 5/9")],
    ],
)
def test_without_a_speed_nothing_is_said_about_the_time_left(pairs: list[tuple[float, str]]):
    progress = read(lines(*pairs))

    assert progress.steps is not None
    assert (progress.left_s, progress.rate) == (None, "")


def test_a_log_without_totals_says_nothing():
    assert read(lines((1, "loss 0.5"), (2, "step 7"))) == Training()
