"""Reads the files of scripts: what they import, and which commands they start.

Commands are found as far as a script's text shows them; nothing is run or expanded.
"""

from __future__ import annotations

import ast
import re
import shlex
import stat
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

# A script written by hand is a few thousand lines; a larger file holds data.
_MAX_BYTES = 1_000_000
# Python 3.11 raises SystemError if two threads parse at the same time (CPython issue 106905).
_PARSING = threading.Lock()
# How certain it is that a statement runs: always; inside a function or condition; inside a ``try``
# that handles its failure.
CERTAIN, LAZY, OPTIONAL = range(3)
_LAZY_NODES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.If)
# The files that a script uses are followed up to this number.
_MAX_FILES = 200
# Files that a shell script names; the second form is a module of Python.
_STARTED = r"[\w./-]+\.(?:py|sh)\b|(?<=-m )[\w.]+"
# Installed packages, which take precedence over a folder of that name without __init__.py.
_INSTALLED = frozenset(("horovod", "mindspore", "mpi4py", "torch"))
SHELLS = frozenset(("bash", "sh", "dash", "source", "."))
_SHEBANG = rb"#!.*\b(ba|da|z)?sh\b"
# A shell script written by hand is shorter; what follows is data.
_MAX_LETTERS = 100_000
_OPERATORS = "();<>|&\n"
# Words that may precede a command.
_PREFIXES = frozenset(
    (
        *("!", "{", "time", "exec", "nohup", "env", "sudo", "nice", "command", "eval"),
        *("then", "do", "else", "elif", "if", "while", "until"),
    )
)
_ASSIGNMENT = r"[A-Za-z_]\w*\+?="
_CONTINUED = r"(?m)^.*(?:\\\n.*)+"
_DOCUMENT = r"(?<!<)<<-?\s*['\"]?([A-Za-z_]\w*)"
# A comment, or what may contain ``#`` without being one.
_COMMENT = r"""(?s)'[^']*'|"(?:\\.|[^"\\])*"|\\.|(?<![^\s;&|()])(#)[^\n]*"""
_STARTS = (
    r"os\.(?:system|popen|exec\w+|spawn\w+|posix_spawnp?)|pty\.spawn|runpy\.run_module"
    r"|subprocess\.(?:run|call|check_call|check_output|Popen|getoutput|getstatusoutput)"
    r"|asyncio\.create_subprocess_(?:exec|shell)"
)
# These raise an exception when the command has failed, or end the script.
_CHECKED = r".*\.(?:check_\w+|run_module|exec\w+)"
# A script that reads its rank can also be started by a launcher, and then starts none.
_RANKS = (b"LOCAL_RANK", b"'RANK'", b'"RANK"')
# The placeholder for a text that is known only when the script runs.
_UNKNOWN = "X"
# The letters that are kept of the text of a variable.
_VALUE_LETTERS = 10_000


def read(path: Path) -> bytes:
    """Return the content of a script; empty if it cannot be read or is too large for a script.

    Only a regular file is read: a named pipe would never end.
    """
    try:
        status = path.stat()
        is_script = stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_BYTES
        return path.read_bytes() if is_script else b""
    except OSError:
        # For example, it belongs to another user.
        return b""


def parse(source: bytes) -> ast.Module:
    """Return the syntax tree of a Python file; an empty one if it cannot be parsed."""
    try:
        with _PARSING, warnings.catch_warnings():
            # Warnings about the user's code belong in the log of the job.
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


class ScriptFile:
    """A file of a source; it is read and parsed when that is first needed, and only once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def data(self) -> bytes:
        """The content; see ``read``."""
        return read(self.path)

    @cached_property
    def nodes(self) -> list[tuple[ast.AST, int]]:
        """The nodes of its syntax tree in their order, each with how certain it is to run."""
        return [*_walk(parse(self.data))]

    @cached_property
    def imports(self) -> Mapping[str, int]:
        """Each dotted name that it imports (a relative one with its dots), and how certainly."""
        certainties: dict[str, int] = {}
        for name, _, _, certainty in self._imported:
            certainties[name] = min(certainty, certainties.get(name, certainty))
        # ``import torch`` alone also gives access to torch.distributed.
        for node, certainty in self.nodes:
            if isinstance(node, ast.Attribute):
                name, at_most = self.full_name(node)
                if name:
                    certainties.setdefault(name, max(certainty, at_most))
        return certainties

    def full_name(self, node: ast.expr) -> tuple[str, int]:
        """Return the dotted name of something imported, and how certainly; empty for the rest."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._bound:
            return "", CERTAIN
        name, certainty = self._bound[node.id]
        return ".".join([name, *reversed(parts)]), certainty

    @cached_property
    def _imported(self) -> list[tuple[str, str, str, int]]:
        return [(*names, certainty) for node, certainty in self.nodes for names in _names_of(node)]

    @cached_property
    def _bound(self) -> Mapping[str, tuple[str, int]]:
        return {bound: (target, how) for _, bound, target, how in reversed(self._imported)}


class Imports(NamedTuple):
    """What a file imports.

    Args:
        local: The files of the user's own modules.
        others: The dotted names of all other modules, and how certainly each is imported.
    """

    local: tuple[Path, ...]
    others: Mapping[str, int]


class ScriptFiles(dict[Path, ScriptFile]):
    """The files of a source, by path."""

    def __missing__(self, path: Path) -> ScriptFile:
        """Return a file that was not asked for before."""
        self[path] = ScriptFile(path)
        return self[path]

    def imports(self, path: Path, folder: Path) -> Imports:
        """Return what a file imports.

        Args:
            folder: The script's folder, where Python looks first.
        """
        local: list[Path] = []
        others: dict[str, int] = {}
        for name, certainty in sorted(self[path].imports.items()):
            files = own_files(folder, path, name)
            if files is None:
                others[name] = certainty
            else:
                local += files
        return Imports(tuple(local), others)

    def levels(self, source: Path, script: str) -> Iterator[list[Path]]:
        """Yield the script's file, then those of the source that it uses, nearest first."""
        start = source / script
        level, seen = [start], {start}
        while level:
            yield level
            used = chain.from_iterable(self._used(source, start.parent, path) for path in level)
            level = [path for path in dict.fromkeys(used) if path not in seen]
            del level[max(0, _MAX_FILES - len(seen)) :]
            seen.update(level)

    def _used(self, source: Path, folder: Path, path: Path) -> Iterable[Path]:
        """Return the modules that a Python file imports, or the files that another one names."""
        if path.suffix == ".py":
            return self.imports(path, folder).local
        names = re.findall(_STARTED, self[path].data.decode("utf-8", "replace"))
        modules = (name for name in names if not name.endswith((".py", ".sh")))
        names += [f"{name.replace('.', '/')}.py" for name in modules]
        inner = (name for name in names if not name.startswith("/") and ".." not in name)
        return [source / name for name in inner]


def own_files(folder: Path, importer: Path, name: str) -> list[Path] | None:
    """Return the files of a module in the source folder; None for a module from elsewhere.

    Args:
        folder: The script's folder, where Python looks first.
    """
    dots = len(name) - len(name.lstrip("."))
    path = importer.parents[dots - 1] if 0 < dots <= len(importer.parents) else folder
    if not path.is_relative_to(folder):
        return []
    files = [path / "__init__.py"] if dots else []
    for count, part in enumerate(filter(None, name.lstrip(".").split("."))):
        path = path / part
        is_package = part not in _INSTALLED or (path / "__init__.py").is_file()
        if path.is_dir() and (count or dots or is_package):
            files.append(path / "__init__.py")
        elif path.with_name(f"{part}.py").is_file():
            files.append(path.with_name(f"{part}.py"))
            break
        elif count or dots:
            # The rest of the name is something inside the module.
            break
        else:
            return None
    return [file for file in files if file.is_file()]


def _names_of(node: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Yield for each import its full name, the name it binds, and the target of that name."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            yield (alias.name, *((alias.asname, alias.name) if alias.asname else (top, top)))
    elif isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        separator = "" if base.endswith(".") else "."
        for alias in node.names:
            name = base if alias.name == "*" else base + separator + alias.name
            yield name, alias.asname or alias.name, name


def _walk(tree: ast.AST) -> Iterator[tuple[ast.AST, int]]:
    """Yield each node and how certain it is to run; iterative, so deep trees are no problem."""
    waiting: list[tuple[ast.AST, int]] = [(tree, CERTAIN)]
    while waiting:
        node, certainty = waiting.pop()
        yield node, certainty
        children: Iterable[ast.AST] = ast.iter_child_nodes(node)
        tested = _names_in(node.test) if isinstance(node, ast.If) else set()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in tested:
            children = node.orelse
        elif isinstance(node, ast.Try) and any(map(_catches_imports, node.handlers)):
            certainty = OPTIONAL
        # The body of ``if __name__ == "__main__"`` always runs in a script.
        elif isinstance(node, _LAZY_NODES) and "__name__" not in tested:
            certainty = max(certainty, LAZY)
        waiting += [(child, certainty) for child in children][::-1]


def _names_in(tree: ast.AST) -> set[str]:
    return {getattr(node, "id", "") or getattr(node, "attr", "") for node in ast.walk(tree)}


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    kinds = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
    return handler.type is None or bool(_names_in(handler.type) & kinds)


# -- commands --------------------------------------------------------------------------------------


class Command(NamedTuple):
    """A command of a script.

    Args:
        argv: Its words; the full name of a function that a Python script calls is a single one.
        is_repeated: Whether it is in a loop.
        is_background: Whether the script continues while it runs (``&``).
        is_failure_ignored: Whether the Python script that starts it ignores its exit code.
    """

    argv: tuple[str, ...]
    line: int
    is_repeated: bool = False
    is_background: bool = False
    is_failure_ignored: bool = False


def commands_of(file: ScriptFile) -> list[Command]:
    """Return the commands of a script; none if it is neither for Python nor for a shell."""
    if file.path.suffix == ".py":
        return list(_of_python(file))
    if file.path.suffix == ".sh" or re.match(_SHEBANG, file.data):
        return of_shell(file.data.decode("utf-8", "replace"))
    return []


# -- shell ----------------------------------------------------------------------------------------


def of_shell(text: str) -> list[Command]:
    """Return the commands in the text of a shell script."""
    commands: list[Command] = []
    depth = 0
    for line, words, operator in _simple_commands(text[:_MAX_LETTERS]):
        if words:
            depth = max(0, depth + (words[0] == "do") - (words[0] == "done"))
            commands += _unwrapped(words, line, is_repeated=depth > 0)
        if commands and operator.startswith("&") and not operator.startswith("&&"):
            commands[-1] = commands[-1]._replace(is_background=True)
    return commands


def _unwrapped(words: list[str], line: int, *, is_repeated: bool) -> list[Command]:
    """Return a command without what precedes it; for ``bash -c TEXT``, those of the text."""
    at = 0
    while at < len(words) and (words[at] in _PREFIXES or re.match(_ASSIGNMENT, words[at])):
        at += 1
    argv = tuple(words[at:])
    if not argv:
        return []
    inner: list[Command] = []
    if argv[0].rpartition("/")[2] in SHELLS:
        texts = [text for option, text in pairwise(argv[1:]) if re.fullmatch(r"-\w*c", option)]
        inner = of_shell(texts[0]) if texts else []
    return [each._replace(line=line) for each in inner] or [Command(argv, line, is_repeated)]


def _simple_commands(text: str) -> Iterator[tuple[int, list[str], str]]:
    """Yield ``(line, words, operator)``: a command without redirections, and what follows it."""
    line = start = 1
    words: list[str] = []
    is_target = False
    for token in (*_tokens(text), "\n"):
        if not token or token.strip(_OPERATORS):
            start = start if words else line
            words += [] if is_target else [token]
            is_target = False
        elif "<" in token or ">" in token:
            is_target = True
        else:
            yield start, words, token
            words, is_target = [], False
        line += token.count("\n")


def _tokens(text: str) -> Iterator[str]:
    """Yield the words and operators of a shell script, up to a quote that is never closed."""
    text = re.sub(_CONTINUED, _joined, text)
    text = re.sub(_COMMENT, lambda match: "" if match[1] else match[0], text)
    lexer = shlex.shlex(_without_documents(text), posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        yield from lexer
    except ValueError:
        yield lexer.token


def _joined(lines: re.Match[str]) -> str:
    """Return a continued line as one line, followed by as many empty ones as it has parts."""
    count = lines[0].count("\\\n")
    return lines[0].replace("\\\n", " ") + "\n" * count


def _without_documents(text: str) -> str:
    """Return a shell script whose here-documents are empty lines."""
    lines: list[str] = []
    end = ""
    for line in text.split("\n"):
        document = re.search(_DOCUMENT, line)
        lines.append("" if end else line)
        if end:
            end = "" if line.strip() == end else end
        elif document:
            end = document[1]
    return "\n".join(lines)


# -- Python ---------------------------------------------------------------------------------------


def _of_python(file: ScriptFile) -> Iterator[Command]:
    """Yield the commands and the imported functions that a Python script calls."""
    nodes = [node for node, _ in file.nodes]
    is_rank = any(mark in file.data for mark in _RANKS)
    # Calls that are whole statements: their results are ignored.
    bare = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = _Texts(nodes)
    for call in nodes:
        function = file.full_name(call.func)[0] if isinstance(call, ast.Call) else ""
        if not isinstance(call, ast.Call) or not function:
            continue
        if re.fullmatch(_STARTS, function):
            is_checked = re.match(_CHECKED, function) or any(
                key.arg == "check" for key in call.keywords
            )
            is_failure_ignored = id(call) in bare and not is_checked
            for command in of_shell(texts.of_call(function, call.args)):
                yield command._replace(line=call.lineno, is_failure_ignored=is_failure_ignored)
        elif not is_rank:
            yield Command((function,), call.lineno)


class _Texts:
    """The texts of expressions as far as the source shows them."""

    def __init__(self, nodes: list[ast.AST]) -> None:
        # What each variable is set to or extended by, with what separates it from the text before.
        self._values: dict[str, list[tuple[str, ast.expr]]] = {}
        self._texts: dict[str, str] = {}
        for node in nodes:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._values.setdefault(name, []).append(("\n", value))
                case ast.AugAssign(target=ast.Name(id=name), value=value):
                    self._values.setdefault(name, []).append((_separator(value), value))
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=name), attr="append" | "extend"),
                    args=[value],
                ):
                    self._values.setdefault(name, []).append((" ", value))

    def of_call(self, function: str, arguments: list[ast.expr]) -> str:
        """Return the command of a call as a text for a shell."""
        # The first argument of a spawn is the mode.
        arguments = arguments[1:] if function.startswith("os.spawn") else arguments
        try:
            text = " ".join(map(self._of, arguments))
        except RecursionError:
            return ""
        return f"python -m {text}" if function == "runpy.run_module" else text

    def _of(self, node: ast.AST) -> str:
        match node:
            case ast.Constant(value=value):
                return str(value)
            case ast.Attribute(attr="executable"):
                return "python"
            case ast.Name(id=name):
                return self._of_name(name)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._known(left) + _separator(right) + self._known(right)
            case ast.JoinedStr(values=items):
                return "".join(map(self._known, items))
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return " ".join(map(self._word, items))
        # Of a format, a condition or a call, each part that is a text may be the command.
        texts = (self._of(child) for child in ast.iter_child_nodes(node))
        return "\n".join(text for text in texts if text)

    def _known(self, node: ast.AST) -> str:
        return self._of(node) or _UNKNOWN

    def _word(self, node: ast.AST) -> str:
        return (
            self._of(node.value)
            if isinstance(node, ast.Starred)
            else shlex.quote(self._known(node))
        )

    def _of_name(self, name: str) -> str:
        if name not in self._texts:
            # A variable may be set to an expression of itself.
            self._texts[name] = ""
            values = self._values.get(name, ())
            text = "".join(separator + self._of(value) for separator, value in values)
            self._texts[name] = text.strip("\n")[:_VALUE_LETTERS]
        return self._texts[name]


def _separator(added: ast.AST) -> str:
    return " " if isinstance(added, (ast.List, ast.Tuple)) else ""
