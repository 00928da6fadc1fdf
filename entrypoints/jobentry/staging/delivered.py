"""What a platform has brought to this node by itself: the code, the key for ssh, variables."""

from __future__ import annotations

import os
from typing import MutableMapping

from jobentry.contract import names, paths, variables

# File -> the variable that says where such a thing is, and whether as a URI.
_PLACES = (
    (paths.DELIVERED_CODE, names.CLOUDJOB_CODE_URI),
    (paths.DELIVERED_SSH_KEY, names.CLOUDJOB_SSH_KEY),
)


def take(environ: MutableMapping[str, str]) -> None:
    """Take in what lies in the folder that the environment names; what is set already stays.

    The files stay: a container that is started again in place needs them once more, and they go
    with it.

    Raises:
        OSError: The folder cannot be read.
    """
    from jobentry.objects.directory import uri_of

    folder = os.path.abspath(environ.pop(names.CLOUDJOB_DELIVERY))
    os.listdir(folder)
    if os.path.exists(os.path.join(folder, paths.DELIVERED_ENV)):
        with open(os.path.join(folder, paths.DELIVERED_ENV), "rb") as file:
            environ.update(variables.load(file.read()))
    for name, variable in _PLACES:
        path = os.path.join(folder, name)
        if os.path.exists(path):
            environ.setdefault(variable, uri_of(path))
    kept = environ.pop(names.CLOUDJOB_RECORD_DIR, "")
    if kept:
        environ.setdefault(names.CLOUDJOB_RECORD_URI, uri_of(os.path.join(kept, paths.RECORD)))
