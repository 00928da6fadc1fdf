"""The user's source folder becomes one archive: reproducible, ignores honoured, secrets left out.

``scan`` decides what goes in from names, ``stat`` and ignore files alone; ``pack`` writes that.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import heapq
import io
import os
import posixpath
import re
import stat
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, cast

from cloudjob.errors import PackageError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

GITIGNORE = ".gitignore"
CLOUDJOBIGNORE = ".cloudjobignore"

# What no job needs in the cloud, whatever the ignore files say.
_DEFAULT_NAMES = frozenset(
    {
        ".git", ".hg", ".svn", "__pycache__", ".venv", ".mypy_cache", ".pytest_cache",
        ".ruff_cache", ".ipynb_checkpoints", "node_modules", ".tox", ".nox", ".DS_Store",
    }
)  # fmt: skip
_SECRET_FOLDERS = frozenset({".aws", ".ssh", ".kube"})
_SECRET_FILES = re.compile(
    r"\.env|\.env\.(?!(?:.*\.)?(?:example|sample|template)$).*|id_(?:rsa|dsa|ecdsa|ed25519)(?:_sk)?"
    r"|[._]netrc|\.pypirc|\.git-credentials|\.obsutilconfig|credentials\.csv"
    r"|kubeconfig(?:\.ya?ml)?|.*\.kubeconfig",
    re.DOTALL,
)
_KEY_FILE_SUFFIXES = (".pem", ".key")

# A longer file is data or a model; reading it into memory to look for a key would cost every job.
_TEXT_LIMIT_BYTES = 1024 * 1024
_CHUNK_BYTES = 1024 * 1024
_LISTED = 10


class LeftOut(NamedTuple):
    """A path of the source that is not in the package; a folder's path ends with ``/``."""

    path: str
    reason: str


class CodePackage(NamedTuple):
    """One archive of the user's source, and what the other half needs to trust it."""

    path: Path
    digest: str
    size_bytes: int
    files: int
    left_out: tuple[LeftOut, ...]


class Entry(NamedTuple):
    """One file, folder or link of the source, as ``stat`` saw it."""

    name: str
    kind: str
    mode: int
    size_bytes: int = 0
    mtime_ns: int = 0
    inode: int = 0
    target: str = ""
    is_named: bool = False


class Tree(NamedTuple):
    """What goes into the package, in the order of the archive, and what does not."""

    source: Path
    entries: tuple[Entry, ...]
    left_out: tuple[LeftOut, ...]


def pack(source: Path, destination: Path, *, script: str | None, limit_bytes: int) -> CodePackage:
    """Write ``source`` as one uncompressed tar whose bytes depend on nothing but the tree.

    Raises:
        PackageError: The source cannot be read, is too big, changes meanwhile, holds links that
            leave it, or does not hold ``script``, when one is named.
    """
    tree = scan(source, besides=destination)
    script_file = _check_script(tree, script) if script is not None else ""
    _check_size(tree, limit_bytes)
    return _write(tree, destination, script_file)


def scan(source: Path, *, besides: Path | None = None) -> Tree:
    """Decide what of ``source`` goes into the package, reading only stat and ignore files.

    Args:
        source: The user's folder.
        besides: A path that is never part of the package, even when it lies in the source.

    Raises:
        PackageError: A folder cannot be read, or something cannot be carried in an archive.
    """
    _check_folder(source)
    root = os.path.realpath(source)
    skipped = "" if besides is None else os.path.relpath(os.path.realpath(besides), root)
    found: list[Entry | LeftOut | _Refused] = []
    folders: list[tuple[str, tuple[_Rules, ...]]] = [("", ())]
    while folders:
        prefix, rules = folders.pop()
        children = _children(source, root, prefix)
        rules += _rules_of(source, root, prefix, children)
        for child in children:
            if prefix + child.name == skipped:
                continue
            what = _look(source, root, prefix + child.name, child, rules)
            found.append(what)
            if isinstance(what, Entry) and what.kind == "folder":
                folders.append((what.name + "/", rules))
    _check_refused(source, found)
    # Bytes, not characters: the order must not depend on how a machine decodes names.
    entries = sorted(
        (what for what in found if isinstance(what, Entry)),
        key=lambda entry: os.fsencode(entry.name),
    )
    left_out = sorted(what for what in found if isinstance(what, LeftOut))
    return Tree(source, tuple(entries), tuple(left_out))


# ---- one entry ---------------------------------------------------------------------------------


class _Refused(NamedTuple):
    """What no archive can carry to another machine, and why."""

    name: str
    fault: str


def _check_folder(source: Path) -> None:
    with _reading(source, "."):
        if source.is_dir():
            return
        came_back = "not a folder" if source.exists() else "no such folder"
    raise PackageError(f"pack {_shown(source)}: {came_back}", hint="is --source right?")


def _children(source: Path, root: str, prefix: str) -> list[os.DirEntry[str]]:
    with _reading(source, prefix or "."), os.scandir(_join(root, prefix)) as children:
        return list(children)


def _look(
    source: Path, root: str, name: str, child: os.DirEntry[str], rules: tuple[_Rules, ...]
) -> Entry | LeftOut | _Refused:
    """Decide about one child from its name, its ``stat`` and the rules in force."""
    verdict = _judge(name, child, rules)
    if verdict.reason:
        return LeftOut(name + "/" * _is_folder(child), verdict.reason)
    with _reading(source, name):
        status = child.stat(follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            return _link(root, name)
    mode = status.st_mode & 0o777
    if stat.S_ISDIR(status.st_mode):
        return Entry(name, "folder", mode)
    if stat.S_ISREG(status.st_mode):
        seen = (status.st_size, status.st_mtime_ns, status.st_ino)
        return Entry(name, "file", mode, *seen, is_named=verdict.is_named)
    return _Refused(name, _SPECIAL.get(stat.S_IFMT(status.st_mode), "is no file"))


def _check_refused(source: Path, found: Iterable[Entry | LeftOut | _Refused]) -> None:
    refused = sorted(what for what in found if isinstance(what, _Refused))
    if not refused:
        return
    more = len(refused) - _LISTED
    listed = [f"{_shown(name)} {fault}" for name, fault in refused[:_LISTED]]
    raise PackageError(
        f"pack {_shown(source)}: {'; '.join(listed)}" + (f"; and {more} more" if more > 0 else ""),
        hint=f"leave it out with a line in {CLOUDJOBIGNORE}; "
        "data that lies elsewhere reaches a job with --input",
    )


_SPECIAL = {
    stat.S_IFSOCK: "is a socket",
    stat.S_IFIFO: "is a named pipe",
    stat.S_IFCHR: "is a device",
    stat.S_IFBLK: "is a device",
}


def _link(root: str, name: str) -> Entry | _Refused:
    """Return a link with its target relative to its folder, unless it leaves the source.

    It must stay inside by where it really leads, and by its letters as well: the other machine
    may lack the folders that lead it back.
    """
    path = _join(root, name)
    target = os.readlink(path)  # noqa: PTH115 (a Path would tidy the target up)
    real = os.path.realpath(path)
    if not _is_inside(real, root):
        return _Refused(name, f"is a link to {_shown(target)}, outside the source")
    letters = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    if posixpath.isabs(target) or letters.split("/", 1)[0] == "..":
        target = os.path.relpath(real, posixpath.dirname(path))
    return Entry(name, "link", 0o777, target=target)


def _is_inside(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _is_folder(child: os.DirEntry[str]) -> bool:
    return child.is_dir(follow_symlinks=False)


def _join(root: str, name: str) -> str:
    return posixpath.join(root, name) if name else root


# ---- what is left out --------------------------------------------------------------------------


class _Rules(NamedTuple):
    """The lines of one ignore file, in force below the folder ``prefix``."""

    prefix: str
    file_name: str
    lines: tuple[str, ...]
    spec: GitIgnoreSpec


class _Word(NamedTuple):
    """What one line of an ignore file says about a path."""

    ignores: bool
    rule: str
    is_named: bool


class _Verdict(NamedTuple):
    reason: str = ""
    is_named: bool = False


def _judge(name: str, child: os.DirEntry[str], rules: tuple[_Rules, ...]) -> _Verdict:
    """Decide about one path: ``.cloudjobignore`` first, then defaults, ``.gitignore``, secrets.

    ``!keep.py`` there takes back what ``.gitignore`` says. Only a line that spells a name out
    takes back a default or a secret: ``!*.py`` must not bring caches and keys along.
    """
    is_folder = _is_folder(child)
    word = _last_word(CLOUDJOBIGNORE, name, is_folder, rules)
    if word and (word.ignores or word.is_named):
        return _Verdict(word.rule, False) if word.ignores else _Verdict("", True)
    default = _default_reason(child)
    if default:
        return _Verdict(default)
    git_word = None if word else _last_word(GITIGNORE, name, is_folder, rules)
    if git_word and git_word.ignores:
        return _Verdict(git_word.rule)
    return _Verdict(_secret_name(child.name, is_folder))


def _last_word(kind: str, name: str, is_folder: bool, rules: tuple[_Rules, ...]) -> _Word | None:
    """Return what the deepest ignore file of this kind that mentions ``name`` says about it."""
    for rule in reversed(rules):
        if not rule.file_name.endswith(kind):
            continue
        relative = name[len(rule.prefix) :]
        result = rule.spec.check_file(relative + "/" * is_folder)
        if result.include is None or result.index is None:
            continue
        line = rule.lines[result.index]
        spelled = line[1:].strip().strip("/")
        is_named = line.startswith("!") and spelled in (relative, posixpath.basename(relative))
        return _Word(bool(result.include), f"{_shown(rule.file_name)}: {line}", is_named)
    return None


def _default_reason(child: os.DirEntry[str]) -> str:
    if child.name in _DEFAULT_NAMES:
        return f"left out by default: {child.name}"
    if child.name.endswith(".pyc"):
        return "left out by default: *.pyc"
    # Through a link too: a virtual environment is of no use on another machine.
    may_lead_to_one = child.is_symlink() or _is_folder(child)
    marker = posixpath.join(child.path, "pyvenv.cfg")
    if may_lead_to_one and os.path.isfile(marker):  # noqa: PTH113 (a Path raises where it may not look)
        return "left out by default: a virtual environment"
    return ""


def _rules_of(
    source: Path, root: str, prefix: str, children: Iterable[os.DirEntry[str]]
) -> tuple[_Rules, ...]:
    """Read the ignore files that lie directly in one folder."""
    names = sorted(
        child.name
        for child in children
        # A link is no ignore file, as in git.
        if child.name in (GITIGNORE, CLOUDJOBIGNORE) and child.is_file(follow_symlinks=False)
    )
    return tuple(_read_rules(source, root, prefix, name) for name in names)


def _read_rules(source: Path, root: str, prefix: str, name: str) -> _Rules:
    from pathspec import GitIgnoreSpec  # 40 ms, and most sources have no such file

    with _reading(source, prefix + name):
        data = Path(root, prefix, name).read_bytes()
    # As git reads it: a byte order mark and carriage returns mean nothing.
    text = os.fsdecode(data.removeprefix(b"\xef\xbb\xbf"))
    lines = tuple(line for line in text.replace("\r\n", "\n").split("\n") if _is_rule(line))
    return _Rules(prefix, prefix + name, lines, GitIgnoreSpec.from_lines(lines))


def _is_rule(line: str) -> bool:
    """Say whether pathspec can read a line; git passes over the ones that mean nothing."""
    from pathspec import GitIgnoreSpec

    try:
        return bool(line.strip()) and len(GitIgnoreSpec.from_lines([line])) == 1
    except ValueError:
        return False


# ---- secrets -----------------------------------------------------------------------------------

# Code that handles keys quotes the header too; a key has its body on the next line.
_PRIVATE_KEY = re.compile(
    rb"""(?m)^[^\n]{0,80}?-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----\r?\n"""
    rb"""(?:[ \t]*[\w-]+: [^\n]*\n)*\s*[A-Za-z0-9+/=]+\s*$"""
    rb"""|-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"""
    rb"""(?:\\[rn]|[\s"'])*[A-Za-z0-9+/]{40}"""
)
_KUBERNETES_KEY = re.compile(rb"(?m)^[ \t]*client-key-data:[ \t]*[\"']?[A-Za-z0-9+/=]{20}")
_KEY_HEADER = re.compile(rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----")
_AWS_KEY_ID = re.compile(rb"(?<![A-Za-z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])")
_ASSIGNED = rb"""["']?\s*(?:=>|:=|[:=])\s*["']?"""
_SECRET_KEY = re.compile(
    rb"(?i)(?:secret[_-]?(?:access[_-]?)?key|(?<![a-z0-9])sk)"
    + _ASSIGNED
    + rb"(?=[^\n]{0,39}[0-9])(?=[^\n]{0,39}[a-z])[a-z0-9+/]{40}(?![a-z0-9+/=])"
)
_ACCESS_KEY = re.compile(
    rb"(?:(?i:access[_-]?key(?:[_-]?id)?)|(?<![A-Za-z0-9])(?i:ak))"
    + _ASSIGNED
    + rb"(?=[A-Z]{0,19}[0-9])(?=[0-9]{0,19}[A-Z])[A-Z0-9]{20}(?![A-Za-z0-9+/=_(.])"
)
# The values are rare, the names are everywhere: looking for a value first makes the search cheap.
_VALUE = re.compile(rb"""[:=>]\s*["']?(?:[A-Za-z0-9+/]{40}|[A-Z0-9]{20})(?![A-Za-z0-9+/])""")


def _secret_name(name: str, is_folder: bool) -> str:
    if is_folder:
        return f"may hold secrets: {name}/" if name in _SECRET_FOLDERS else ""
    return "may hold secrets: its name" if _SECRET_FILES.fullmatch(name) else ""


def _secret_content(name: str, data: bytes) -> str:
    """Return why the text of a file looks like a secret, or ""."""
    if b"\0" in data:
        return ""
    if b"PRIVATE KEY" in data:
        pattern = _KEY_HEADER if name.endswith(_KEY_FILE_SUFFIXES) else _PRIVATE_KEY
        if pattern.search(data):
            return "may hold secrets: a private key"
    if b"client-key-data:" in data and _KUBERNETES_KEY.search(data):
        return "may hold secrets: a key of a Kubernetes user"
    if (b"AKIA" in data or b"ASIA" in data) and _AWS_KEY_ID.search(data):
        return "may hold secrets: an AWS access key"
    if _VALUE.search(data) and (_SECRET_KEY.search(data) or _ACCESS_KEY.search(data)):
        return "may hold secrets: an access key"
    return ""


# ---- what is checked before anything is written --------------------------------------------------


def _check_script(tree: Tree, script: str) -> str:
    """Return the name of the script's file; refuse one that the job would not find."""
    doing = f"pack {_shown(tree.source)}: script {_shown(script)}"
    name = posixpath.normpath(script)
    if posixpath.isabs(script) or name.split("/", 1)[0] == "..":
        raise PackageError(f"{doing}: outside the source", hint=_RELATIVE)
    with _reading(tree.source, name):
        path = tree.source / name
        real = os.path.relpath(os.path.realpath(path), os.path.realpath(tree.source))
        for out, reason in tree.left_out:
            if _covers(out, name) or _covers(out, real):
                why = reason if out in (name, real) else f"in {_shown(out)}, {reason}"
                raise PackageError(f"{doing}: {why}", hint=_keep(out))
        if path.is_dir():
            raise PackageError(f"{doing}: a folder", hint="name a file in it")
        if not path.is_file():
            raise PackageError(f"{doing}: no such file", hint=_nearest(tree, name))
        path.open("rb").close()
    return real


_RELATIVE = "the script's path is relative to --source"


def _covers(left_out: str, name: str) -> bool:
    return left_out == name or (left_out.endswith("/") and (name + "/").startswith(left_out))


def _keep(left_out: str) -> str:
    return f"a line !{_shown(left_out)} in {CLOUDJOBIGNORE} keeps it"


def _nearest(tree: Tree, name: str) -> str:
    names = [entry.name for entry in tree.entries if entry.kind != "folder"]
    base = posixpath.basename(name)
    by_base = {posixpath.basename(other): other for other in reversed(names)}
    near = [by_base[base]] if base in by_base else difflib.get_close_matches(name, names, 1)
    near = near or [by_base[word] for word in difflib.get_close_matches(base, by_base, 1)]
    return f"did you mean {_shown(near[0])}?" if near else _RELATIVE


def _check_size(tree: Tree, limit_bytes: int) -> None:
    """Refuse a source over the limit from what ``stat`` said, before a byte of it is read."""
    total = sum(entry.size_bytes for entry in tree.entries)
    if total <= limit_bytes:
        return
    sizes: Counter[str] = Counter()
    for entry in tree.entries:
        if entry.kind == "file":
            sizes[entry.name] += entry.size_bytes
            top, slash, _ = entry.name.partition("/")
            if slash:
                sizes[top + "/"] += entry.size_bytes
    largest = heapq.nsmallest(_LISTED, sizes.items(), key=lambda item: (-item[1], item[0]))
    listed = ", ".join(f"{_shown(path)} {size_text(size)}" for path, size in largest)
    raise PackageError(
        f"pack {_shown(tree.source)}: {size_text(total)} is over the limit of "
        f"{size_text(limit_bytes)}; largest: {listed}",
        hint=f"leave out what the job does not need with lines in {CLOUDJOBIGNORE}; "
        "data reaches a job with --input",
    )


# ---- writing -----------------------------------------------------------------------------------


class _HashedFile:
    """A file that knows the digest of what was written to it, so nothing is read twice."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self.size_bytes = 0

    @property
    def digest(self) -> str:
        return f"sha256:{self._sha256.hexdigest()}"

    def write(self, data: bytes) -> int:
        self._sha256.update(data)
        self.size_bytes += len(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self.size_bytes


def _write(tree: Tree, destination: Path, script: str) -> CodePackage:
    left_out = list(tree.left_out)
    files = 0
    with _writing(destination) as file:
        hashed = _HashedFile(file)
        with tarfile.TarFile(
            fileobj=cast("IO[bytes]", hashed),
            mode="w",
            format=tarfile.PAX_FORMAT,
            encoding="utf-8",
            errors="surrogateescape",
            copybufsize=_CHUNK_BYTES,
        ) as archive:
            for entry in tree.entries:
                secret = _add(archive, tree.source, entry)
                if secret and entry.name == script:
                    raise PackageError(
                        f"pack {_shown(tree.source)}: script {_shown(script)}: {secret}",
                        hint="give the job its keys with --secret",
                    )
                if secret:
                    left_out.append(LeftOut(entry.name, secret))
                else:
                    files += entry.kind == "file"
    return CodePackage(
        destination, hashed.digest, hashed.size_bytes, files, tuple(sorted(left_out))
    )


def _add(archive: tarfile.TarFile, source: Path, entry: Entry) -> str:
    """Add one entry to the archive; return why it was left out instead, or ""."""
    info = tarfile.TarInfo(_tar_text(entry.name))
    info.mode = entry.mode
    if entry.kind == "folder":
        info.type = tarfile.DIRTYPE
        archive.addfile(info)
        return ""
    if entry.kind == "link":
        info.type = tarfile.SYMTYPE
        info.linkname = _tar_text(entry.target)
        archive.addfile(info)
        return ""
    info.size = entry.size_bytes
    with _SourceFile(source, entry) as file:
        if entry.size_bytes > _TEXT_LIMIT_BYTES:
            archive.addfile(info, cast("IO[bytes]", file))
            file.check()
            return ""
        data = file.read(entry.size_bytes)
        file.check()
    secret = "" if entry.is_named else _secret_content(entry.name, data)
    if not secret:
        archive.addfile(info, io.BytesIO(data))
    return secret


def _tar_text(name: str) -> str:
    """Return a name such that the archive holds its bytes, whatever the locale here is."""
    return os.fsencode(name).decode("utf-8", "surrogateescape")


class _SourceFile:
    """A file of the source, open for one reading, that must be what ``scan`` saw all along."""

    def __init__(self, source: Path, entry: Entry) -> None:
        self._source = source
        self._entry = entry

    def __enter__(self) -> _SourceFile:
        # What was a file may be a link or a pipe by now: follow nothing, wait for nothing.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with _reading(self._source, self._entry.name):
            self._fd = os.open(_join(os.fspath(self._source), self._entry.name), flags)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, size_bytes: int) -> bytes:
        """Return exactly so many bytes, or as many as one call gives of a longer stretch."""
        with _reading(self._source, self._entry.name):
            data = os.read(self._fd, size_bytes)
        if len(data) < size_bytes:
            raise _changed(self._source, self._entry.name)
        return data

    def check(self) -> None:
        """Raise unless the file is still the one that ``scan`` saw."""
        entry = self._entry
        with _reading(self._source, entry.name):
            status = os.fstat(self._fd)
        now = (status.st_size, status.st_mtime_ns, status.st_ino)
        if now != (entry.size_bytes, entry.mtime_ns, entry.inode):
            raise _changed(self._source, entry.name)


# ---- words -------------------------------------------------------------------------------------


def size_text(size_bytes: int) -> str:
    """Return a size for people: ``1.5 GiB``."""
    size = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size_bytes} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _changed(source: Path, name: str) -> PackageError:
    return PackageError(
        f"pack {_shown(source)}: {_shown(name)}: changed while it was read",
        hint=f"is something writing to it? A line in {CLOUDJOBIGNORE} leaves it out",
    )


@contextmanager
def _reading(source: Path, name: str) -> Iterator[None]:
    """Translate what the file system says about one path of the source."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.ENOTDIR):
            raise _changed(source, name) from error
        raise PackageError(
            f"pack {_shown(source)}: read {_shown(name)}: {_came_back(error)}",
            hint=f"make it readable, or leave it out with a line in {CLOUDJOBIGNORE}",
        ) from error


@contextmanager
def _writing(destination: Path) -> Iterator[IO[bytes]]:
    """Open the archive and translate what the file system says; leave no half of one behind."""
    try:
        with destination.open("wb") as file:
            try:
                yield file
                file.flush()
            except BaseException:
                # A device that somebody named as destination is not ours to remove.
                if destination.is_file():
                    destination.unlink()
                raise
    except OSError as error:
        raise PackageError(
            f"write package: to {_shown(destination)}: {_came_back(error)}",
            hint="TMPDIR names another folder for it",
        ) from error


def _came_back(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _shown(path: str | Path) -> str:
    """Return a path as one printable line, whatever bytes its name has."""
    text = os.fspath(path)
    return text if text.isprintable() else ascii(text)
