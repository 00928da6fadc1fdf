"""The options of a script: which it mentions, and which only ModelArts' PyTorch presets pass."""

from __future__ import annotations

import ast
import re
from itertools import chain
from pathlib import Path

from cloudjob.submission.scripts import File, Files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

_LAUNCHER = "pytorch-modelarts"
_NEEDED = ("--rank", "--world_size")
_ADDRESS = "--init_method"
# A script that reads this variable does not depend on the options.
_VARIABLE = b"WORLD_SIZE"


def is_mentioned(spec: JobSpec, option: str) -> bool:
    """Return whether the option's name is a word of the script or of a file that it uses.

    True if none of them is readable.
    """
    name = re.escape(option.lstrip("-")).replace(r"\-", "[-_]")
    # A single letter occurs as a word in many texts, so a short option is searched with its dash.
    dash = "" if option.startswith("--") else "-"
    pattern = re.compile(rf"(?<!\w){dash}{name}(?!\w)".encode())
    files = Files()
    paths = chain.from_iterable(files.levels(Path(spec.source), spec.script))
    return any(pattern.search(files[path].data) for path in paths) or not any(
        file.data for file in files.values()
    )


def preset_hint(spec: JobSpec, files: Files) -> str:
    """Return how to pass the rank and the number of ranks; empty if the script gets or has them.

    Without them such a script waits for as many ranks as its default says, often eight.
    """
    if spec.takes_command or spec.launcher == _LAUNCHER or not spec.script.endswith(".py"):
        return ""
    passed = {word.partition("=")[0] for word in spec.args}
    file = files[Path(spec.source, spec.script)]
    if passed.issuperset(_NEEDED) or _VARIABLE in file.data or b"--rank" not in file.data:
        return ""
    options, takes_any = _options(file)
    if not options.issuperset(_NEEDED):
        return ""
    if _ADDRESS in options or takes_any:
        return f"--launcher {_LAUNCHER} passes them on each node, as ModelArts' PyTorch presets do"
    return "pass them after the script"


def _options(file: File) -> tuple[set[str], bool]:
    """Return the options that a script declares, and whether it accepts others."""
    names: set[str] = set()
    takes_any = False
    for node, _ in file.nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=words):
                names |= {str(word.value) for word in words if isinstance(word, ast.Constant)}
            case ast.Call(func=ast.Attribute(attr="parse_known_args")):
                takes_any = True
    return names, takes_any
