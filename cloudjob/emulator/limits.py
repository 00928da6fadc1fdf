"""What the platform allows a code directory."""

from __future__ import annotations

from cloudjob.emulator.answers import ApiError
from cloudjob.emulator.obs import Object
from cloudjob.emulator.settings import Settings


def check_code_limits(found: list[Object], settings: Settings) -> None:
    """Refuse a code directory that is too large, too deep or of too many files.

    Raises:
        ApiError: It is.
    """
    files = [item for item in found if item.path and not item.path.endswith("/")]
    if len(files) > settings.code_limit_files:
        raise ApiError("ModelArts.2759", settings.code_limit_files)
    if max((item.path.count("/") for item in files), default=0) > settings.code_limit_depth:
        raise ApiError("ModelArts.2760", settings.code_limit_depth)
    if sum(item.size_bytes for item in files) > settings.code_limit_bytes:
        raise ApiError("ModelArts.2761", f"{settings.code_limit_bytes / (1 << 30):g}")
