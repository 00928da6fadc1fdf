"""Explains a failure by what only the submitting machine knows: its files and its variables.

Nodes write the failure, so only limited parts of it are used, and nothing of this machine is
revealed but whether a file or a variable that the failure names exists here. Values of variables
are never shown.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudjob.errors import CloudJobError, PackageError
from cloudjob.model.rules import BACKENDS
from cloudjob.model.status import Failure, JobStatus
from cloudjob.package import LeftOut, scan
from cloudjob.package.messages import CLOUDJOBIGNORE, shown
from cloudjob.package.scan import covers
from jobentry.contract.secret_values import is_secret_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.tracking import Job

# How programs name the file that they did not find: Python, and coreutils with a shell.
_NAMED = re.compile(
    r"No such file or directory: b?'([^']{1,4096})'"
    r"|(?:cannot open|can't open|cannot access|cannot stat|open) '?([^':]{1,4096})'?:"
    r"|^(?:[\w./-]+: ){1,3}([^':]{1,4096}): No such file or directory"
)
# The folder of the package on a node.
_CODE = "/user-job-dir/code/"
# A log may name any number of files.
_MAX_PATHS = 50
_MODULE = re.compile(r"ModuleNotFoundError: No module named '([A-Za-z_][\w.]{0,199})'")
_KEY = re.compile(r"^KeyError: '([A-Za-z_]\w{0,199})'$")
# Lines of the traceback of ``os.environ[NAME]``, of Python 3.8 to 3.14.
_ENVIRON = re.compile(
    r'\bos\.environ\b|\benviron\[|^  File "(?:<frozen os>|.{0,500}/os\.py)", line '
)
_REQUIREMENTS = ("requirements.txt", "pip-requirements.txt", "environment.yml", "pyproject.toml")
_MAX_BYTES = 1 << 20
# The keys of a job that become variables of its ranks.
_VARIABLES = ("env", "secrets", "inputs", "outputs")
# Modules whose packages have other names.
_PACKAGES = {
    "cv2": "opencv-python",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "yaml": "pyyaml",
    "bs4": "beautifulsoup4",
    "dateutil": "python-dateutil",
}


def of_job(job: Job, status: JobStatus) -> str:
    """Return the hint for the failure of a job; empty if it has none or is not described.

    None for a job of others, whose description must not choose a folder that is read here.
    """
    if status.failure is None or not job.is_ours:
        return ""
    try:
        return hint(job.spec(), status.failure)
    except CloudJobError:
        return ""


def hint(
    spec: Mapping[str, Any], failure: Failure | None, environ: Mapping[str, str] = os.environ
) -> str:
    """Return what the user can do about a failure; empty if this machine knows nothing about it.

    Args:
        spec: The job as it was submitted; without a source if another machine submitted it.
        environ: The variables of the caller, of which only the names are used.
    """
    if failure is None:
        return ""
    explanations = (
        *_of_files(spec, failure),
        *_of_modules(spec, failure),
        *_of_variables(spec, failure, environ),
    )
    return next(filter(None, explanations), "")


# -- files ----------------------------------------------------------------------------------------


def _of_files(spec: Mapping[str, Any], failure: Failure) -> Iterator[str]:
    """Yield why the nodes lack a file that this machine has."""
    source = str(spec.get("source") or "")
    if source:
        paths = sorted(set(_missing(failure)))[:_MAX_PATHS]
        names = [name for path in paths if (name := _in_source(source, path))]
        yield _left_out_text(spec, names) or _outside_text(spec, source, paths)


def _left_out_text(spec: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return why the first of these paths of the source is not in the package; else empty."""
    source = spec.get("source")
    if not source or not names:
        return ""
    try:
        left_out = scan(Path(str(source)), follow_links=spec.get("links") == "follow").left_out
    except (PackageError, OSError):
        return ""
    pairs = ((name, item) for name in names for item in left_out if covers(item.path, name))
    return next((_text(name, item) for name, item in pairs), "")


def _missing(failure: Failure) -> Iterator[str]:
    """Yield the paths that the job did not find."""
    for line in _texts(failure):
        for match in _NAMED.finditer(line):
            if path := next(filter(None, match.groups()), ""):
                yield path


def _in_source(source: str, path: str) -> str:
    """Return a path relative to the source; empty if it is not in it."""
    inner = path.partition(_CODE)[2] or path
    if inner.startswith(source.rstrip("/") + "/"):
        inner = os.path.relpath(inner, source)
    name = posixpath.normpath(inner)
    return "" if posixpath.isabs(name) or name.split("/", 1)[0] == ".." else name


def _text(name: str, item: LeftOut) -> str:
    return (
        f"{shown(name)} is not in the package: left out by {shown(item.reason)}; a line"
        f" !{shown(item.path)} in {CLOUDJOBIGNORE} keeps it, and --input passes large data"
    )


def _outside_text(spec: Mapping[str, Any], source: str, paths: Sequence[str]) -> str:
    """Return that this machine has a file outside the source; empty if it has none of these."""
    kind = BACKENDS.get(str(spec.get("backend")))
    if kind and kind.shares_files:
        return ""
    places = {Path.home(), Path(source).parent} - {Path("/")}
    for path in paths:
        local = Path(os.path.normpath(Path(source, path)))
        is_own = not places.isdisjoint(local.parents)
        if is_own and not _in_source(source, path) and os.path.lexists(local):
            return (
                f"{shown(path)} is on this machine, but outside the folder that was sent,"
                f" {shown(source)}: copy it there, or put it into a store and pass it with --input"
            )
    return ""


# -- modules --------------------------------------------------------------------------------------


def _of_modules(spec: Mapping[str, Any], failure: Failure) -> Iterator[str]:
    """Yield why a module that the script imports is not there."""
    match = next(filter(None, map(_MODULE.search, _texts(failure))), None)
    if match is None:
        return
    top = match[1].partition(".")[0]
    if top == "encodings":
        yield "Python does not find its own library: is PYTHONHOME set to another one's folder?"
        return
    yield _left_out_text(spec, (f"{top}.py", top))
    if not spec.get("source"):
        return
    where = _interpreter(spec)
    listed = [name for name in _REQUIREMENTS if _lists(Path(str(spec["source"]), name), top)]
    if listed:
        yield f"{listed[0]} lists {top}, but cloudjob installs nothing: {where} must have it"
    else:
        yield f"cloudjob installs nothing: {where} must have {top}"


def _interpreter(spec: Mapping[str, Any]) -> str:
    """Return what must have the modules of a script."""
    if spec.get("image"):
        return f"the image {str(spec['image'])[:200]}"
    kind = BACKENDS.get(str(spec.get("backend")))
    if kind and kind.python_key:
        return f"the Python that runs the script (of the active environment, or {kind.python_key})"
    return "the image"


def _lists(path: Path, module: str) -> bool:
    """Whether a file of requirements names a package of this module."""
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return False
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # Names of packages are equal if they differ only in these characters, or in case.
    package = "[-_.]+".join(map(re.escape, re.split("[-_.]+", _PACKAGES.get(module, module))))
    return bool(re.search(rf"(?im)^[\s\"'-]*{package}\s*(?:$|[\[<>=!~;,\"'#@ ])", text))


# -- variables ------------------------------------------------------------------------------------


def _of_variables(
    spec: Mapping[str, Any], failure: Failure, environ: Mapping[str, str]
) -> Iterator[str]:
    """Yield how to pass on a variable that the script reads and the job does not have."""
    match = next(filter(None, map(_KEY.match, _texts(failure))), None)
    if match is None or not any(map(_ENVIRON.search, failure.last_lines)):
        return
    name = match[1]
    is_passed = any(name in (spec.get(key) or {}) for key in _VARIABLES)
    if is_passed or not spec.get("source"):
        return
    is_secret = is_secret_name(name)
    option = f"--secret {name}" if is_secret else f'-e {name}="${name}"'
    if name in environ:
        yield f"{name} is set in this shell, and a job gets only what it is given: add {option}"
    elif is_secret:
        yield f"the job has no variable {name}: set it in your shell, and add {option}"
    else:
        yield f"the job has no variable {name}: -e {name}=VALUE sets it"


def _texts(failure: Failure) -> tuple[str, ...]:
    return (failure.message, *failure.last_lines)
