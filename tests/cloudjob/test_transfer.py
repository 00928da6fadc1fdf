"""How an upload looks: a bar, quiet lines, or nothing at all."""

from __future__ import annotations

from cloudjob.console import Transfer


def test_what_is_quick_shows_nothing():
    """A second is short enough to wait without a word."""
    transfer = Transfer("sent", 1000, 5.0, is_live=True)

    assert [transfer.move(500, 5.5), transfer.move(500, 5.99), transfer.end(6.0)] == ["", "", ""]


def test_a_terminal_shows_a_bar_with_rate_and_time_left():
    """It is drawn in place, ten times a second at most, and makes room for what it came to."""
    transfer = Transfer("sent", 100_000_000, 0.0, is_live=True)

    assert transfer.move(25_000_000, 1.0) == (
        "\r[######..................]  25% sent 25.0 MB of 100.0 MB, 25.0 MB/s, 0:03 left\x1b[K"
    )
    assert transfer.move(25_000_000, 1.05) == ""
    assert transfer.move(-25_000_000, 2.0) == (
        "\r[######..................]  25% sent 25.0 MB of 100.0 MB, 12.5 MB/s, 0:06 left\x1b[K"
    )
    assert transfer.move(75_000_000, 2.05) == ""
    assert transfer.end(4.0) == "\rsent 100.0 MB in 4.0 s (25.0 MB/s)\x1b[K\n"
    assert transfer.end(4.0) == ""


def test_a_file_gets_a_line_now_and_then():
    """The first after a second, then one every ten."""
    transfer = Transfer("sent", 40_000_000_000, 0.0, is_live=False)

    lines = [transfer.move(10_000_000, 0.5 * half) for half in range(50)]

    assert [line for line in lines if line] == [
        "sent 30.0 MB of 40.00 GB, 30.0 MB/s, 22:12 left\n",
        "sent 230.0 MB of 40.00 GB, 20.9 MB/s, 31:42 left\n",
        "sent 430.0 MB of 40.00 GB, 20.5 MB/s, 32:12 left\n",
    ]
    assert transfer.end(30.0) == ""


def test_a_bar_that_breaks_off_leaves_its_line_alone():
    """What is said next begins on a line of its own."""
    transfer = Transfer("sent", 100, 0.0, is_live=True)
    transfer.move(10, 2.0)

    assert transfer.end(3.0) == "\n"
