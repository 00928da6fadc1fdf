"""The floors: how cloudjob must compare with its peers, tested with the medians of one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import launchers
from benchmarks.modelarts import HTTP_SERVER
from benchmarks.result import CaseResult

_LEAST_SPEED = 0.9
ZIPAPP_LIMIT_BYTES = 400 * 1024

Results = dict[str, CaseResult]
# Whether the floor holds (None: unknown), and the measured figures as text.
Judgement = tuple[bool | None, str]


@dataclass(frozen=True)
class Floor:
    """One floor, for the case that it names."""

    case: str
    claim: str
    judge: Callable[[Results], Judgement]


@dataclass(frozen=True)
class Verdict:
    """The result of one floor."""

    claim: str
    outcome: str
    measured: str


def floors() -> tuple[Floor, ...]:
    """Return every floor."""
    return (
        _ratio("help", "cpu_s", "torchx", 0.25, "a quarter of the CPU time of torchx"),
        _ratio("noop-2", "wall_s", "torchx", 1.0, "the wall time of torchx"),
        _over("noop-2", "cloudjob", 0.6),
        _over("entry", "jobentry", 0.2),
        *(_over(name, "jobentry", 0.3, other="by hand") for name in launchers.names()),
        _over("containers-2", "cloudjob", 1.5, "first_line_s"),
        _over("slurm-2", "cloudjob", 1.0, other="srun"),
        *(_ahead(count) for count in (2, 4, 8, 16, 32)),
        Floor("probe-1000", "probe-1000: brought up in less than 10 s", _is_up),
        Floor("probe-2000", "probe: CPU of the head grows linearly, 250 to 2,000", _is_linear),
        _ratio("log", "wall_s", "mpirun", 1.3, "1.3 times the wall time of bare mpirun"),
        Floor("log", "log: cloudjob loses and changes nothing", _is_exact("log")),
        Floor("log-5x", "log-5x: cloudjob loses and changes nothing", _is_exact("log-5x")),
        *(_as_boto3(f"store-{size}-{way}") for size in ("big", "small") for way in ("up", "down")),
        _times("package-first", "skypilot's zip", 0.5, "half the wall time of SkyPilot's zip"),
        _most("package-first", "rss_mib", 100, "100 MiB of memory"),
        _most("package-again", "wall_s", 0.5, "0.5 s"),
        _most("package-again", "sent_bytes", 0, "0 bytes"),
        _most("package-edit", "sent_bytes", 64 * 1024 + 4523, "64 KiB and the file"),
        _most("package-large", "rss_mib", 100, "100 MiB of memory"),
        _times("package-unpack", "unzip", 2.0, "2 times the wall time of unzip"),
        _most("modelarts-submit", "request_s", 0.5, "0.5 s for its requests"),
        # Without TCP_NODELAY on the emulator's side, each answer takes 40 ms.
        _ratio(
            "modelarts-kept-alive", "request_s", HTTP_SERVER, 5, "5 times the time of http.server"
        ),
        _most("modelarts-list", "page_ms", 100, "100 ms for a page"),
        _most("modelarts-list", "grown_mib", 8, "8 MiB more for 600 pages"),
        Floor("log-5x", "log-5x: five times the log, the same memory (+8 MiB at most)", _is_flat),
    )


def verdicts(results: Results) -> list[Verdict]:
    """Test every floor whose case was run."""
    return [_verdict(each, results) for each in floors() if each.case in results]


def size_verdict(size_bytes: int | None) -> Verdict:
    """Test the size of the zipapp."""
    claim = f"size: the zipapp has at most {ZIPAPP_LIMIT_BYTES // 1024} KiB"
    if size_bytes is None:
        return Verdict(claim, "NOT RUN", "there is no zipapp")
    outcome = "PASS" if size_bytes <= ZIPAPP_LIMIT_BYTES else "FAIL"
    return Verdict(claim, outcome, f"{size_bytes / 1024:.1f} KiB")


def _verdict(floor: Floor, results: Results) -> Verdict:
    holds, measured = floor.judge(results)
    failed = _failures(results[floor.case])
    if failed:
        holds, measured = False, f"{measured}; {failed}"
    outcome = {True: "PASS", False: "FAIL", None: "NOT RUN"}[holds]
    return Verdict(floor.claim, outcome, measured)


def _failures(result: CaseResult) -> str:
    """Return which rounds of cloudjob failed; the figures of the others then prove nothing."""
    ours = ("cloudjob", "jobentry")
    failures = [text for name in ours if name in result.subjects for text in _failed(result, name)]
    return f"{len(failures)} rounds failed: {failures[0]}" if failures else ""


def _failed(result: CaseResult, name: str) -> list[str]:
    return result.subjects[name].failures


def _ratio(case: str, figure: str, other: str, limit: float, limit_text: str) -> Floor:
    def judge(results: Results) -> Judgement:
        ours, theirs = (_median(results, case, name, figure) for name in ("cloudjob", other))
        if isinstance(ours, str) or isinstance(theirs, str):
            return None, ours if isinstance(ours, str) else str(theirs)
        text = f"{ours:.3f} s against {theirs:.3f} s: {ours / theirs:.2f} times"
        return ours <= limit * theirs, text

    return Floor(case, f"{case}: cloudjob takes at most {limit_text}", judge)


def _times(case: str, other: str, limit: float, limit_text: str) -> Floor:
    return _ratio(case, "wall_s", other, limit, limit_text)


def _most(case: str, figure: str, limit: float, limit_text: str) -> Floor:
    def judge(results: Results) -> Judgement:
        ours = _median(results, case, "cloudjob", figure)
        if isinstance(ours, str):
            return None, ours
        return ours <= limit, f"{ours:,.3f}".rstrip("0").rstrip(".")

    return Floor(case, f"{case}: cloudjob takes at most {limit_text}", judge)


def _over(
    case: str, name: str, limit_s: float, figure: str = "wall_s", other: str = "mpirun"
) -> Floor:
    def judge(results: Results) -> Judgement:
        ours, bare = (_median(results, case, each, figure) for each in (name, other))
        if isinstance(ours, str) or isinstance(bare, str):
            return None, ours if isinstance(ours, str) else str(bare)
        text = f"{ours:.3f} s against {bare:.3f} s: {ours - bare:+.3f} s"
        return ours - bare <= limit_s, text

    what = " to the first line" if figure == "first_line_s" else ""
    than = "bare mpirun" if other == "mpirun" else other
    return Floor(case, f"{case}: {name} takes at most {limit_s} s more{what} than {than}", judge)


def _ahead(count: int) -> Floor:
    """From 8 nodes on cloudjob must be faster than the serial script, below that not slower."""
    case, is_strict = f"containers-{count}", count >= 8

    def judge(results: Results) -> Judgement:
        marks = []
        for figure in ("first_line_s", "done_s"):
            for name in ("cloudjob", "serial"):
                value = _median(results, case, name, figure)
                if isinstance(value, str):
                    return None, value
                marks.append(value)
        first, their_first, done, their_done = marks
        text = (
            f"first line {first:.3f} s against {their_first:.3f} s, "
            f"end {done:.3f} s against {their_done:.3f} s"
        )
        if is_strict:
            return first < their_first and done < their_done, text
        return first <= their_first and done <= their_done, text

    comparison = "ahead of" if is_strict else "not slower than"
    return Floor(case, f"{case}: cloudjob is {comparison} the serial script", judge)


def _is_up(results: Results) -> Judgement:
    took = _median(results, "probe-1000", "jobentry", "bring_up_s")
    return (None, took) if isinstance(took, str) else (took < 10, f"{took:.2f} s")


def _is_linear(results: Results) -> Judgement:
    if "probe-250" not in results:
        return None, "the case probe-250 was not run"
    few, many = (
        _median(results, case, "jobentry", "head_ms") for case in ("probe-250", "probe-2000")
    )
    if isinstance(few, str) or isinstance(many, str):
        return None, few if isinstance(few, str) else str(many)
    return many <= 1.5 * few, f"{few:.2f} ms a worker with 250, {many:.2f} ms with 2,000"


def _as_boto3(case: str) -> Floor:
    def judge(results: Results) -> Judgement:
        subjects = results[case].subjects
        medians = [
            subjects[name].median("transfer_s") if name in subjects else None
            for name in ("cloudjob", "boto3")
        ]
        ours, theirs = medians
        if ours is None or theirs is None:
            return None, "cloudjob or boto3 was not run"
        text = f"{ours:.3f} s against {theirs:.3f} s of boto3: {theirs / ours:.2f}"
        return theirs / ours >= _LEAST_SPEED, text

    return Floor(case, f"{case}: cloudjob is at least {_LEAST_SPEED} as fast as boto3", judge)


def _is_exact(case: str) -> Callable[[Results], Judgement]:
    def judge(results: Results) -> Judgement:
        lost = _median(results, case, "cloudjob", "lost_bytes")
        if isinstance(lost, str):
            return None, lost
        exact = results[case].subjects["cloudjob"].values("is_exact")
        return all(exact), f"{sum(exact):.0f} of {len(exact)} logs exact, {lost:.0f} bytes lost"

    return judge


def _is_flat(results: Results) -> Judgement:
    if "log" not in results:
        return None, "the case log was not run"
    marks = []
    for case in ("log", "log-5x"):
        for figure in ("rss_mib", "other_rss_mib"):
            value = _median(results, case, "cloudjob", figure)
            if isinstance(value, str):
                return None, value
            marks.append(value)
    small, small_other, large, large_other = marks
    text = (
        f"cloudjob {small:.1f} -> {large:.1f} MiB, "
        f"largest other process {small_other:.1f} -> {large_other:.1f} MiB"
    )
    return large - small <= 8 and large_other - small_other <= 8, text


def _median(results: Results, case: str, name: str, figure: str) -> float | str:
    """Return the median, or the reason why there is none."""
    subject = results[case].subjects.get(name)
    if subject is None:
        return f"{name} was not chosen"
    median = subject.median(figure)
    return f"{name}: {subject.not_run or 'no run'}" if median is None else median
