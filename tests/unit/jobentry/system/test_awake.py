"""Suspensions of a process are not counted."""

from __future__ import annotations

from jobentry.system.awake import AwakeClock


class Machine:
    """A machine whose clock goes on while the process is suspended."""

    def __init__(self) -> None:
        self.at_s = 1000.0
        self.clock = AwakeClock(lambda: self.at_s)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.at_s += 1
            self.clock.now_s()


def test_a_suspension_does_not_count_and_is_known_for_a_while_also_if_the_machine_is_slow_then():
    machine = Machine()
    machine.at_s += 50
    begun_s = machine.clock.now_s()
    machine.run(60)
    assert (machine.clock.now_s() - begun_s, machine.clock.suspended_s()) == (60, 0)

    machine.at_s += 100
    assert machine.clock.now_s() - begun_s == 60
    machine.at_s += 4
    assert machine.clock.suspended_s() == 100
    machine.run(30)

    assert (machine.clock.now_s() - begun_s, machine.clock.suspended_s()) == (90, 0)
