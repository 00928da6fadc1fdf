"""The commands that a Python script starts with ``os`` and ``subprocess``, read from its source."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from cloudjob.submission import known_launchers, scripts

_FUNCTIONS = frozenset(
    (
        *("os.system", "os.popen", "os.execvp", "os.execv", "os.execvpe", "os.execve", "pty.spawn"),
        *("os.spawnv", "os.spawnvp", "os.spawnve", "os.spawnvpe", "os.posix_spawn"),
        *("os.posix_spawnp", "subprocess.run", "subprocess.call", "subprocess.check_call"),
        *("subprocess.check_output", "subprocess.Popen", "subprocess.getoutput"),
        *("subprocess.getstatusoutput", "asyncio.create_subprocess_shell", "runpy.run_module"),
    )
)
# Their arguments are the words of the command.
_OF_WORDS = frozenset(("os.execl", "os.execlp", "os.execle", "os.execlpe", "os.spawnl",
                       "os.spawnlp", "asyncio.create_subprocess_exec"))  # fmt: skip
# A script that reads its rank can also be started by a launcher, and then starts none.
_RANKS = (b"LOCAL_RANK", b"'RANK'", b'"RANK"')
# These raise an exception when the command has failed, or end the script.
_CHECKED = ("check_call", "check_output", "run_module")
# The placeholder for a text that is known only when the script runs.
_UNKNOWN = "X"
# For one command: the depth of nested variables, and the number of expressions, that are read.
_DEPTH, _STEPS = 12, 5000


class StartedCommand(NamedTuple):
    """A command that a script starts.

    Args:
        text: A shell command, with ``X`` or a format placeholder for unknown parts; several lines
            are alternatives.
        is_failure_ignored: Whether the script ignores its exit code.
    """

    text: str
    line: int
    is_failure_ignored: bool


def read(source: bytes) -> list[StartedCommand]:
    """Return the commands that a Python script starts; none if it cannot be parsed."""
    nodes = [*ast.walk(scripts.parse(source))]
    values, names = _values(nodes), _imported(nodes)
    is_started = any(mark in source for mark in _RANKS)
    # Calls that are whole statements: their results are ignored.
    bare = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    found = []
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        function = _dotted(node.func, names)
        text = _Reader(values).command(function, node.args)
        if function in known_launchers.FUNCTIONS and not is_started:
            found.append(StartedCommand(function, node.lineno, is_failure_ignored=False))
        elif text:
            name = function.rpartition(".")[2]
            is_checked = name in _CHECKED or name.startswith("exec")
            is_checked = is_checked or any(keyword.arg == "check" for keyword in node.keywords)
            found.append(StartedCommand(text, node.lineno, id(node) in bare and not is_checked))
    return sorted(found, key=lambda started: started.line)


def _imported(nodes: list[ast.AST]) -> dict[str, str]:
    """Return what each imported name stands for, such as ``torch.multiprocessing`` for ``mp``."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    found[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def _dotted(function: ast.expr, names: Mapping[str, str]) -> str:
    """Return the full name of a function, such as ``subprocess.run``; empty for any other."""
    parts: list[str] = []
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        return ""
    return ".".join([names.get(function.id, function.id), *reversed(parts)])


def _values(nodes: list[ast.AST]) -> Mapping[str, list[tuple[str, ast.expr]]]:
    """Return the values that each variable is set to or extended by, in the order of lines."""
    found: dict[str, list[tuple[int, str, ast.expr]]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append((node.lineno, "\n", node.value))
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            separator = " " if isinstance(node.value, (ast.List, ast.Tuple)) else ""
            found.setdefault(node.target.id, []).append((node.lineno, separator, node.value))
        elif added := _added(node):
            found.setdefault(added[0], []).append((added[1].lineno, " ", added[1]))
    return {
        name: [
            (separator, value) for _, separator, value in sorted(items, key=lambda item: item[0])
        ]
        for name, items in found.items()
    }


def _added(node: ast.AST) -> tuple[str, ast.expr] | None:
    """Return the list and the value of ``argv.append(value)`` or ``argv.extend(values)``."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
        return None
    if node.func.attr not in ("append", "extend") or not isinstance(node.func.value, ast.Name):
        return None
    return node.func.value.id, node.args[0]


class _Reader:
    """Reads the text of expressions as far as the source shows it."""

    def __init__(self, values: Mapping[str, list[tuple[str, ast.expr]]]) -> None:
        self._values = values
        self._open: list[str] = []
        self._steps = _STEPS

    def command(self, function: str, arguments: list[ast.expr]) -> str:
        """Return the command that a call starts; empty if it starts none."""
        if not arguments:
            return ""
        if function in _OF_WORDS:
            return " ".join(self._quoted(argument) for argument in arguments)
        if function == "runpy.run_module":
            return f"python -m {self.text(arguments[0])}"
        if function not in _FUNCTIONS:
            return ""
        # The program, and then a list with its arguments.
        has_program = function.startswith(("os.exec", "os.spawn", "os.posix_spawn"))
        lists = [each for each in arguments if not isinstance(each, ast.Constant)]
        return self.text(lists[-1] if has_program and lists else arguments[0])

    def text(self, node: ast.expr) -> str:
        """Return the text of an expression."""
        self._steps -= 1
        if self._steps < 0 or len(self._open) > _DEPTH:
            return _UNKNOWN
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.Attribute) and node.attr == "executable":
            return "python"
        if isinstance(node, ast.Name):
            return self._of_name(node.id)
        return "".join(self._parts(node))

    def _of_name(self, name: str) -> str:
        if name in self._open or name not in self._values:
            return _UNKNOWN
        self._open.append(name)
        text = "".join(separator + self.text(value) for separator, value in self._values[name])
        self._open.pop()
        return text.strip("\n")

    def _parts(self, node: ast.expr) -> Iterator[str]:
        if isinstance(node, ast.JoinedStr):
            for item in node.values:
                yield self.text(item.value if isinstance(item, ast.FormattedValue) else item)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            separator = " " if isinstance(node.right, (ast.List, ast.Tuple)) else ""
            yield self.text(node.left) + separator + self.text(node.right)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            yield self.text(node.left)
        elif isinstance(node, (ast.List, ast.Tuple)):
            yield " ".join(self._quoted(item) for item in node.elts)
        elif isinstance(node, ast.Call):
            yield self._of_call(node)
        else:
            yield _UNKNOWN

    def _quoted(self, node: ast.expr) -> str:
        if isinstance(node, ast.Starred):
            return self.text(node.value)
        return shlex.quote(self.text(node))

    def _of_call(self, node: ast.Call) -> str:
        """Return the text of ``"…".format(…)``, ``" ".join(…)``, ``str(…)`` or ``split(…)``."""
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == "format":
            return self.text(function.value)
        name = function.attr if isinstance(function, ast.Attribute) else _name_of(function)
        if node.args and name in ("join", "str", "split", "list"):
            return self.text(node.args[0])
        return _UNKNOWN


def _name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""
