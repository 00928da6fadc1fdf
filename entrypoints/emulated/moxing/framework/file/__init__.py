"""``moxing.file`` as the vendor documents it: local paths, ``s3://`` and ``obs://`` alike.

Start with ``file_io``, which has the functions; ``locations`` has files and folders.
"""

from moxing.framework.file import file_io as file_io
from moxing.framework.file.file_io import *  # noqa: F403 (the public names are listed there)
from moxing.framework.file.os_patches import shift as shift

__all__ = [*file_io.__all__, "file_io", "shift"]
