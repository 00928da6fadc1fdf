"""The entry of a node in a fork of the controller, which has imported it once for all nodes.

The controller imports this module only if the folder of the unpacked entry comes first in its
``sys.path``, so that node and controller run the same files. Standard library only.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

# A collection finds no garbage while modules are imported, and in a fork would copy their memory.
gc.disable()
# Not an import statement: the laptop half sees only the contract of the node half.
_main = importlib.import_module("jobentry.main")
_main.import_usual()
gc.freeze()
gc.enable()
# Where Python looks for modules. Found here, as a look at a module copies its memory in each fork.
_OURS = [module for name, module in sys.modules.items() if name.startswith("jobentry")]
_PATHS = [sys.path, *(module.__path__ for module in _OURS if hasattr(module, "__path__"))]


def run(argv: Sequence[str], env: Mapping[str, str], folder: str) -> NoReturn:
    """Run the entry in this process, and exit with its code.

    Args:
        argv: The command that would start it: ``python -I -S ENTRY SCRIPT …``.
        env: All of its variables.
        folder: The folder of the entry on this machine, which may have another path on the node.
    """
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    # As those of a new interpreter in the locale C.UTF-8.
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        errors = "backslashreplace" if stream is sys.stderr else "surrogateescape"
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)
    sys.argv[:] = argv[3:]
    _move(folder, argv[3])
    try:
        _main.run(sys.argv[1:])
    except BaseException:  # noqa: BLE001 (as an interpreter does)
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _move(before: str, now: str) -> None:
    """Import what is not imported yet from the folder's path on the node."""
    for paths in _PATHS:
        paths[:] = [
            now + path[len(before) :] if f"{path}/".startswith(f"{before}/") else path
            for path in paths
        ]
