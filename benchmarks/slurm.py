"""A no-op on a real Slurm with two nodes on this machine: srun by hand, and a submit."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Failed
from benchmarks.venv import ROOT, NotRun
from tests.support.slurm import Slurm, missing

NODES = 2
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIMIT_S = 120
_RAN = b"noop ran"
# Slurm checks batch jobs at fixed times within a second, so the result depends on when a run
# starts. Multiples of this number are spread evenly over a second, whatever their number.
_EVENLY = (5**0.5 - 1) / 2


class Cluster:
    """A Slurm whose nodes can read the script, and the cloudjob that submits to it."""

    def __init__(self, slurm: Slurm, cloudjob: Path) -> None:
        self._slurm = slurm
        self._cloudjob = cloudjob
        self._rounds: Counter[str] = Counter()
        self._source = slurm.folder / "noop"
        self._source.mkdir()
        shutil.copy(ROOT / "benchmarks" / "jobs" / "noop.py", self._source)

    def srun(self) -> dict[str, float]:
        """Run the script once on each node, by hand."""
        python = str(self._cloudjob.with_name("python"))
        argv = ("srun", "--quiet", f"--nodes={NODES}", f"--ntasks={NODES}", python, "noop.py")
        return self._timed("srun", *argv)

    def sbatch(self) -> dict[str, float]:
        """Run the same srun in a batch job and wait for it, to measure queue and batch alone."""
        python = str(self._cloudjob.with_name("python"))
        line = f"srun --quiet --ntasks={NODES} {python} noop.py"
        argv = ("sbatch", "--parsable", f"--nodes={NODES}", "--output=out", f"--wrap={line}")
        # sbatch --wait polls only every two seconds.
        text = """rm -f out
        "$@" && until [ "$(grep -c ran out 2>/dev/null)" = "$0" ]; do sleep 0.01; done
        cat out"""
        return self._timed("sbatch", "sh", "-c", text, str(NODES), *argv)

    def submit(self, launcher: str) -> dict[str, float]:
        """Run the same through cloudjob, from the submit to the end of the job."""
        args = ("--backend", "slurm", "--nodes", str(NODES), "--launcher", launcher, "noop.py")
        return self._timed(launcher, str(self._cloudjob), "submit", *args)

    def _timed(self, subject: str, *argv: str) -> dict[str, float]:
        """Return the seconds that a command took on the login node.

        Args:
            subject: Spreads the rounds over a second, in the same way for each subject.

        Raises:
            Failed: The command failed, or the output of some node is missing.
        """
        # Let the previous job finish its clean-up first, so that it is not measured.
        self._slurm.await_idle()
        home = self._slurm.folder / "home"
        env = {
            "PATH": _SYSTEM_PATH,
            "HOME": str(self._slurm.folder),
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(self._slurm.conf),
            "CLOUDJOB_HOME": str(home),
        }
        self._rounds[subject] += 1
        time.sleep((self._rounds[subject] * _EVENLY - time.time()) % 1.0)
        begun = time.perf_counter()
        done = subprocess.run(
            self._slurm.argv(*argv),
            cwd=self._source,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
        wall_s = time.perf_counter() - begun
        ran = done.stdout.count(_RAN)
        if done.returncode or ran != NODES:
            message = os.fsdecode(done.stderr[-300:])
            raise Failed(f"exit {done.returncode}, {ran} of {NODES} nodes ran: {message}")
        return {"wall_s": wall_s}


@contextlib.contextmanager
def running(cloudjob: Path) -> Iterator[Cluster]:
    """Start a Slurm.

    Raises:
        NotRun: This machine cannot run one.
    """
    why = missing()
    if why:
        raise NotRun(why)
    with Slurm(nodes=NODES) as slurm:
        yield Cluster(slurm, cloudjob)
