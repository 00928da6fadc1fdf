"""Makes ranks import the job's package where Python would import the folder it was packed from.

An editable install (``pip install -e .``), or a PYTHONPATH, can name a folder in the source. On a
node that sees that folder, its modules would be those of now, not those of the submit.
"""

from __future__ import annotations

import json
import os

from jobentry.log import log_message
from jobentry.system.processes import output_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator, Mapping

# Seconds for Python to list where it imports from.
_LIMIT_S = 20
_MARK = "jobentry-imports "
# Prints where Python imports from: the folders, and the modules of finders that setuptools
# (MAPPING) and the package editables (_redirections) install, each with its path. The environment
# of the interpreter itself is left out, since it may lie in the source, as .venv often does.
_LIST = (
    """
import json, sys
found = [["", path] for path in sys.path if path and not path.startswith(sys.prefix + "/lib")]
for finder in sys.meta_path:
    module = sys.modules.get(getattr(finder, "__module__", ""))
    modules = getattr(module, "MAPPING", None) or getattr(finder, "_redirections", None)
    if isinstance(modules, dict):
        found += [[str(name), str(path)] for name, path in modules.items()]
print("%s" + json.dumps(found))
"""
    % _MARK
)


def python_path(python: str, environment: Mapping[str, str], source: str, code: str) -> str:
    """Return the PYTHONPATH with which the script's Python imports the unpacked package.

    Args:
        python: The interpreter of the script.
        environment: Of the ranks.
        source: The folder that was packed.
        code: The folder that the package is unpacked to.
    """
    roots: list[str] = []
    for name, path in _imports(python or "python3", environment):
        inner = os.path.relpath(os.path.realpath(path), os.path.realpath(source))
        if inner == os.pardir or inner.startswith(os.pardir + os.sep):
            continue
        root = _root(name, os.path.normpath(os.path.join(code, inner)))
        if root is None or not os.path.isdir(root):
            log_message("warning: Python imports %s, which is not in the job's package" % path)
        elif root not in roots:
            roots.append(root)
    existing = environment.get("PYTHONPATH", "")
    return os.pathsep.join([*roots, existing] if existing else roots)


def _imports(python: str, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield where Python imports from: folders without a name, and modules."""
    for line in output_of([python, "-c", _LIST], _LIMIT_S, environment).splitlines():
        if line.startswith(_MARK):
            yield from json.loads(line[len(_MARK) :])


def _root(name: str, path: str) -> str | None:
    """Return the folder from which a module is imported by its name; None if there is none.

    Args:
        name: Empty for a folder of modules.
    """
    if not name:
        return path
    for end in (os.sep + "__init__.py", ".py"):
        path = path[: -len(end)] if path.endswith(end) else path
    end = os.sep + name.replace(".", os.sep)
    return path[: -len(end)] if path.endswith(end) else None
