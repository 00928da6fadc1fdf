"""Requests to OBS about the bucket of a store, with the user's own keys."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cloudjob.errors import SOCKS, BackendError
from jobentry.contract.sigv4 import Keys

_ADDRESS = re.compile(r"[\d.]+|localhost")
_NETWORK = "can this machine reach it, and are HTTPS_PROXY and NO_PROXY right?"
_CONNECT_S, _ANSWER_S, _TRIES = 10.0, 30.0, 3


class BucketError(BackendError):
    """OBS refused, or did not answer.

    Args:
        code: OBS's own code or HTTP status; empty if it did not answer.
    """

    def __init__(self, message: str, code: str = "", *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code

    @property
    def is_missing(self) -> bool:
        """Whether there is no such bucket."""
        return self.code in ("NoSuchBucket", "404", "HTTP 404")

    @property
    def is_skewed(self) -> bool:
        """Whether OBS refuses the time of the request."""
        return self.code == "RequestTimeTooSkewed"


class Bucket:
    """The bucket of an ``obs://`` URI, with the options of its store."""

    def __init__(self, store: str, keys: Keys, region: str) -> None:
        uri, _, self._options = store.partition("?")
        self.name = uri.removeprefix("obs://").partition("/")[0]
        self._doing = f"asking for {uri}"
        self._keys = keys
        self._region = region

    def region(self) -> str:
        """Return the region of the bucket; empty if OBS does not report it."""
        with self._client() as client:
            answer = client.get_bucket_location(Bucket=self.name)
            return str(answer.get("LocationConstraint") or "").strip()

    def is_encrypted(self) -> bool:
        """Return whether OBS encrypts the bucket's objects; False if it does not answer."""
        with contextlib.suppress(BucketError), self._client() as client:
            answer = client.get_bucket_encryption(Bucket=self.name)
            rules = answer.get("ServerSideEncryptionConfiguration", {}).get("Rules", [])
            return any("ApplyServerSideEncryptionByDefault" in rule for rule in rules)
        return False

    def has(self, key: str) -> bool:
        """Return whether this object exists, or any object below it as a folder."""
        folder = key.rstrip("/") + "/" if key else ""
        # Of all keys that start with the name of an object, that object comes first.
        return self._first(key) == key != "" or self._first(folder) != ""

    def _first(self, prefix: str) -> str:
        """Return the first key that starts with ``prefix``; empty when there is none."""
        with self._client() as client:
            answer = client.list_objects(Bucket=self.name, Prefix=prefix, MaxKeys=1)
            return str(next((item["Key"] for item in answer.get("Contents", ())), ""))

    @contextlib.contextmanager
    def _client(self) -> Iterator[Any]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield _client(self._options, self._keys, self._region)
        except ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            code = str(error.response["Error"].get("Code") or f"HTTP {status}")
            raise BucketError(f"{self._doing}: OBS refuses: {code}", code) from error
        except (BotoCoreError, ValueError) as error:
            reason = " ".join(str(error).split())
            is_socks = "://socks" in reason
            problem, hint = SOCKS if is_socks else (reason, _NETWORK)
            raise BucketError(f"{self._doing}: {problem}", hint=hint) from error


# Creating a client takes longer than a request.
@functools.lru_cache(maxsize=4)
def _client(store_options: str, keys: Keys, region: str) -> Any:
    import boto3
    from botocore.config import Config

    options = {name: values[0] for name, values in parse_qs(store_options).items()}
    region = options.get("region") or region
    endpoint = options.get("endpoint") or f"https://obs.{region}.myhuaweicloud.com"
    is_address = _ADDRESS.fullmatch(urlsplit(endpoint).hostname or "") is not None
    is_path = is_address or options.get("addressing") == "path"
    return boto3.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name=region or "local",
        aws_access_key_id=keys.access_key,
        aws_secret_access_key=keys.secret_key,
        aws_session_token=keys.token or None,
        config=Config(
            signature_version="s3v4",
            s3={
                "addressing_style": "path" if is_path else "virtual",
                "payload_signing_enabled": False,
            },
            connect_timeout=_CONNECT_S,
            read_timeout=_ANSWER_S,
            retries={"total_max_attempts": _TRIES, "mode": "standard"},
        ),
    )
