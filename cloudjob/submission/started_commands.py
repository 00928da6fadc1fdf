"""The commands that a script starts, as far as its text shows them; nothing is run or expanded."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from cloudjob.submission.scripts import ScriptFile

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


def read(file: ScriptFile) -> list[Command]:
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
