"""The commands that a Python script starts with ``os`` and ``subprocess``, read from its source."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Mapping

from cloudjob.submission import known_launchers
from cloudjob.submission.scripts import File
from cloudjob.submission.shell_commands import Command, commands

_STARTS = re.compile(
    r"os\.(?:system|popen|exec\w+|spawn\w+|posix_spawnp?)|pty\.spawn|runpy\.run_module"
    r"|subprocess\.(?:run|call|check_call|check_output|Popen|getoutput|getstatusoutput)"
    r"|asyncio\.create_subprocess_(?:exec|shell)"
)
# These raise an exception when the command has failed, or end the script.
_CHECKED = re.compile(r".*\.(?:check_\w+|run_module|exec\w+)")
# A script that reads its rank can also be started by a launcher, and then starts none.
_RANKS = (b"LOCAL_RANK", b"'RANK'", b'"RANK"')
# The placeholder for a text that is known only when the script runs.
_UNKNOWN = "X"
# For one command: the depth of nested expressions, their number, and the letters of each text.
_DEPTH, _STEPS, _LETTERS = 100, 5000, 10_000
# What each variable is set to or extended by, with what separates it from the text before.
_Values = Mapping[str, list[tuple[str, ast.expr]]]


def read(file: File) -> list[Command]:
    """Return the commands that a Python script starts, in the order of its lines.

    Parts that are not in the source are ``X`` or a placeholder of the format.
    """
    nodes = [node for node, _ in file.nodes]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    is_rank = any(mark in file.data for mark in _RANKS)
    # Calls that are whole statements: their results are ignored.
    bare = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    values: _Values | None = None
    found: list[Command] = []
    for call in calls:
        function, _ = file.full_name(call.func)
        if function in known_launchers.FUNCTIONS and not is_rank:
            found.append(Command((function,), call.lineno))
        elif _STARTS.fullmatch(function):
            values = _values(nodes) if values is None else values
            is_checked = _CHECKED.match(function) or any(
                key.arg == "check" for key in call.keywords
            )
            is_failure_ignored = id(call) in bare and not is_checked
            text = _text_of_call(function, call.args, values)
            found += [
                each._replace(line=call.lineno, is_failure_ignored=is_failure_ignored)
                for each in commands(text)
            ]
    return found


def _values(nodes: Iterable[ast.AST]) -> _Values:
    values: dict[str, list[tuple[str, ast.expr]]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    values.setdefault(target.id, []).append(("\n", node.value))
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            values.setdefault(node.target.id, []).append((_separator(node.value), node.value))
        else:
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=name), attr="append" | "extend"),
                    args=[added],
                ):
                    values.setdefault(name, []).append((" ", added))
    return values


def _separator(added: ast.expr) -> str:
    return " " if isinstance(added, (ast.List, ast.Tuple)) else ""


def _text_of_call(function: str, arguments: list[ast.expr], values: _Values) -> str:
    """Return the command of a call as a text for a shell."""
    reader = _Reader(values)
    if function.startswith("os.spawn"):
        # The first argument is the mode.
        arguments = arguments[1:]
    text = " ".join(map(reader.text, arguments))
    return f"python -m {text}" if function == "runpy.run_module" else text


class _Reader:
    """Reads the text of expressions as far as the source shows it."""

    def __init__(self, values: _Values) -> None:
        self._values = values
        self._open: set[str] = set()
        self._depth = 0
        self._steps = _STEPS

    def text(self, node: ast.expr) -> str:
        """Return the text of an expression."""
        self._steps -= 1
        if self._steps < 0 or self._depth > _DEPTH:
            return _UNKNOWN
        self._depth += 1
        text = self._text(node)
        self._depth -= 1
        return text

    def _text(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=value):
                return str(value)[:_LETTERS]
            case ast.Attribute(attr="executable"):
                return "python"
            case ast.Name(id=name) if name in self._values and name not in self._open:
                return self._text_of_name(name)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.text(left) + _separator(right) + self.text(right)
            case ast.JoinedStr(values=items):
                return "".join(map(self.text, items))
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return " ".join(map(self._word, items))
        inner = _inner(node)
        return self.text(inner) if inner else _UNKNOWN

    def _word(self, node: ast.expr) -> str:
        if isinstance(node, ast.Starred):
            return self.text(node.value)
        return shlex.quote(self.text(node))

    def _text_of_name(self, name: str) -> str:
        self._open.add(name)
        text = "".join(separator + self.text(value) for separator, value in self._values[name])
        self._open.remove(name)
        return text.strip("\n")


def _inner(node: ast.expr) -> ast.expr | None:
    """Return what a format, ``" ".join(…)``, ``str(…)`` or ``shlex.split(…)`` is made from."""
    match node:
        case ast.BinOp(left=inner, op=ast.Mod()) | ast.FormattedValue(value=inner):
            return inner
        case ast.Call(func=ast.Attribute(attr="format", value=inner)):
            return inner
        case ast.Call(
            func=ast.Attribute(attr="join" | "split") | ast.Name(id="str" | "list" | "split"),
            args=[inner, *_],
        ):
            return inner
    return None
