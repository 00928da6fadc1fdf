"""Where cloudjob is installed, which version it is, and how one of its modules becomes a process.

Other modules must not ``import cloudjob`` for this: the package itself leads to all of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jobentry.contract import paths

VERSION = "0.1.0"
# The folder of the package; the entry of the nodes is in it.
FOLDER = Path(__file__).parent
ENTRY = FOLDER / paths.ENTRY


def argv_of(module: str, *arguments: str, is_isolated: bool = True, entry: str = "") -> list[str]:
    """Return the command of a process that calls ``main()`` of one of our modules.

    It imports what this process can import, and the standard library first: the user's folders
    cannot shadow one of its modules.

    Args:
        is_isolated: Whether to ignore the environment's variables and its ``.pth`` files. A program
            that needs other libraries must not; it starts in a folder without modules.
        entry: A folder of the unpacked entry, whose modules it imports before any others.
    """
    roots = (str(FOLDER.parent), str(Path(paths.__file__).parents[2]))
    folders = list(dict.fromkeys([*filter(None, sys.path), *roots]))
    first = f"sys.path[:0] = [{entry!r}]; " if entry else ""
    code = f"import sys; {first}sys.path += {folders!r}; from {module} import main; main()"
    options = ("-I", "-S") if is_isolated else ()
    return [sys.executable, *options, "-c", code, *arguments]
