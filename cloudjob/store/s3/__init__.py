"""``s3://`` and ``obs://`` stores: objects in a bucket of S3 or of a compatible service."""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from cloudjob.errors import ObjectMissing, StoreError
from cloudjob.store import certificates, files
from cloudjob.store.base import GET_LIMIT_BYTES, RETRY_S, OnBytes, ignore_bytes
from cloudjob.store.parallel import call_with_timeout, iterate_in_parallel
from cloudjob.store.s3 import bucket_uri, errors
from cloudjob.store.s3 import client as clients
from cloudjob.store.s3.bucket_uri import BucketUri
from jobentry.contract import names

# Size of the parts of a multipart upload.
PART_BYTES = 8 * 1024 * 1024
# Age at which an unfinished multipart upload is removed.
_STALE_S = 24 * 3600.0
_OUT_OF_RANGE = 416
# Attempts to read all bytes of an object.
_READ_ATTEMPTS = 5
# Seconds that a small object or a list of keys may take, and the slowest rate for a larger one.
_READ_S, _LIST_S = 60.0, 600.0
_SLOWEST_BYTES_S = 64 * 1024


def from_uri(
    uri: str, environ: Mapping[str, str] | None = None, *, retry_s: float = RETRY_S
) -> S3Store:
    """Return the store of ``s3://bucket/prefix`` or ``obs://bucket/prefix``.

    The URI may end in options: ``?endpoint=URL&region=NAME&addressing=path|virtual&profile=NAME``.
    """
    bucket = bucket_uri.read(uri)
    if importlib.util.find_spec("boto3") is None:
        raise StoreError(
            f"opening the store {bucket.root}: boto3 is not installed",
            hint="pip install 'cloudjob[s3]'",
        )
    return S3Store(bucket, environ=environ, retry_s=retry_s)


class S3Store:
    """An object store in a bucket, below a prefix.

    Args:
        environ: Variables that may hold credentials and endpoint, by default the process's.
        retry_s: Seconds to retry a request while the store cannot be reached.
        part_bytes: Size of the parts of a multipart upload.
    """

    def __init__(
        self,
        uri: BucketUri,
        *,
        environ: Mapping[str, str] | None = None,
        retry_s: float = RETRY_S,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._uri = uri
        self._environ = os.environ if environ is None else environ
        self._part_bytes = part_bytes
        self._retry_s = retry_s
        self._retries = clients.Retries(uri, retry_s)
        self._lock = threading.Lock()
        self._connected: clients.S3Connection | None = None
        self._has_removed_unfinished = False

    def put(self, path: Path, key: str, *, on_progress: OnBytes = ignore_bytes) -> str:
        doing = f"writing {key} in {self._uri.root}"
        try:
            with self._request("writing", key) as where, path.open("rb") as file:
                before = path.stat()
                self._client.upload_fileobj(
                    file, **where, Config=self._transfer(), Callback=on_progress
                )
                after = path.stat()
        except OSError as error:
            raise StoreError(f"{doing}: reading {path}: {files.text(error)}") from error
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            self.delete(key)
            raise StoreError(
                f"{doing}: {path} changed while it was read",
                hint="submit again when the file is complete",
            )
        if before.st_size > self._part_bytes and not self._has_removed_unfinished:
            self._has_removed_unfinished = True
            self.remove_unfinished(_STALE_S)
        return self.uri(key)

    def put_bytes(self, data: bytes, key: str) -> str:
        with self._request("writing", key) as where:
            self._client.put_object(**where, Body=data)
        return self.uri(key)

    def get_bytes(self, key: str, *, limit_bytes: int = GET_LIMIT_BYTES) -> bytes:
        return self._read(key, limit_bytes)

    def get_range(self, key: str, offset: int, count: int) -> bytes:
        try:
            return self._read(key, count, Range=f"bytes={offset}-{offset + count - 1}")
        except StoreError as error:
            response = getattr(error.__cause__, "response", {})
            if response.get("ResponseMetadata", {}).get("HTTPStatusCode") == _OUT_OF_RANGE:
                return b""
            raise

    def get_each(
        self, keys: Sequence[str], *, limit_bytes: int = GET_LIMIT_BYTES
    ) -> Iterator[tuple[str, bytes]]:
        get = partial(self.get_bytes, limit_bytes=limit_bytes)
        return iterate_in_parallel(get, list(dict.fromkeys(keys)), abort=self.abort)

    def fetch(self, key: str, path: Path, *, on_progress: OnBytes = ignore_bytes) -> None:
        try:
            with (
                self._request("fetching", key) as where,
                files.replacing(path, is_durable=False) as f,
            ):
                sparse = files.SparseFile(f)
                self._client.download_fileobj(
                    **where, Fileobj=sparse, Config=self._transfer(), Callback=on_progress
                )
                sparse.finish()
        except OSError as error:
            raise StoreError(
                f"fetching {key} from {self._uri.root} to {path}: {files.text(error)}",
                hint=files.hint(error),
            ) from error

    def copy(self, key: str, target: str) -> None:
        bucket_uri.check("copying", target)
        with self._request("copying", key) as where:
            self._client.copy_object(**self._object(target), CopySource=where)

    def list(self, prefix: str = "", *, with_unfinished: bool = False) -> Iterator[str]:
        doing = f"listing {prefix or 'keys'} in {self._uri.root}"
        root = self._uri.key("")
        # ListObjects, not V2: OBS sometimes leaves out the continuation token of V2.
        pages = self._client.get_paginator("list_objects").paginate(
            Bucket=self._uri.bucket, Prefix=self._uri.key(prefix)
        )
        end_s = time.monotonic() + self._retry_s + _LIST_S
        with errors.translate_errors(doing, self._uri):
            keys_in_page = []
            for page in pages:
                if time.monotonic() > end_s:
                    raise StoreError(f"{doing}: the list does not end within {_LIST_S:g} s")
                if "IsTruncated" not in page:
                    raise StoreError(
                        f"{doing}: the answer is not a list of keys", hint="is the endpoint right?"
                    )
                keys_in_page += [item["Key"] for item in page.get("Contents", [])]
        # Some callers delete what is listed, and never anything else.
        keys_in_page = [key for key in keys_in_page if key.startswith(self._uri.key(prefix))]
        # Sorted here: SeaweedFS lists the folder ``a/`` before ``a.txt``.
        keys = (
            key.removeprefix(root)
            for key in sorted(keys_in_page, key=lambda key: key.encode("utf-8"))
        )
        return (key for key in keys if with_unfinished or not files.is_temporary(key))

    def exists(self, key: str) -> bool:
        try:
            with self._request("looking for", key) as where:
                self._client.head_object(**where)
        except ObjectMissing:
            return False
        return True

    def delete(self, key: str) -> None:
        # Some tools make an empty object with the name of a folder and a slash.
        name = key.removesuffix("/")
        with (
            suppress(ObjectMissing),
            self._request("deleting", name, may_be_temporary=True) as where,
        ):
            self._client.delete_object(**where | {"Key": where["Key"] + key[len(name) :]})

    def uri(self, key: str) -> str:
        bucket_uri.check("naming", key)
        return f"{self._uri.root}/{bucket_uri.quoted(key)}"

    def access(self) -> dict[str, str]:
        endpoint = self._connection.endpoint
        credentials = self._connection.credentials.get_frozen_credentials()
        variables = {
            names.CLOUDJOB_S3_ENDPOINT: endpoint.url,
            names.CLOUDJOB_S3_REGION: endpoint.region,
            names.CLOUDJOB_S3_ADDRESSING: endpoint.addressing,
            names.CLOUDJOB_S3_ACCESS_KEY: credentials.access_key,
            names.CLOUDJOB_S3_SECRET_KEY: credentials.secret_key,
            names.CLOUDJOB_S3_SESSION_TOKEN: credentials.token,
            names.CLOUDJOB_STORE_PATIENCE_S: self._environ.get(names.CLOUDJOB_STORE_PATIENCE_S, ""),
        }
        trusted = certificates.access(self._connection.bundle)
        return {**trusted, **{name: value for name, value in variables.items() if value}}

    def keys_end_at(self) -> float:
        """Return when its access keys expire, in seconds since 1970; 0 for never or unknown."""
        return self._connection.keys_end_at()

    def sign(self, method: str, key: str, limit_s: int) -> str:
        """Return a URL that lets anyone ``method`` the object for ``limit_s`` seconds.

        A URL signed with temporary credentials expires with them, if that is earlier.
        """
        action = {"GET": "get_object", "PUT": "put_object"}[method]
        with self._request("signing", key) as where:
            return str(self._client.generate_presigned_url(action, Params=where, ExpiresIn=limit_s))

    def abort(self) -> None:
        self._retries.abort()

    def remove_unfinished(self, older_than_s: float) -> int:
        """Abort multipart uploads older than ``older_than_s`` and return how many there were."""
        doing = f"removing unfinished uploads in {self._uri.root}"
        limit = datetime.now(timezone.utc).timestamp() - older_than_s
        with errors.translate_errors(doing, self._uri):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._uri.bucket, Prefix=self._uri.key("")
            )
            stale = [
                upload
                for page in pages
                for upload in page.get("Uploads", [])
                if upload["Initiated"].timestamp() <= limit
            ]
            for upload in stale:
                location = {"Bucket": self._uri.bucket, "Key": upload["Key"]}
                self._client.abort_multipart_upload(**location, UploadId=upload["UploadId"])
        return len(stale)

    @property
    def clock_ahead_s(self) -> float:
        return self._retries.clock_ahead_s

    @property
    def _client(self) -> Any:
        return self._connection.client

    @property
    def _connection(self) -> clients.S3Connection:
        with self._lock:
            if self._connected is None:
                self._connected = clients.connect(self._uri, self._environ, self._retries)
            return self._connected

    @contextmanager
    def _request(
        self, doing: str, key: str, *, may_be_temporary: bool = False
    ) -> Iterator[dict[str, str]]:
        """Check a key, yield boto3's parameters for the object, and translate errors of boto3."""
        bucket_uri.check(doing, key, may_be_temporary=may_be_temporary)
        with errors.translate_errors(f"{doing} {key} in {self._uri.root}", self._uri):
            yield self._object(key)

    def _object(self, key: str) -> dict[str, str]:
        return {"Bucket": self._uri.bucket, "Key": self._uri.key(key)}

    def _transfer(self) -> Any:
        from boto3.s3.transfer import TransferConfig

        # OBS accepts the classic client's requests; the CRT client adds checksums of its own.
        return TransferConfig(
            multipart_threshold=self._part_bytes,
            multipart_chunksize=self._part_bytes,
            max_concurrency=clients.AT_ONCE // 2,
            preferred_transfer_client="classic",
        )

    def _read(self, key: str, limit_bytes: int, **parameters: str) -> bytes:
        """Return the bytes of an object or of a range.

        A service that sends a byte now and then never exceeds the timeout of a single read, so the
        whole answer has a time limit.
        """
        limit_s = self._retry_s + _READ_S + limit_bytes / _SLOWEST_BYTES_S
        try:
            return call_with_timeout(
                limit_s, lambda: self._read_body(key, limit_bytes, **parameters)
            )
        except TimeoutError as error:
            raise StoreError(
                f"reading {key} in {self._uri.root}: not complete after {limit_s:.0f} s",
                hint="is the service, or the way to it, that slow?",
            ) from error

    def _read_body(self, key: str, limit_bytes: int, **parameters: str) -> bytes:
        from botocore.exceptions import IncompleteReadError, ResponseStreamingError
        from urllib3.exceptions import HTTPError, ProtocolError

        # ``Retries`` covers a request until its headers have arrived. The body of an object may
        # still break off, or that of an error response, whose exception botocore does not wrap.
        with self._request("reading", key) as where:
            for _ in range(_READ_ATTEMPTS - 1):
                with suppress(ProtocolError):
                    body = self._client.get_object(**where, **parameters)["Body"]
                    with suppress(HTTPError, IncompleteReadError, ResponseStreamingError):
                        return self._limited(key, body, limit_bytes)
            body = self._client.get_object(**where, **parameters)["Body"]
            return self._limited(key, body, limit_bytes)

    def _limited(self, key: str, body: Any, limit_bytes: int) -> bytes:
        """Return the bytes of a response that does not exceed the limit."""
        # Both may come in pieces: one byte more reveals a body that is too long.
        data = bytearray()
        while piece := body.read(min(limit_bytes + 1 - len(data), PART_BYTES)):
            data += piece
            if len(data) > limit_bytes:
                body.close()
                raise files.too_large(f"reading {key} in {self._uri.root}", limit_bytes)
        return bytes(data)
