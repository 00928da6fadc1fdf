"""Finds the options of a script that ModelArts' PyTorch presets pass, and no other launcher."""

from __future__ import annotations

import ast
from pathlib import Path

from cloudjob.submission import scripts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

_LAUNCHER = "pytorch-modelarts"
_NEEDED = ("--rank", "--world_size")
_ADDRESS = "--init_method"
# A script that reads this variable does not depend on the options.
_VARIABLE = b"WORLD_SIZE"


def hint(spec: JobSpec) -> str:
    """Return how to pass the rank and the number of ranks; empty if the script gets or has them.

    Without them such a script waits for as many ranks as its default says, often eight.
    """
    if spec.takes_command or spec.launcher == _LAUNCHER or not spec.script.endswith(".py"):
        return ""
    given = {word.partition("=")[0] for word in spec.args}
    source = scripts.read(Path(spec.source, spec.script))
    if given.issuperset(_NEEDED) or _VARIABLE in source or b"--rank" not in source:
        return ""
    options, takes_any = _options(scripts.parse(source))
    if not options.issuperset(_NEEDED):
        return ""
    if _ADDRESS in options or takes_any:
        return f"--launcher {_LAUNCHER} passes them on each node, as ModelArts' PyTorch presets do"
    return "pass them after the script"


def _options(tree: ast.Module) -> tuple[set[str], bool]:
    """Return the options that a script declares, and whether it accepts others."""
    names: set[str] = set()
    takes_any = False
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        takes_any = takes_any or node.func.attr == "parse_known_args"
        if node.func.attr == "add_argument":
            names |= {str(item.value) for item in node.args if isinstance(item, ast.Constant)}
    return names, takes_any
