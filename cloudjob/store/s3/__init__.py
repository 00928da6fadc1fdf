"""Objects in a bucket of S3, or of a service that speaks it: ``s3://`` and ``obs://``."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote_plus

from cloudjob.errors import StoreError
from cloudjob.home import home as state_folder
from cloudjob.store import files
from cloudjob.store.base import PATIENCE_S, Tell, quiet
from cloudjob.store.files import replacing_descriptor
from cloudjob.store.parallel import each_in_parallel
from cloudjob.store.s3 import burst, download, keys, local, place, upload
from cloudjob.store.s3.keys import KeyRing
from cloudjob.store.s3.place import Place
from cloudjob.store.s3.wire import Patience, Request, Wire, document, presigned, query, text
from jobentry.contract import names

# What is longer comes by itself; and of a range SeaweedFS makes a third less work than of a whole.
_SHORT = {"range": f"bytes=0-{64 * 1024 - 1}"}
_PARTIAL, _OUT_OF_RANGE = 206, 416
# The most that is asked for at once and kept in memory.
_LONGEST_PIECE_BYTES = 32 * 1024 * 1024
# How many keys a service names at a time.
_LISTED = 1000


def from_uri(
    uri: str, environ: Mapping[str, str] | None = None, *, patience_s: float = PATIENCE_S
) -> S3Store:
    """Return the store of ``s3://bucket/prefix`` or ``obs://bucket/prefix``.

    The URI may end in options: ``?endpoint=URL&region=NAME&addressing=path|virtual&profile=NAME``.
    """
    found = place.read(uri)
    if importlib.util.find_spec("botocore") is None:
        raise StoreError(
            f"open store {found.root}: botocore is not installed",
            hint="pip install 'cloudjob[s3]'",
        )
    return S3Store(found, environ=environ, patience=Patience().of(patience_s))


class S3Store:
    """An object store in a bucket, below a prefix.

    Args:
        place: Where it is.
        patience: How long what goes wrong may go wrong.
        environ: Where keys and endpoint may come from; by default the process's own.
        part_bytes: How long the parts of a large object are.
    """

    def __init__(
        self,
        place: Place,
        *,
        patience: Patience = Patience(),  # noqa: B008 (a frozen value)
        environ: Mapping[str, str] | None = None,
        part_bytes: int = upload.PART_BYTES,
    ) -> None:
        self._place = place
        self._patience = patience
        self._part_bytes = part_bytes
        self._environ = os.environ if environ is None else environ
        self._lock = threading.Lock()
        self._made: Wire | None = None
        self._keys = KeyRing(place, self._environ, Path.home())
        self._notes = state_folder() / "uploads"

    def put(self, path: Path, key: str, *, tell: Tell = quiet) -> str:
        """Store the file at ``path`` under ``key`` and return the object's URI."""
        place.check("put", key)
        try:
            source = local.File(path)
        except OSError as error:
            raise StoreError(
                f"put {key} in {self._root}: read {path}: {files.text(error)}"
            ) from error
        try:
            self._put(source, key, str(path), tell)
        finally:
            source.close()
        return self.uri(key)

    def put_bytes(self, data: bytes, key: str) -> str:
        """Store ``data`` under ``key`` and return the object's URI."""
        place.check("put", key)
        self._put(local.Bytes(data), key, "", quiet)
        return self.uri(key)

    def get_bytes(self, key: str) -> bytes:
        """Return the object's bytes."""
        place.check("get", key)
        target = _Memory()
        size_bytes = self._get("get", key, "in", target, quiet)
        return bytes(target.data[:size_bytes])

    def get_range(self, key: str, offset: int, count: int) -> bytes:
        """Return ``count`` of the object's bytes from ``offset`` on, fewer where it ends before."""
        place.check("get", key)
        return b"".join(
            self._get_piece(key, begin, min(_LONGEST_PIECE_BYTES, offset + count - begin))
            for begin in range(offset, offset + count, _LONGEST_PIECE_BYTES)
        )

    def get_each(self, keys: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Yield each of many small objects with its key, in whatever order they come."""
        wanted = dict.fromkeys(keys)
        for key in wanted:
            place.check("get", key)
        # Nobody reads what these would be for: what is refused is asked for once more.
        requests = [Request("GET", key, self._key(key), headers=_SHORT) for key in wanted]
        late = []
        for request, answer in burst.answers(self._wire, requests):
            if answer is not None and local.is_whole(answer):
                yield request.doing, answer.body
            else:
                late.append(request.doing)
        yield from each_in_parallel(self.get_bytes, late, abort=self.abort)

    def fetch(self, key: str, path: Path, *, tell: Tell = quiet) -> None:
        """Write the object to the file ``path``, whole or not at all."""
        place.check("fetch", key)
        try:
            with replacing_descriptor(path, is_durable=False) as descriptor:
                target = _OpenFile(descriptor)
                size_bytes = self._get("fetch", key, "in", target, tell)
                # A try that brought another object may have been longer.
                if target.end > size_bytes:
                    os.truncate(descriptor, size_bytes)
        except (OSError, local.LocalError) as error:
            cause = error.error if isinstance(error, local.LocalError) else error
            raise StoreError(
                f"fetch {key} from {self._root}: to {path}: {files.text(cause)}",
                hint=files.hint(cause),
            ) from error

    def copy(self, key: str, target: str) -> None:
        """Make the object ``target`` the same as ``key``, without its bytes coming here."""
        place.check("copy", key)
        place.check("copy", target)
        doing = f"copy {key} to {target} in {self._root}"
        source = f"/{self._place.bucket}/{place.quoted(self._key(key))}"
        headers = {"x-amz-copy-source": source}
        answer = self._wire.send(Request("PUT", doing, self._key(target), headers=headers))
        if answer.refusal is not None:
            raise self._wire.refused(doing, answer.refusal)

    def list(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys that start with ``prefix``, a string, in the order of their bytes."""
        # SeaweedFS lists a folder before what sorts between its name and its slash.
        own = self._key("")
        found = sorted(self._found(prefix), key=lambda key: key.encode("utf-8"))
        return (key.removeprefix(own) for key in found)

    def exists(self, key: str) -> bool:
        """Say whether there is an object under ``key``."""
        place.check("look for", key)
        doing = f"look for {key} in {self._root}"
        return self._wire.send(Request("HEAD", doing, self._key(key))).refusal is None

    def delete(self, key: str) -> None:
        """Leave no object under ``key``, whether or not there was one."""
        place.check("delete", key)
        self._wire.send(Request("DELETE", f"delete {key} in {self._root}", self._key(key)))

    def uri(self, key: str) -> str:
        """Return the URI that an object under ``key`` has or would have."""
        place.check("name", key)
        return f"{self._root}/{place.quoted(key)}"

    def access(self) -> dict[str, str]:
        """Return the variables, secrets among them, with which a node reaches the same objects."""
        current = self._keys.current()
        endpoint = self._wire.endpoint
        variables = {
            names.CLOUDJOB_S3_ENDPOINT: endpoint.url,
            names.CLOUDJOB_S3_REGION: endpoint.region,
            names.CLOUDJOB_S3_ADDRESSING: endpoint.addressing,
            names.CLOUDJOB_S3_ACCESS_KEY: current.access_key,
            names.CLOUDJOB_S3_SECRET_KEY: current.secret_key,
            names.CLOUDJOB_S3_SESSION_TOKEN: current.token,
        }
        return {name: value for name, value in variables.items() if value}

    def sign(self, method: str, key: str, limit_s: int) -> str:
        """Return the address at which anybody may ``method`` the object for so long.

        Temporary keys end earlier, and what they have signed with them.
        """
        place.check("sign", key)
        return presigned(method, self._wire.endpoint, self._key(key), self._keys.current(), limit_s)

    def abort(self) -> None:
        """Break off the requests of all threads: each raises a ``StoreError``."""
        if self._made is not None:
            self._made.abort()

    def sweep(self, older_than_s: float) -> int:
        """Remove what writers that were killed so long ago have left half done."""
        doing = f"remove uploads in {self._root}"
        return upload.abort_stale(self._wire, doing, self._key(""), older_than_s)

    @property
    def clock_ahead_s(self) -> float:
        """How far this machine's clock is ahead of the service's, by its last answer."""
        return self._wire.skew_s

    # -- inside -------------------------------------------------------------------------------

    @property
    def _root(self) -> str:
        return self._place.root

    @property
    def _wire(self) -> Wire:
        """The connections; made when first needed, as it may read files."""
        with self._lock:
            if self._made is None:
                profile = keys.profile(self._place)
                endpoint = place.endpoint(self._place, self._environ, profile, Path.home())
                self._made = Wire(self._place, endpoint, self._keys, self._patience)
            return self._made

    def _key(self, key: str) -> str:
        return f"{self._place.prefix}/{key}" if self._place.prefix else key

    def _get_piece(self, key: str, offset: int, count: int) -> bytes:
        doing = f"get {key} in {self._root}"
        headers = {"range": f"bytes={offset}-{offset + count - 1}"}
        answer = self._wire.ask(Request("GET", doing, self._key(key), headers=headers))
        if answer.status == _OUT_OF_RANGE:
            return b""
        if answer.refusal is not None:
            raise self._wire.refused(doing, answer.refusal)
        # A service may send the whole object instead.
        return answer.body if answer.status == _PARTIAL else answer.body[offset : offset + count]

    def _put(self, source: local.Source, key: str, path: str, tell: Tell) -> None:
        doing = f"put {key} in {self._root}"
        told = _together(tell)
        whole = self._key(key)
        try:
            upload.put(
                upload.Upload(self._wire, doing, whole, source, self._part_bytes, self._notes, told)
            )
        except local.LocalError as error:
            raise StoreError(f"{doing}: read {path}: {files.text(error.error)}") from error
        except local.SourceChanged as error:
            raise StoreError(
                f"{doing}: {path} changed while it was read", hint="submit again when it is quiet"
            ) from error

    def _get(self, verb: str, key: str, where: str, target: download.Target, tell: Tell) -> int:
        doing = f"{verb} {key} {where} {self._root}"
        whole = self._key(key)
        told = _together(tell)
        return download.get(
            download.Download(self._wire, doing, whole, target, self._part_bytes, told)
        )

    def _found(self, prefix: str) -> Iterator[str]:
        """Yield whole keys in the order of the service."""
        doing = f"list {prefix} in {self._root}"
        marker, markers = "", set[str]()
        while True:
            found, is_last = self._listed(doing, self._key(prefix), marker)
            yield from found
            if is_last:
                return
            marker = found[-1] if found else marker
            if marker in markers:
                raise StoreError(f"{doing}: the service lists the same keys again and again")
            markers.add(marker)

    def _listed(self, doing: str, prefix: str, marker: str) -> tuple[Sequence[str], bool]:
        """Return whole keys after ``marker``, and whether they are the last.

        The first version of the call: the second one lacks its token on OBS now and then.
        """
        asked = query(prefix=prefix, marker=marker, max_keys=_LISTED, encoding_type="url")
        answer = self._wire.ask(Request("GET", doing, query=asked))
        if answer.refusal is not None:
            raise self._wire.refused(doing, answer.refusal)
        listed = document(answer, doing)
        if not listed.tag.endswith("ListBucketResult"):
            raise StoreError(f"{doing}: the service lists no keys", hint="is the endpoint right?")
        found = [text(item, "Key") for item in listed.iterfind("{*}Contents")]
        if text(listed, "EncodingType") == "url":
            found = [unquote_plus(key) for key in found]
        return found, text(listed, "IsTruncated") != "true"


def _together(tell: Tell) -> Tell:
    """Return ``tell`` for many threads, one at a time."""
    if tell is quiet:
        return tell
    lock = threading.Lock()

    def told(count: int) -> None:
        with lock:
            tell(count)

    return told


class _Memory:
    """A target in memory."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._lock = threading.Lock()

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes to their place."""
        with self._lock:
            if len(self.data) < offset:
                self.data.extend(bytes(offset - len(self.data)))
            self.data[offset : offset + len(data)] = data

    def read(self, offset: int, count: int) -> bytes:
        """Give back what was written."""
        return bytes(self.data[offset : offset + count])


class _OpenFile:
    """A target that is an open file.

    Args:
        descriptor: An empty file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self.end = 0

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes to their place."""
        with self._lock:
            self.end = max(self.end, offset + len(data))
        while data:
            count = os.pwrite(self._descriptor, data, offset)
            data, offset = data[count:], offset + count

    def read(self, offset: int, count: int) -> bytes:
        """Give back what was written."""
        return os.pread(self._descriptor, count, offset)
