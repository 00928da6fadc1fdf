"""Makes Python behave as on macOS: without the functions that CPython lacks there, and /proc.

Python imports this module when it starts with this folder in ``PYTHONPATH``. ``lacking`` reads from
typeshed what CPython has on each platform.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType, SimpleNamespace

MODULES = ("os", "posix", "signal", "fcntl", "select", "socket", "resource", "time", "shutil")
LACKING = "TEST_MACOS_LACKS"


def lacking(typeshed: Path) -> str:
    """Return the names, as ``module.name``, that typeshed has for Linux and not for macOS."""
    names = []
    for module in MODULES:
        paths = (typeshed / f"{module}.pyi", typeshed / module / "__init__.pyi")
        stub = ast.parse(next(path for path in paths if path.exists()).read_text())
        names += [f"{module}.{name}" for name in _names(stub, "linux") - _names(stub, "darwin")]
    return " ".join(sorted(names))


def _names(tree: ast.Module | ast.If, platform: str) -> set[str]:
    values = {"sys": SimpleNamespace(platform=platform, version_info=sys.version_info)}
    names: set[str] = set()
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If):
            test = compile(ast.Expression(node.test), "typeshed", "eval")
            waiting += node.body if eval(test, values) else node.orelse
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir", "os.chdir") and arguments:
        path = arguments[0]
        if isinstance(path, (str, bytes)) and os.fsdecode(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", path)


def pretend(qualified_names: str) -> None:
    """Remove what macOS lacks."""
    # Load the build's configuration first: the name of its file depends on sys.platform.
    sysconfig.get_config_vars()
    sys.platform = "darwin"
    # urllib reads the system's proxies from this module, which exists only on macOS.
    proxies = ModuleType("_scproxy")
    none = {"exclude_simple": False}
    vars(proxies).update(_get_proxies=dict, _get_proxy_settings=lambda: none)
    sys.modules["_scproxy"] = proxies
    for qualified_name in qualified_names.split():
        module, _, name = qualified_name.partition(".")
        vars(importlib.import_module(module)).pop(name, None)
    sys.addaudithook(_refuse)


if LACKING in os.environ:
    pretend(os.environ[LACKING])
