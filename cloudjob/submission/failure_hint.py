"""Explains a failure by what only the submitting machine knows: its files and its variables.

Nodes write the failure, so only limited parts of it are used, and nothing of this machine is
revealed but whether a file or a variable that the failure names exists here. Values of variables
are never shown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudjob.errors import CloudJobError
from cloudjob.model.status import Failure, JobStatus
from cloudjob.submission import missing_file
from jobentry.contract import masks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.tracking import Job

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
    """Return the hint for the failure of a job; empty if it has none or is not described."""
    if status.failure is None:
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
        missing_file.hint(spec, failure),
        *_of_modules(spec, failure),
        *_of_variables(spec, failure, environ),
    )
    return next(filter(None, explanations), "")


# -- modules --------------------------------------------------------------------------------------


def _of_modules(spec: Mapping[str, Any], failure: Failure) -> Iterator[str]:
    """Yield why a module that the script imports is not there."""
    match = next(filter(None, map(_MODULE.search, _texts(failure))), None)
    if match is None:
        return
    top = match[1].partition(".")[0]
    yield missing_file.left_out_text(spec, (f"{top}.py", top))
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
    if spec.get("backend") in ("process", "slurm"):
        return "the Python that runs the script (of the active environment, or process.python)"
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
    is_secret = masks.is_secret_name(name)
    option = f"--secret {name}" if is_secret else f'-e {name}="${name}"'
    if name in environ:
        yield f"{name} is set in this shell, and a job gets only what it is given: add {option}"
    elif is_secret:
        yield f"the job has no variable {name}: set it in your shell, and add {option}"
    else:
        yield f"the job has no variable {name}: -e {name}=VALUE sets it"


def _texts(failure: Failure) -> tuple[str, ...]:
    return (failure.message, *failure.last_lines)
