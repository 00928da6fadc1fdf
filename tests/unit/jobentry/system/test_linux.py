"""Tests of what the kernel says about processes."""

from __future__ import annotations

import os
import subprocess
import threading

from jobentry.system import linux


def test_the_children_of_a_process_are_those_of_all_its_threads_until_they_were_waited_for():
    programs = [subprocess.Popen(["true"])]
    thread = threading.Thread(target=lambda: programs.append(subprocess.Popen(["sleep", "60"])))
    thread.start()
    thread.join()

    # Processes and their parents say the same, more slowly.
    by_parent = {each for each in linux.processes() if linux.parent(each) == os.getpid()}
    children = linux.children(os.getpid())

    assert set(children) == by_parent
    assert by_parent >= {program.pid for program in programs}
    for program in programs:
        program.kill()
        program.wait()
    assert not {program.pid for program in programs} & set(linux.children(os.getpid()))
    assert linux.children(programs[0].pid) == []
