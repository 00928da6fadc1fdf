"""The service's own client of the emulated OBS, for code, inputs, outputs and logs."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from cloudjob.emulator.models import ObsPlace
from jobentry.contract.sigv4 import Keys
from jobentry.system.trees import folder_below, open_file_below

# The bucket for logs of jobs that do not name a place for their logs.
LOG_BUCKET = "modelarts-emulator-logs"
_AT_ONCE = 8


class Object(NamedTuple):
    """An object; ``path`` is its key below the listed prefix."""

    path: str
    key: str
    size_bytes: int
    etag: str


class ObsError(Exception):
    """An error of OBS, with its message."""


class Obs:
    """A client of the emulated OBS."""

    def __init__(self, endpoint: str, keys: Keys, region: str) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._region = region

    @functools.cached_property
    def _client(self) -> Any:
        import boto3
        from botocore.config import Config

        return boto3.session.Session().client(
            "s3",
            endpoint_url=self._endpoint,
            aws_access_key_id=self._keys.access_key,
            aws_secret_access_key=self._keys.secret_key,
            region_name=self._region,
            config=Config(
                signature_version="s3v4",
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                retries={"max_attempts": 3, "mode": "standard"},
                max_pool_connections=32,
            ),
        )

    def has_bucket(self, bucket: str) -> bool:
        """Whether a bucket exists."""
        from botocore.exceptions import ClientError

        with _translate_errors():
            try:
                self._client.head_bucket(Bucket=bucket)
            except ClientError:
                return False
        return True

    def make_bucket(self, bucket: str) -> None:
        """Create a bucket unless it exists."""
        if not self.has_bucket(bucket):
            with _translate_errors():
                self._client.create_bucket(Bucket=bucket)

    def list(self, bucket: str, prefix: str, limit: int = 0) -> list[Object]:
        """Return the objects below a prefix; at most ``limit``, 0 for all."""
        objects: list[Object] = []
        with _translate_errors():
            pages = self._client.get_paginator("list_objects").paginate(
                Bucket=bucket,
                Prefix=prefix,
                PaginationConfig={"MaxItems": limit} if limit else {},
            )
            for page in pages:
                objects += [
                    Object(item["Key"][len(prefix) :], item["Key"], item["Size"], item["ETag"])
                    for item in page.get("Contents", ())
                ]
        return objects

    def download(self, place: ObsPlace, folder: Path) -> tuple[int, int]:
        """Copy an object, or all objects of a folder, to ``folder``; return files and bytes."""
        objects = self.list(place.bucket, place.prefix)
        pairs = [
            (item, folder / item.path)
            for item in objects
            if item.path and not item.path.endswith("/") and _is_below(item.path)
        ]
        # An empty object with others below it is a folder.
        folders = {str(above) for _, path in pairs for above in path.relative_to(folder).parents}
        pairs = [pair for pair in pairs if pair[0].size_bytes or pair[0].path not in folders]
        if not pairs and place.key and not place.key.endswith("/"):
            first = self.list(place.bucket, place.key, limit=1)
            name = place.key.rpartition("/")[2]
            pairs = [(item, folder / name) for item in first if item.key == place.key]
        folder.mkdir(parents=True, exist_ok=True)

        def fetch(pair: tuple[Object, Path]) -> None:
            item, path = pair
            with _translate_errors():
                path.parent.mkdir(parents=True, exist_ok=True)
                self._client.download_file(place.bucket, item.key, str(path))

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(fetch, pairs))
        return len(pairs), sum(item.size_bytes for item, _ in pairs)

    def upload(
        self, root: Path, folder: Path, place: ObsPlace, states: dict[str, tuple[int, int]]
    ) -> tuple[int, int]:
        """Upload new and changed files of ``folder``; return their number and bytes.

        Symbolic links are not followed: a job may replace any file or folder below ``root``.

        Args:
            states: Size and time of each uploaded file; it is updated.
        """
        names = list(_files(root, folder))

        def put(name: str) -> int:
            path = folder / name
            try:
                descriptor = open_file_below(str(root), str(path.relative_to(root)))
            except OSError:
                return -1  # a link, or a file that has just been renamed
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                state = (status.st_size, status.st_mtime_ns)
                if states.get(str(path)) == state:
                    return -1
                with _translate_errors():
                    self._client.upload_fileobj(file, place.bucket, place.prefix + name)
            states[str(path)] = state
            return status.st_size

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            sizes = [size for size in pool.map(put, names) if size >= 0]
        return len(sizes), sum(sizes)

    def put(self, path: Path, place: ObsPlace, content_type: str = "text/plain") -> None:
        """Copy one file to one key."""
        with _translate_errors():
            self._client.upload_file(
                str(path), place.bucket, place.key, ExtraArgs={"ContentType": content_type}
            )

    def url(self, place: ObsPlace, content_type: str, seconds: int) -> str:
        """Return a URL that gives read access to an object for some seconds."""
        values = {"Bucket": place.bucket, "Key": place.key, "ResponseContentType": content_type}
        with _translate_errors():
            return str(self._client.generate_presigned_url("get_object", values, ExpiresIn=seconds))


def _files(root: Path, folder: Path) -> Iterator[str]:
    """Yield the regular files below a folder, as relative paths."""
    with (
        contextlib.suppress(OSError),
        folder_below(str(root), str(folder.relative_to(root))) as start,
    ):
        for inside, _, names, directory in os.fwalk(".", dir_fd=start):
            for name in sorted(names):
                with contextlib.suppress(OSError):
                    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield os.path.normpath(f"{inside}/{name}")


def _is_below(path: str) -> bool:
    """Whether a key stays in the folder that it is copied to."""
    return ".." not in path.split("/") and not path.startswith("/")


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (Boto3Error, BotoCoreError, ClientError, OSError) as error:
        raise ObsError(str(error)) from error
