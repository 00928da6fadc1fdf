"""The files beside the code, in the folder that the platform copies to each node."""

from __future__ import annotations

from cloudjob.backends import delivery as deliveries
from cloudjob.backends.delivery import new_ssh_key
from cloudjob.backends.modelarts import request as requests
from cloudjob.backends.modelarts.request import ModelArtsRequest
from jobentry.contract import names, paths

# The Python file that a preset engine runs, without arguments of ours.
_BOOT_PY = f"""\
import os
import sys

here = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(here, "{paths.DELIVERED_ARGV}"), "rb") as file:
    words = [os.fsdecode(word) for word in file.read().split(b"\\0")[:-1]]
os.environ["{names.CLOUDJOB_DELIVERY}"] = here
os.execv("/bin/sh", ["sh", os.path.join(here, "{deliveries.BOOT}"), *words, *sys.argv[1:]])
"""


def companions(request: ModelArtsRequest) -> dict[str, bytes]:
    """Return the files beside the code by name; some contain secrets."""
    files = deliveries.files()
    if request.env:
        files[paths.DELIVERED_ENV] = requests.delivered_env(request)
    if request.has_key:
        files[paths.DELIVERED_SSH_KEY] = new_ssh_key()
    if request.args:
        files[requests.BOOT_FILE] = _BOOT_PY.encode("ascii")
        args = (arg.encode("utf-8") + b"\0" for arg in request.args)
        files[paths.DELIVERED_ARGV] = b"".join(args)
    return files
