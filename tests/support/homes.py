"""State folders of cloudjob that contain what the first submit on a machine creates.

Unpacking and compiling the entry and compiling the rules for secrets takes as long as the rest of a
small job. The tutorial, the demo and the tests of the wheel start with an empty folder.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

from cloudjob.backends.interpreters import entry_of
from cloudjob.package import pack
from cloudjob.package.pack import PackOptions


def make_used_home(folder: Path) -> None:
    """Create a state folder as it is after a submit, but without a job."""
    # Copying the entry's hundred files takes seven times as long as linking them.
    shutil.copytree(_used(), folder, copy_function=os.link)


@functools.cache
def _used() -> Path:
    scratch = Path(tempfile.mkdtemp(prefix="cloudjob-used-"))
    atexit.register(shutil.rmtree, scratch)
    source, home = scratch / "source", scratch / "home"
    source.mkdir()
    (source / "train.py").write_text("print()\n")
    entry_of(home)
    options = PackOptions(home=home)
    pack(source, scratch / "layer", script="train.py", limit_bytes=1 << 20, options=options)
    return home
