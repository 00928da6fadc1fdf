"""The files that may hold a layer, and their text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cloudjob.errors import UsageError
from cloudjob.model.text import one_line

CLOUDJOB_CONFIG = "CLOUDJOB_CONFIG"
PROJECT_FILE = "cloudjob.yaml"

# A job description is a few pages; the limit is for a path that never ends, such as /dev/zero.
MAX_FILE_BYTES = 16 * 1024 * 1024


class ConfigFile(NamedTuple):
    """A file that may hold a layer; ``what`` and ``shown`` are its kind and name in messages."""

    path: Path
    what: str
    shown: str
    must_exist: bool = False


def files_of(
    job_file: str | None, cwd: Path, source: Path, environ: Mapping[str, str]
) -> list[ConfigFile]:
    """Return the files that may hold a layer, the farthest first."""
    named = environ.get(CLOUDJOB_CONFIG, "")
    if named:
        user_file = ConfigFile(Path(named), "user file", named, must_exist=True)
    else:
        import platformdirs

        path = Path(platformdirs.user_config_dir("cloudjob"), "config.yaml")
        user_file = ConfigFile(path, "user file", str(path))
    project = source / PROJECT_FILE
    project_title = PROJECT_FILE if source == cwd else str(project)
    files = [user_file, ConfigFile(project, "project file", project_title)]
    if job_file is not None:
        job_path = cwd / job_file
        if job_path.absolute() == project.absolute():
            files.pop()  # Reading the same file twice would report its problems twice.
        files.append(ConfigFile(job_path, "job file", job_file, must_exist=True))
    return files


def read_bytes(path: Path) -> bytes:
    """Return the content of a file; refuse one that is too large to be a job file."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"is larger than {MAX_FILE_BYTES} bytes")
    return data


def text_of(file: ConfigFile) -> str:
    """Return the content of a file; empty if an optional file is absent."""
    try:
        if not file.must_exist and file.path.is_fifo():
            raise ValueError("is a named pipe, which may never deliver anything")
        data = read_bytes(file.path)
    except OSError as error:
        if not file.must_exist and isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return ""
        hint = "is the path right, and the file readable?"
        raise unreadable(file, "", reason(error), hint=hint) from error
    except ValueError as error:
        raise unreadable(file, "", reason(error), hint="it must be a YAML file") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = position(data, error.start)
        hint = "save the file as UTF-8"
        raise unreadable(file, where, "not UTF-8 text", hint=hint) from error


def unreadable(file: ConfigFile, where: str, what: str, *, hint: str) -> UsageError:
    """Return the error of a file that cannot be read."""
    return UsageError(f"reading {file.what}: {one_line(file.shown)}{where}: {what}", hint=hint)


def position(data: bytes, offset: int) -> str:
    """Return a place in a file's bytes as ``:LINE:COLUMN``."""
    before = data[:offset]
    return f":{before.count(10) + 1}:{offset - before.rfind(10)}"


def reason(error: OSError | ValueError) -> str:
    """Return the reason of an error in words."""
    return getattr(error, "strerror", None) or str(error)
