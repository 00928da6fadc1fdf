"""Use the files that a platform copied to this node: the code, the ssh key, variables."""

from __future__ import annotations

import os
from typing import MutableMapping

from jobentry.contract import names, paths, variables

# Delivered file -> the variable for its URI.
_VARIABLES = (
    (paths.DELIVERED_CODE, names.CLOUDJOB_CODE_URI),
    (paths.DELIVERED_SSH_KEY, names.CLOUDJOB_SSH_KEY),
)


def take(environ: MutableMapping[str, str]) -> None:
    """Set variables for the files in ``$CLOUDJOB_DELIVERY``; variables that are set already stay.

    The files are not removed: a container that is restarted in place needs them again.

    Raises:
        OSError: The folder cannot be read.
    """
    from jobentry.objects.directory import uri_of

    folder = os.path.abspath(environ.pop(names.CLOUDJOB_DELIVERY))
    os.listdir(folder)
    if os.path.exists(os.path.join(folder, paths.DELIVERED_ENV)):
        with open(os.path.join(folder, paths.DELIVERED_ENV), "rb") as file:
            environ.update(variables.load(file.read()))
    for name, variable in _VARIABLES:
        path = os.path.join(folder, name)
        if os.path.exists(path):
            environ.setdefault(variable, uri_of(path))
    record_dir = environ.pop(names.CLOUDJOB_RECORD_DIR, "")
    if record_dir:
        environ.setdefault(
            names.CLOUDJOB_RECORD_URI, uri_of(os.path.join(record_dir, paths.RECORD))
        )
