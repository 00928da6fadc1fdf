"""Moves 200 MB, or 2,000 small files, between a folder and a bucket with one client of S3.

    python store_driver.py CLIENT up|down big|small FOLDER PREFIX

Each client does it as its makers show it. Prints the seconds that it took, without the start of
Python and the import of the client, and checks afterwards that all has arrived.
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
from typing import Any

BUCKET = "bench"
BIG = "big.bin"
_AT_ONCE = 16
_ENDPOINT = os.environ["AWS_ENDPOINT_URL"]
_KEYS = (os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])

Move = Callable[[Path, str], object]


def main(client: str, way: str, size: str, folder: Path, prefix: str) -> None:
    """Time one way of one client."""
    up, down, whole = _CLIENTS[client]()
    source = folder / size
    files = sorted(path for path in source.iterdir())
    target = Path(os.environ["TMPDIR"], "out")
    target.mkdir()
    began = time.perf_counter()
    if whole is not None:
        whole(way, source if way == "up" else target, f"{prefix}{size}/")
    elif way == "up":
        _each(up, [(path, f"{prefix}{size}/{path.name}") for path in files])
    else:
        _each(down, [(target / path.name, f"{prefix}{size}/{path.name}") for path in files])
    print(time.perf_counter() - began)
    if way == "down":
        _check(files, target)


def _each(move: Move, pairs: list[tuple[Path, str]]) -> None:
    if len(pairs) == 1:
        move(*pairs[0])
        return
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda pair: move(*pair), pairs))


def _check(files: list[Path], target: Path) -> None:
    for path in files:
        found, wanted = (
            hashlib.sha256(p.read_bytes()).digest() for p in (target / path.name, path)
        )
        if found != wanted:
            sys.exit(f"{path.name} did not arrive as it was")


def _boto3() -> tuple[Any, Any, None]:
    import boto3
    from botocore.config import Config

    config = Config(max_pool_connections=_AT_ONCE, s3={"addressing_style": "path"})
    client = boto3.client("s3", config=config)

    def up(path: Path, key: str) -> None:
        client.upload_file(str(path), BUCKET, key)

    def down(path: Path, key: str) -> None:
        client.download_file(BUCKET, key, str(path))

    return up, down, None


def _obstore() -> tuple[Any, Any, None]:
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

    return up, down, None


def _minio() -> tuple[Any, Any, None]:
    from minio import Minio

    client = Minio(
        _ENDPOINT.partition("://")[2], *_KEYS, secure=False, region=os.environ["AWS_REGION"]
    )

    def up(path: Path, key: str) -> None:
        client.fput_object(BUCKET, key, str(path))

    def down(path: Path, key: str) -> None:
        client.fget_object(BUCKET, key, str(path))

    return up, down, None


def _s5cmd() -> tuple[None, None, Any]:
    program = str(Path(sys.executable).with_name("s5cmd"))

    def whole(way: str, folder: Path, prefix: str) -> None:
        there = f"s3://{BUCKET}/{prefix}"
        words = [f"{folder}/", there] if way == "up" else [f"{there}*", f"{folder}/"]
        argv = [program, "--endpoint-url", _ENDPOINT, "--log", "error", "cp", *words]
        subprocess.run(argv, check=True)

    return None, None, whole


def _cloudjob() -> tuple[Any, Any, None]:
    from cloudjob.store import open_store

    store = open_store(f"s3://{BUCKET}")
    return store.put, lambda path, key: store.fetch(key, path), None


_CLIENTS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "boto3": _boto3,
    "obstore": _obstore,
    "minio": _minio,
    "s5cmd": _s5cmd,
    "cloudjob": _cloudjob,
}

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), sys.argv[5])
