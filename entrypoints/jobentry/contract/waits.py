"""What a thread does, from its stack and from what the kernel says about it. No I/O."""

from __future__ import annotations

import itertools
import re
from functools import lru_cache
from typing import NamedTuple, Protocol, Sequence, TypeVar

from jobentry.contract.stacks import Frame, ThreadStack
from jobentry.contract.stacks import Wait as Wait

# The operation of a rank that waits until a key is in PyTorch's store.
STORE = "store"
# The waits that another rank can end.
OF_RANKS = frozenset((Wait.RANKS, Wait.START))


class _InFile(Protocol):
    """A call, as far as its file matters."""

    @property
    def file(self) -> str: ...


Call = TypeVar("Call", bound=_InFile)


class Cause(NamedTuple):
    """What a thread waits for, and the same in words; ``running`` for one that does not wait."""

    wait: Wait
    text: str


_STOPPED = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended, but its parent has not noticed",
}
# Functions of the kernel in which a thread waits whose control group is frozen (version 2, and 1).
_FROZEN = ("freezer", "refrigerator")
# Calls in which a rank waits for others: the file of the innermost call, or its line of source.
_WAITING_FILES = re.compile(
    r"(^|/)(torch/distributed/distributed_c10d|horovod/\w+/(mpi_ops|functions)"
    r"|mindspore/communication/\w+)\.py$"
)
# Names that others use, too, count only for what is usually called so.
_WAITING_CALL = re.compile(
    r"\.i?(?P<collective>all_?reduce\w*|all_?gather\w*|all_?to_?all\w*|(monitored_)?barrier"
    r"|(bcast|broadcast)(_object\w*|_parameters|_coalesced)?|reduce_?scatter\w*)\("
    r"|\b(\w*comm|\w*world|dist|distributed|hvd|req\w*|work|handle)"
    r"\.i?(?P<other>reduce|scatterv?|gatherv?|s?send|recv|sendrecv|probe|wait(all|any)?)\(",
    re.IGNORECASE,
)
# Calls in which a rank waits until the others have started, too.
_START_FILES = re.compile(r"(^|/)torch/distributed/(rendezvous|elastic/rendezvous/\w+)\.py$")
_START_FUNCTIONS = ("init_process_group",)
_START_CALL = re.compile(
    r"\bfrom\s+mpi4py\s+import\b.*\bMPI\b|\bMPI\.Init\w*\(|\bhvd\.init\(|\binit_process_group\("
)
_MESSAGES = re.compile(r"i?(s?send|recv|sendrecv|probe|wait(all|any)?)$")
# Calls that wait until the device has computed what they return.
_READ_BACK = re.compile(r"\.(item|cpu|tolist|numpy|asnumpy|synchronize)\(|\.to\(['\"]cpu")
_ON_DEVICE = "waiting for its device"
_FOR_DATA = Cause(Wait.DATA, "waiting for data of its loader")
# Files of the innermost call -> what for. The kernel only shows that these wait for events.
_FILES = (
    (r"torch/(cuda|npu|xpu)/(__init__|streams)|torch_npu/npu/\w+", Wait.DEVICE, _ON_DEVICE),
    (r"torch/utils/data/dataloader", *_FOR_DATA),
    (r"(pdb|bdb)", Wait.INPUT, "waiting for input (a debugger)"),
    (r"subprocess", Wait.CHILD, "waiting for a child process"),
    (r"multiprocessing/popen_\w+", Wait.CHILD, "waiting for a child process"),
    (r"(threading|queue|multiprocessing/queues)", Wait.LOCK,
     "waiting for a lock or another thread"),
    (r"(socket|ssl|http/client|urllib/request)|(urllib3|requests|grpc|wandb)/.*", Wait.NETWORK,
     "waiting for data of a socket"),
)  # fmt: skip
# Functions of the kernel in which a thread waits -> what for.
_KERNEL_CALLS = (
    ("wait_for_partner", Wait.FILE, "opening a pipe that no other process has opened"),
    ("pipe_read", Wait.FILE, "reading from a pipe"),
    ("pipe_write", Wait.FILE, "writing to a pipe"),
    ("futex", Wait.LOCK, "waiting for a lock or another thread"),
    ("nanosleep", Wait.SLEEP, "sleeping"),
    ("ep_poll", Wait.EVENTS, "waiting for events"),
    ("epoll", Wait.EVENTS, "waiting for events"),
    ("poll_schedule", Wait.EVENTS, "waiting for events"),
    ("do_select", Wait.EVENTS, "waiting for events"),
    ("do_wait", Wait.CHILD, "waiting for a child process"),
    ("locks_lock", Wait.FILE, "waiting for a lock on a file"),
    ("setlk", Wait.FILE, "waiting for a lock on a file"),
    ("wait_woken", Wait.NETWORK, "waiting for data, a connection or input"),
    ("skb_wait", Wait.NETWORK, "waiting for data of a socket"),
    ("unix_stream", Wait.NETWORK, "waiting for data of a socket"),
    ("sock_alloc_send", Wait.NETWORK, "writing to a socket that nobody reads"),
    ("inet_csk_accept", Wait.NETWORK, "waiting for a connection"),
    ("inet_stream_connect", Wait.NETWORK, "connecting to another machine"),
    ("n_tty_read", Wait.INPUT, "waiting for input"),
    ("nfs", Wait.FILE, "waiting for a network file system"),
    ("rpc_wait", Wait.FILE, "waiting for a network file system"),
    ("fuse", Wait.FILE, "waiting for a file system (FUSE)"),
    ("request_wait_answer", Wait.FILE, "waiting for a file system (FUSE)"),
)
# Native functions in which a thread waits -> what for. Libraries of MPI and others poll, so such a
# thread may run.
_NATIVE_CALLS = (
    (r"P?MPI_(Init|Comm_connect|Comm_accept)\w*", Wait.START),
    (r"c10d::\w*Store::(wait|get|check|doWait)\w*", Wait.RANKS),
    (r"ompi_mpi_finalize", Wait.RANKS),
    (r"mindspore::ps::core::AbstractNode::CollectiveWait", Wait.RANKS),
    # DistributedDataParallel waits at the end of backward().
    (r"c10d::Reducer::finalize_backward", Wait.RANKS),
    (r"P?MPI_(I?[Bb]arrier|I?[Bb]cast|\w*[Aa]ll\w+|I?[Rr]educe\w*|Reduce\w*|I?[Gg]ather\w*"
     r"|I?[Ss]catter\w*|I?(Ex)?[Ss]can|[SRB]?[Ss]end|Recv|Mrecv|Sendrecv\w*|M?[Pp]robe|Wait\w*"
     r"|Win_(fence|wait|lock\w*|unlock\w*|flush\w*|complete)|Finalize|Comm_(dup|split|create)\w*"
     r"|File_(open|close|set_\w+|\w+_(all|ordered)(_end)?))",
     Wait.RANKS),
    (r"(gloo|c10d|horovod)::.*([Ww]ait|[Bb]arrier|[Rr]educe|[Gg]ather|[Bb]roadcast)\w*",
     Wait.RANKS),
    (r"(cuStream|cuEvent|cuCtx|cudaStream|cudaEvent|cudaDevice|hipStream|hipDevice|aclrt\w+?)"
     r"Synchronize\w*", Wait.DEVICE),
)  # fmt: skip
# MindSpore's threads run what the main thread then waits for in this function.
IN_OTHER_THREAD = "mindspore::runtime::AsyncRQueue::Wait"
# Native functions that tell in which operation a rank waits, where no line of Python does.
_MPI_OPERATION = re.compile(
    r"P?MPI_(Finalize|Comm_(?:dup|split|create)\w*|Win_(?:fence|(?:lock|flush)\w*))"
)
_NATIVE_OPERATIONS = {
    "ompi_mpi_finalize": "finalize",  # what Open MPI goes on to
    "c10d::Reducer::finalize_backward": "backward",
    "c10d::TCPStore::doWait": STORE,
}
_WORDS = {
    Wait.START: "waiting for other ranks to start",
    Wait.RANKS: "waiting for other ranks",
    Wait.DEVICE: _ON_DEVICE,
}
# Source of the innermost call -> what for, where the kernel does not say it.
_SLEEP_CALL = re.compile(r"\bsleep\(")
# The kernel does not tell a terminal from a connection.
_INPUT_CALL = re.compile(r"(?<![\w.])input\(")
# The outermost calls of a rank, which start its script.
_STARTERS = frozenset(
    ("<frozen runpy>", "runpy.py", "script_runner.py", "__main__.py", "app_main.py")
)
# Folders of installed modules; `pip install --target` and an image may install them anywhere.
_LIBRARIES = re.compile(
    r"(^|/)(site-packages|dist-packages|lib/python3[^/]*)/|^<frozen "
    r"|^/.*/(torch|horovod|mindspore|tensorflow|mpi4py|deepspeed|accelerate|lightning)/"
)
# The first call of a process of multiprocessing.
_FORK = re.compile(r"(^|/)multiprocessing/process\.py$")
# Our own code that stands between calls of the job and of Python.
_OURS = re.compile(r"(^|/)jobentry/rank/crash_file\.py$")


def cause_of(thread: ThreadStack) -> Cause:
    """Return what a thread waits for."""
    if thread.state in _STOPPED:
        return Cause(Wait.STOPPED, _STOPPED[thread.state])
    if any(name in thread.waits_in for name in _FROZEN):
        return Cause(Wait.STOPPED, "frozen with its control group")
    # A rank that waits for others may spin or sleep, from one moment to the next.
    polling = _polling_cause(thread)
    if polling is not None:
        return polling
    if thread.state == "D":
        where = f" ({thread.waits_in})" if thread.waits_in else ""
        return Cause(Wait.KERNEL, f"waiting in the kernel, not interruptible{where}")
    library = _library_cause(thread.frames)
    if library is not None and library.wait is Wait.DEVICE:
        return library
    # It may spin or sleep, as the device's driver likes.
    if thread.uses_device and thread.frames and _READ_BACK.search(thread.frames[0].source):
        return Cause(Wait.DEVICE, _ON_DEVICE)
    if thread.state == "R" or not thread.state:
        return Cause(Wait.NOTHING, "running")
    return _blocked_cause(thread, library)


def _polling_cause(thread: ThreadStack) -> Cause | None:
    if _waits_for_start(thread.frames):
        return Cause(Wait.START, _WORDS[Wait.START])
    if operation(thread.frames):
        return Cause(Wait.RANKS, _WORDS[Wait.RANKS])
    return _native_cause(thread)


def _native_cause(thread: ThreadStack) -> Cause | None:
    """Return what the innermost native call that is known to wait waits for."""
    name, wait = native_wait(thread)
    return Cause(wait, f"{_WORDS[wait]} ({name})") if name else None


def native_wait(thread: ThreadStack) -> tuple[str, Wait]:
    """Return the innermost native call that is known to wait; its name is empty if there is none.

    Those below it may have returned.
    """
    for call in thread.native:
        for pattern, wait in _native_waits():
            if pattern.fullmatch(call.function):
                return call.function, wait
    return "", Wait.NOTHING


def _blocked_cause(thread: ThreadStack, library: Cause | None) -> Cause:
    """Return what a sleeping thread waits for."""
    if wait_in_libraries(thread.frames) is Wait.DATA:
        return _FOR_DATA
    if thread.frames and _INPUT_CALL.search(thread.frames[0].source):
        return Cause(Wait.INPUT, "waiting for input")
    kernel = next(
        (Cause(wait, text) for name, wait, text in _KERNEL_CALLS if name in thread.waits_in), None
    )
    if kernel is not None and (library is None or kernel.wait is not Wait.EVENTS):
        return kernel
    if library is not None:
        return library
    if thread.waits_in:
        return Cause(Wait.OTHER, f"waiting ({thread.waits_in})")
    if thread.frames and _SLEEP_CALL.search(thread.frames[0].source):
        return Cause(Wait.SLEEP, "sleeping")
    return Cause(Wait.OTHER, "waiting")


def operation(frames: Sequence[Frame]) -> str:
    """Return the call in which a rank waits for others, as ``allreduce``; empty if it does not."""
    if not frames:
        return ""
    if _WAITING_FILES.search(frames[0].file):
        return _plain(frames[0].function)
    match = _WAITING_CALL.search(frames[0].source)
    return _plain(match["collective"] or match["other"]) if match else ""


def operation_of(thread: ThreadStack) -> str:
    """Return the call in which a rank waits for others, also if only its native calls tell."""
    name, _ = native_wait(thread)
    match = _MPI_OPERATION.fullmatch(name)
    of_native = _plain(match[1]) if match else _NATIVE_OPERATIONS.get(name, "")
    return operation(thread.frames) or of_native


def wait_in_libraries(frames: Sequence[Frame]) -> Wait | None:
    """Return what calls of libraries wait for, if it is a device, a data loader or the network."""
    calls = itertools.takewhile(lambda frame: not is_own(frame), frames)
    causes = [_library_cause([frame]) for frame in calls]
    waits = [cause.wait for cause in causes if cause is not None]
    # A data loader may wait for the network.
    certain = [wait for wait in waits if wait in (Wait.DEVICE, Wait.DATA)]
    return next(iter(certain), Wait.NETWORK if Wait.NETWORK in waits else None)


def reads_back(frame: Frame) -> bool:
    """Whether a call returns only when a device, if its process uses one, has computed a value."""
    return bool(_READ_BACK.search(frame.source))


def is_message(name: str) -> bool:
    """Whether an operation is one of two ranks, such as ``recv``."""
    return bool(_MESSAGES.match(name))


def place_of(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost call in the job's own code, or else the innermost one."""
    return next((frame for frame in frames if is_own(frame)), frames[0] if frames else None)


def of_child(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the calls of a process that its rank has forked, the innermost first.

    Below its first call are those of the rank at the time of the fork.
    """
    return tuple(itertools.takewhile(lambda frame: not _FORK.search(frame.file), frames))


def is_own(frame: Frame) -> bool:
    """Whether a call is in the job's own code, not in an installed module."""
    is_starter = frame.file.rpartition("/")[2] in _STARTERS
    return not (is_starter or _LIBRARIES.search(frame.file) or is_ours(frame.file))


def is_ours(file: str) -> bool:
    """Whether calls in this file are ours, so that nobody needs to see them."""
    return bool(_OURS.search(file))


def of_script(frames: Sequence[Call]) -> list[Call]:
    """Return the calls, the innermost first, without ours and those that only start the script."""
    kept = [frame for frame in frames if not is_ours(frame.file)]
    while len(kept) > 1 and kept[-1].file.rpartition("/")[2] in _STARTERS:
        kept.pop()
    return kept


def _waits_for_start(frames: Sequence[Frame]) -> bool:
    if not frames:
        return False
    if _START_FILES.search(frames[0].file):
        return True
    if any(frame.function in _START_FUNCTIONS for frame in frames):
        return True
    place = place_of(frames)
    is_import = frames[0].file.startswith("<frozen importlib") or place is frames[0]
    return is_import and place is not None and bool(_START_CALL.search(place.source))


def _library_cause(frames: Sequence[Frame]) -> Cause | None:
    if not frames:
        return None
    file = frames[0].file
    causes = (Cause(wait, text) for name, wait, text in _library_calls() if name.search(file))
    return next(causes, None)


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


# Compiled on first use: many jobs end before anybody looks at their ranks.


@lru_cache(maxsize=None)
def _library_calls() -> tuple[tuple[re.Pattern[str], Wait, str], ...]:
    return tuple((re.compile(rf"(^|/)({name})\.py$"), wait, text) for name, wait, text in _FILES)


@lru_cache(maxsize=None)
def _native_waits() -> tuple[tuple[re.Pattern[str], Wait], ...]:
    return tuple((re.compile(pattern), wait) for pattern, wait in _NATIVE_CALLS)
