"""Where a Python script writes its stacks when a signal such as SIGSEGV ends it.

Python's ``faulthandler`` writes them to a file in the node's folder, which the entry reads
(``node.crashes``). The script's own output stays as it is.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # types and typing cost each rank milliseconds
    from typing import Callable

# A forked process writes at its process id times this, so that nobody has to write anything before
# a crash: until then the file is empty, and later it has holes.
SLOT_BYTES = 1 << 20
# Set by users who want faulthandler as Python has it; even an empty value counts.
PYTHONFAULTHANDLER = "PYTHONFAULTHANDLER"
# Scripts that close the descriptors that they did not open seldom go that far.
_DESCRIPTOR = 700
# The function with which a worker of PyTorch's data loader installs handlers.
_OF_TORCH = ("torch.utils.data._utils.signal_handling", "_set_worker_signal_handlers")


def path_of(node_dir: str, wrapper: int) -> str:
    """Return the path of the file of the rank whose wrapper has this process id."""
    return os.path.join(node_dir, "crash-%d" % wrapper)


def enable(node_dir: str) -> None:
    """Have faulthandler write to this rank's file, unless the user has decided about it."""
    if not node_dir or PYTHONFAULTHANDLER in os.environ:
        return
    try:
        import faulthandler
    except ImportError:
        return
    path = path_of(node_dir, os.getppid())
    # ValueError: a path with a NUL. RuntimeError: this Python cannot install the handlers.
    try:
        if not faulthandler.is_enabled():
            _Handlers(path).install()
    except (OSError, ValueError, RuntimeError):
        pass


class _Handlers:
    """The handlers of a rank's script, and of the processes that it forks."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = _raised(_opened(path, os.O_CREAT | os.O_TRUNC))
        self._inode = os.fstat(self._descriptor).st_ino

    def install(self) -> None:
        """Install the handlers, and follow forks and the start of Open MPI."""
        self._enable()
        os.register_at_fork(after_in_child=self._move)
        if "OMPI_COMM_WORLD_RANK" in os.environ:
            self._yield_to_open_mpi()

    def _enable(self) -> None:
        import faulthandler

        faulthandler.enable(self._descriptor)

    def _move(self) -> None:
        """Write at this process's own place, unless the script has closed the file."""
        self._yield_to_torch()
        try:
            if os.fstat(self._descriptor).st_ino != self._inode:
                return
            other = _opened(self._path, 0)
            os.lseek(other, os.getpid() * SLOT_BYTES, os.SEEK_SET)
            os.dup2(other, self._descriptor, inheritable=False)
            os.close(other)
        except OSError:
            pass

    def _yield_to_torch(self) -> None:
        """In a worker of PyTorch's data loader, install the handlers again after PyTorch's.

        It replaces those that are there (2.13), and then only prints which signal it was.
        """
        module = sys.modules.get(_OF_TORCH[0])
        install = getattr(module, _OF_TORCH[1], None)
        if module is not None and install is not None:
            setattr(module, _OF_TORCH[1], lambda: self._around(install))

    def _around(self, install: Callable[[], object]) -> None:
        """Call a function that installs handlers, which then run after ours."""
        import faulthandler

        is_enabled = faulthandler.is_enabled()
        faulthandler.disable()
        try:
            install()
        finally:
            if is_enabled:
                self._enable()

    def _yield_to_open_mpi(self) -> None:
        """Install the handlers again after Open MPI's, which then run as well.

        Open MPI leaves out a signal that has a handler (4.1.4, 5.0.11), and its stack of C
        functions would be missing from the log. ``mpi4py.MPI`` starts it while it is imported.
        """
        from importlib.machinery import ExtensionFileLoader

        load = ExtensionFileLoader.exec_module

        def load_mpi(loader: ExtensionFileLoader, module: object) -> None:
            if loader.name != "mpi4py.MPI":
                load(loader, module)  # type: ignore[arg-type]
                return
            ExtensionFileLoader.exec_module = load  # type: ignore[method-assign]
            self._around(lambda: load(loader, module))  # type: ignore[arg-type]

        ExtensionFileLoader.exec_module = load_mpi  # type: ignore[method-assign, assignment]


def _opened(path: str, flags: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)


def _raised(descriptor: int) -> int:
    """Return a high descriptor of the same file if that number is free and allowed."""
    try:
        os.fstat(_DESCRIPTOR)
        return descriptor
    except OSError:
        pass
    try:
        os.dup2(descriptor, _DESCRIPTOR, inheritable=False)
    except OSError:
        return descriptor
    os.close(descriptor)
    return _DESCRIPTOR
