"""State folders of cloudjob in which a submit finds what the first one on a machine makes.

Unpacking and compiling the entry and compiling the rules for secrets takes as long as the rest of a
small job. The tutorial, the demo and the tests of the wheel begin with an empty folder.
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
from cloudjob.package.pack import Options


def make_used_home(folder: Path) -> None:
    """Create a state folder as an earlier submit leaves it, without that submit's job."""
    # Copies of the entry's hundred files would cost seven times as much.
    shutil.copytree(_used(), folder, copy_function=os.link)


@functools.cache
def _used() -> Path:
    scratch = Path(tempfile.mkdtemp(prefix="cloudjob-used-"))
    atexit.register(shutil.rmtree, scratch)
    source, home = scratch / "source", scratch / "home"
    source.mkdir()
    (source / "train.py").write_text("print()\n")
    entry_of(home)
    options = Options(home=home)
    pack(source, scratch / "layer", script="train.py", limit_bytes=1 << 20, options=options)
    return home
