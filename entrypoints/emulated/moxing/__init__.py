"""MoXing for emulated nodes whose Python lacks it: ``moxing.file``, on the node's object client.

``PYTHONPATH`` comes before ``site-packages``, so this package looks for a real MoXing first.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec

_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _real_moxing() -> ModuleSpec | None:
    """Return the spec of MoXing on the rest of the path; ignore a folder that only has its name."""
    path = [folder for folder in sys.path if os.path.abspath(folder) != _FOLDER]
    spec = PathFinder.find_spec(__name__, path)
    return spec if spec is not None and spec.origin else None


def _become(real: ModuleSpec) -> None:
    """Replace this package with the real MoXing."""
    module = module_from_spec(real)
    sys.modules[__name__] = module
    assert real.loader is not None
    real.loader.exec_module(module)


def _emulate() -> None:
    """Import ``moxing.file``; the node half is on the path only during the import."""
    root = os.path.dirname(_FOLDER)
    sys.path.insert(0, root)
    try:
        import moxing.framework.file as emulated
    finally:
        sys.path.remove(root)
    globals()["file"] = sys.modules["moxing.file"] = emulated
    sys.modules["moxing.file.file_io"] = emulated.file_io
    if os.environ.get("MOX_SILENT_MODE") != "1":
        sys.stderr.write("INFO:root:Using the moxing.file of cloudjob's emulated nodes\n")


_spec = _real_moxing()
if _spec is not None:
    _become(_spec)
else:
    _emulate()
