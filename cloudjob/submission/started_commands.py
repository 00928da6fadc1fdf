"""The commands that a Python script starts with ``os`` and ``subprocess``, read from its source."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from cloudjob.submission import scripts

_FUNCTIONS = {
    "os": ("system", "popen", "execvp", "execv"),
    "subprocess": ("run", "call", "check_call", "check_output", "Popen", "getstatusoutput"),
}
# These raise an exception when the command has failed, or end the script.
_CHECKED = ("check_call", "check_output", "execvp", "execv")
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
    values = _values(nodes)
    # Calls that are whole statements: their results are ignored.
    bare = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    found = []
    for node in nodes:
        function = _function(node) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and function and node.args:
            at = 1 if function.startswith("exec") and len(node.args) > 1 else 0
            is_checked = function in _CHECKED or any(
                keyword.arg == "check" for keyword in node.keywords
            )
            text = _Reader(values).text(node.args[at])
            found.append(StartedCommand(text, node.lineno, id(node) in bare and not is_checked))
    return sorted(found, key=lambda started: started.line)


def _function(call: ast.Call) -> str:
    """Return the name of the function that starts a command; empty for any other."""
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        names = _FUNCTIONS.get(function.value.id, ())
        return function.attr if function.attr in names else ""
    if isinstance(function, ast.Name):
        names = (*_FUNCTIONS["os"][:1], *_FUNCTIONS["subprocess"][2:])
        return function.id if function.id in names else ""
    return ""


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
