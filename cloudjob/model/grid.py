"""The values of a sweep. No I/O."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from cloudjob.model.text import given

MAX_JOBS = 10_000
NAME_RULE = r"[A-Za-z_][A-Za-z0-9_-]*"
# The keys in which {NAME} is replaced by a value.
FILLED = ("args", "env", "inputs", "outputs")

_PLACE = rf"\{{({NAME_RULE})\}}"
_RANGE = r"(-?[0-9]{1,18})\.\.(-?[0-9]{1,18})(?:\.\.([0-9]{1,18}))?"
# A text that is meant as a range, unlike a path such as ../data.
_LIKE_RANGE = r"(?=.*[0-9])[-+0-9.]*\.\.[-+0-9.]*"
# A sweep's id ends in 8 letters or digits, like a job's; its jobs append a number of 1 to 4 digits.
_JOB = r"(?a)([a-z0-9][a-z0-9-]*-[a-z0-9]{8})-[0-9]{1,4}"
_ALLOWED = "allowed: values such as 0.1,0.01 or 1..3, or a list"


def job_id(sweep: str, index: int) -> str:
    """Return the id of a job of a sweep."""
    return f"{sweep}-{index}"


def sweep_of(job: str) -> str:
    """Return the id of the sweep that a job belongs to; empty if it belongs to none."""
    match = re.fullmatch(_JOB, job)
    return match[1] if match else ""


def unique_part(job: str) -> str:
    """Return the part of a job's id after its name, which is unique among all jobs."""
    name, dash, _ = (sweep_of(job) or job).rpartition("-")
    return job[len(name + dash) :]


def check_name(name: str) -> str:
    """Return ``name`` if it is a valid name of a sweep's values; else raise ``ValueError``."""
    if not re.fullmatch(NAME_RULE, name):
        rule = "letters, digits, '_' and '-', a letter or '_' first"
        raise ValueError(f"is not a name for a sweep (given {given(name)}; allowed {rule})")
    return name


def split(text: str) -> list[str]:
    """Return the values in a text such as ``0.1,0.01`` or ``1..3``."""
    return [item for part in text.split(",") for item in _items(part.strip(), text)]


def check_values(values: Sequence[str]) -> None:
    """Raise ``ValueError`` for a list that is empty, or has a value twice."""
    if not values:
        raise ValueError(f"has no values ({_ALLOWED})")
    value, times = Counter(values).most_common(1)[0]
    if times > 1:
        raise ValueError(f"has a value twice (given {given(value)}; allowed once)")


def _items(part: str, whole: str) -> Iterator[str]:
    if not part:
        what = "an empty value" if whole.strip() else "no values"
        raise ValueError(f"has {what} (given {given(whole)}; {_ALLOWED})")
    bounds = re.fullmatch(_RANGE, part)
    if bounds is None:
        if re.fullmatch(_LIKE_RANGE, part):
            allowed = "allowed whole numbers at both ends, as in 1..3 or 1..9..2"
            raise ValueError(f"has a range without two ends (given {given(part)}; {allowed})")
        yield part
        return
    first, last, step = int(bounds[1]), int(bounds[2]), int(bounds[3] or 1)
    if last < first or not step:
        raise ValueError(f"has an empty range (given {given(part)}; for example 1..3 or 1..9..2)")
    numbers = range(first, last + 1, step)
    if len(numbers) > MAX_JOBS:
        size = f"{len(numbers)} values"
        raise ValueError(f"has a range of {size} (given {given(part)}; allowed {MAX_JOBS})")
    yield from map(str, numbers)


def combinations(sweep: Mapping[str, tuple[str, ...]]) -> Iterator[dict[str, str]]:
    """Yield the values of each job by name; the last name changes fastest."""
    for values in product(*sweep.values()):
        yield dict(zip(sweep, values, strict=True))


def text_of(values: Mapping[str, str]) -> str:
    """Return the values of a job in one line: ``lr=0.1 seed=2``."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def names_in(text: str) -> list[str]:
    """Return the ``{NAME}`` of a text, in their order."""
    return re.findall(_PLACE, text)


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return a text with the value of each ``{NAME}``; all other braces stay as they are."""
    return re.sub(_PLACE, lambda place: values.get(place[1], place[0]), text)
