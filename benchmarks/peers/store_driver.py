"""Transfer 200 MB, or 2,000 small files, between a folder and a bucket with one S3 client.

    python store_driver.py CLIENT up|down big|small FOLDER PREFIX

Each client is used as its documentation shows. It prints the seconds taken, without the start of
Python and the import of the client, and then checks that everything has arrived.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

BUCKET = "bench"
BIG = "big.bin"
_AT_ONCE = 16
_ENDPOINT = os.environ["AWS_ENDPOINT_URL"]
_KEYS = (os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])

Move = Callable[[Path, str], object]


class Client(NamedTuple):
    """The functions with which a client transfers files.

    Args:
        up: Uploads a file under a key.
        down: Downloads it.
        whole: Transfers everything itself: ``up`` or ``down``, the folder, the prefix of the keys.
        many: Downloads many small files itself.
    """

    up: Move | None = None
    down: Move | None = None
    whole: Callable[[str, Path, str], object] | None = None
    many: Callable[[list[tuple[Path, str]]], object] | None = None


def main(client: str, way: str, size: str, folder: Path, prefix: str) -> None:
    """Time one client in one direction."""
    peer = _CLIENTS[client]()
    source = folder / size
    files = sorted(path for path in source.iterdir())
    target = Path(os.environ["TMPDIR"], "out")
    target.mkdir()
    began = time.perf_counter()
    if peer.whole is not None:
        peer.whole(way, source if way == "up" else target, f"{prefix}{size}/")
    elif way == "up":
        _each(peer.up, [(path, f"{prefix}{size}/{path.name}") for path in files])
    else:
        pairs = [(target / path.name, f"{prefix}{size}/{path.name}") for path in files]
        if peer.many is not None and size == "small":
            peer.many(pairs)
        else:
            _each(peer.down, pairs)
    print(time.perf_counter() - began)
    if way == "down":
        _check(files, target)


def _each(move: Move | None, pairs: list[tuple[Path, str]]) -> None:
    assert move is not None
    if len(pairs) == 1:
        move(*pairs[0])
        return
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda pair: move(*pair), pairs))


def _check(files: list[Path], target: Path) -> None:
    for path in files:
        actual, expected = (
            hashlib.sha256(p.read_bytes()).digest() for p in (target / path.name, path)
        )
        if actual != expected:
            sys.exit(f"{path.name} did not arrive as it was")


def _boto3() -> Client:
    import boto3
    from botocore.config import Config

    config = Config(max_pool_connections=_AT_ONCE, s3={"addressing_style": "path"})
    client = boto3.client("s3", config=config)

    def up(path: Path, key: str) -> None:
        client.upload_file(str(path), BUCKET, key)

    def down(path: Path, key: str) -> None:
        client.download_file(BUCKET, key, str(path))

    return Client(up, down)


def _obstore() -> Client:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=_ENDPOINT,
        access_key_id=_KEYS[0],
        secret_access_key=_KEYS[1],
        region=os.environ["AWS_REGION"],
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )

    def up(path: Path, key: str) -> None:
        obstore.put(store, key, path)

    def down(path: Path, key: str) -> None:
        with path.open("wb") as file:
            for chunk in obstore.get(store, key):
                file.write(chunk)

    return Client(up, down)


def _minio() -> Client:
    from minio import Minio

    client = Minio(
        _ENDPOINT.partition("://")[2], *_KEYS, secure=False, region=os.environ["AWS_REGION"]
    )

    def up(path: Path, key: str) -> None:
        client.fput_object(BUCKET, key, str(path))

    def down(path: Path, key: str) -> None:
        client.fget_object(BUCKET, key, str(path))

    return Client(up, down)


def _s5cmd() -> Client:
    program = str(Path(sys.executable).with_name("s5cmd"))

    def whole(way: str, folder: Path, prefix: str) -> None:
        there = f"s3://{BUCKET}/{prefix}"
        paths = [f"{folder}/", there] if way == "up" else [f"{there}*", f"{folder}/"]
        argv = [program, "--endpoint-url", _ENDPOINT, "--log", "error", "cp", *paths]
        subprocess.run(argv, check=True)

    return Client(whole=whole)


def _cloudjob() -> Client:
    from cloudjob.store import open_store
    from cloudjob.store.files import replacing

    store = open_store(f"s3://{BUCKET}")
    # This imports boto3, which the driver of boto3 has also done by now.
    store.access()

    def many(pairs: list[tuple[Path, str]]) -> None:
        paths = {key: path for path, key in pairs}
        for key, data in store.get_each(list(paths)):
            # Written as `cloudjob outputs` does: completely or not at all.
            with replacing(paths[key], is_durable=False) as file:
                file.write(data)

    return Client(store.put, lambda path, key: store.fetch(key, path), many=many)


_CLIENTS: dict[str, Callable[[], Client]] = {
    "boto3": _boto3,
    "obstore": _obstore,
    "minio": _minio,
    "s5cmd": _s5cmd,
    "cloudjob": _cloudjob,
}

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), sys.argv[5])
