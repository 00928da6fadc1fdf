"""The ``__main__`` of the zipapp: finds the modules of the container half in one member of it.

Compressed together they take a quarter less room than one by one, and they go to every node.
It also begins the bytecode that jobentry/bytecode.py writes, which has set ZIPAPP, a path from
where it lies, what that ended with (SEAL), and CODES.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs each rank seven milliseconds
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Mapping, Sequence


# So much at the end of the zipapp holds the lengths and checksums of all that it holds.
_SEAL_BYTES = 132


class Loader:
    """Finder and loader of the modules of ``zipapp``.

    Args:
        zipapp: Its absolute path.
        codes: What marshal made of modules, by path in the zipapp; those that are not among them
            are compiled.
    """

    def __init__(self, zipapp: str, codes: Mapping[str, bytes]) -> None:
        self.zipapp = zipapp
        self.codes = codes
        self._texts: dict[str, str] = {}

    @property
    def texts(self) -> dict[str, str]:
        """The sources of the modules, by path in the zipapp.

        Raises:
            ImportError, OSError: The zipapp cannot be read.
        """
        if not self._texts:
            # What scripts/build_zipapp.py packed: names, then texts, NUL between.
            names, *texts = self.member("modules").split("\0")
            self._texts = dict(zip(names.split("\n"), texts))
        return self._texts

    def member(self, name: str) -> str:
        """Return one of the texts that the zipapp holds.

        Raises:
            ImportError, OSError: The zipapp cannot be read.
        """
        from zipimport import zipimporter

        return zipimporter(self.zipapp).get_data(name).decode("utf-8")

    @property
    def seal(self) -> bytes:
        """What no other zipapp ends with.

        Raises:
            OSError: The zipapp cannot be read.
        """
        with open(self.zipapp, "rb") as file:
            file.seek(-_SEAL_BYTES, os.SEEK_END)
            return file.read()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is, None when it is not one of ours."""
        file = self._file(name)
        if not file:
            return None
        # Of a class that is there, as importlib.machinery costs a millisecond to import.
        spec: ModuleSpec = type(sys.__spec__)(
            name, self, origin=f"{self.zipapp}/{file}", is_package=file.endswith("/__init__.py")
        )
        spec.has_location = True
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to importlib."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code in it."""
        self.run(self._file(module.__name__), module.__dict__)

    def get_source(self, name: str) -> str | None:
        """Return a module's text, for tracebacks."""
        try:
            return self.texts.get(self._file(name))
        except (OSError, ImportError):
            return None

    def run(self, file: str, into: dict[str, object]) -> None:
        """Run one of the modules."""
        if file in self.codes:
            from marshal import loads

            exec(loads(self.codes[file]), into)
        else:
            code = compile(self.texts[file], f"{self.zipapp}/{file}", "exec", dont_inherit=True)
            exec(code, into)

    def _file(self, name: str) -> str:
        """Return the path of a module in the zipapp, empty when it is not one of ours."""
        if name.partition(".")[0] != "jobentry":
            return ""
        path = name.replace(".", "/")
        files = (path + ".py", path + "/__init__.py")
        for file in files:
            if file in self.codes:
                return file
        return next((file for file in files if file in self.texts), "")


if __name__ == "__main__":
    own = globals()
    if "CODES" in own:
        zipapp = os.path.join(os.path.dirname(os.path.abspath(__file__)), own["ZIPAPP"])
        loader = Loader(zipapp, own["CODES"])
        try:
            if loader.seal != own["SEAL"]:
                # Another version was laid over it: that one is wanted.
                loader.codes = {}
        except OSError:
            pass  # without it we can do as well
    else:
        loader = Loader(os.path.abspath(sys.path[0]), {})
    sys.meta_path.insert(0, loader)
    loader.run("__main__.py", {"__name__": "__main__"})
