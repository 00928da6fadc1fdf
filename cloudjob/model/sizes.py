"""Whether Linux can start a rank with all of a job's arguments and variables. No I/O."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

from cloudjob.errors import SpecError
from cloudjob.model.rules import MAX_ARG_BYTES, VARIABLE_FIELDS
from jobentry.contract import names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

HINT = "put long values into a file of the source or into an input"
# A quarter of the usual stack limit (execve(2)) is 2 MiB; the rest is room for the variables that
# the image, the launcher and the platform add.
MAX_PROGRAM_BYTES = 2_000_000
# The bytes of each argument or variable besides its text: the terminating NUL and a pointer.
_EACH = 9
# The bytes that each variable of the job adds to mpirun's command line: ``-x NAME``.
_OPTION = len("-x") + 2 * _EACH
_KEYS = {
    names.CLOUDJOB_ENV_NAMES: "env",
    names.CLOUDJOB_SECRET_NAMES: "secrets",
    names.CLOUDJOB_INPUTS: "inputs",
    names.CLOUDJOB_OUTPUTS: "outputs",
}


def check(spec: JobSpec, variables: Mapping[str, str]) -> None:
    """Refuse a job whose arguments and variables are too long for Linux.

    Args:
        variables: Those of the entry of node 0.

    Raises:
        SpecError: With the key of the largest.
    """
    problems = []
    for name, key in _KEYS.items():
        size = _size(f"{name}={variables.get(name, '')}")
        if size > MAX_ARG_BYTES:
            text = f"(given {size} bytes; allowed {MAX_ARG_BYTES}, Linux's limit)"
            problems.append(f"{key}: too many {text}")
    texts = [*(f"{name}={value}" for name, value in variables.items()), spec.script, *spec.args]
    total = sum(map(_size, texts)) + _EACH * len(texts)
    total += sum(map(_size, spec.env)) + _OPTION * len(spec.env)
    if total > MAX_PROGRAM_BYTES:
        problems.append(
            f"arguments and variables: too long for Linux to start a rank (given {total} bytes, "
            f"of which {largest(spec)}; allowed {MAX_PROGRAM_BYTES})"
        )
    if problems:
        raise SpecError(problems, hint=HINT)


def largest(spec: JobSpec) -> str:
    """Return the key of the longest argument or variable, with its size."""
    variables = (
        (f"{key}.{name}", _size(f"{name}={value}"))
        for key in VARIABLE_FIELDS
        for name, value in getattr(spec, key).items()
    )
    return _longest((*_arguments(spec), *variables))


def largest_argument(spec: JobSpec) -> str:
    """Return the key of the longest argument, with its size."""
    return _longest(_arguments(spec))


def _arguments(spec: JobSpec) -> Iterator[tuple[str, int]]:
    yield "script", _size(spec.script)
    for index, argument in enumerate(spec.args):
        yield f"args[{index}]", _size(argument)


def _longest(sizes: Iterable[tuple[str, int]]) -> str:
    key, size = max(sizes, key=lambda item: item[1])
    return f"{size} in {key}"


def _size(text: str) -> int:
    return len(os.fsencode(text))
