"""The emulated OBS, accessed through boto3 and the vendor's SDK, and its injected faults."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import os
import time
import warnings
import zlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from botocore.exceptions import ClientError
from hypothesis import given
from hypothesis import strategies as st

from cloudjob.emulator import daemon
from cloudjob.emulator.obs.names import client_names, stored_name
from jobentry.contract import sigv4
from jobentry.contract.sigv4 import Keys
from tests.support.emulator import Api, await_true, new_name, s3_client

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # newer Pythons warn about invalid escapes in its sources
    from obs import ObsClient

pytestmark = pytest.mark.filterwarnings("default")


@contextlib.contextmanager
def vendor_client(
    api: Api, signature: str, access: str, secret: str, token: str | None = None
) -> Iterator[Any]:
    client = ObsClient(
        access_key_id=access,
        secret_access_key=secret,
        security_token=token,
        server=api.address.s3_endpoint,
        signature=signature,
        path_style=True,
        region=api.address.region,
        is_signature_negotiation=False,
    )
    yield client
    client.close()


@pytest.fixture(scope="module", params=["obs", "v2", "v4"])
def vendor(request: pytest.FixtureRequest, session_api: Api, s3: Any) -> Iterator[Any]:
    """The vendor's client, with each of its signature types."""
    address = session_api.address
    keys = (address.access_key, address.secret_key)
    with vendor_client(session_api, request.param, *keys) as client:
        yield client


@pytest.mark.parametrize("key", ["plain.txt", "a/b/ü ~+=.bin"])
def test_both_clients_see_the_same_objects(vendor: Any, s3: Any, key: str):
    key = f"{new_name()}/{key}"
    data = os.urandom(300_000)
    assert vendor.putContent("data", key, data).status == 200
    assert s3.get_object(Bucket="data", Key=key)["Body"].read() == data
    s3.put_object(Bucket="data", Key=key + "2", Body=data[::-1])
    answer = vendor.getObject("data", key + "2", loadStreamInMemory=True)
    listed = vendor.listObjects("data", prefix=key)

    assert (answer.status, answer.body.buffer) == (200, data[::-1])
    assert [(item.key, item.size) for item in listed.body.contents] == [
        (key, len(data)),
        (key + "2", len(data)),
    ]
    assert vendor.deleteObject("data", key).status == 204
    assert [item["Key"] for item in s3.list_objects(Bucket="data", Prefix=key)["Contents"]] == [
        key + "2"
    ]
    assert vendor.getObject("data", key, loadStreamInMemory=True).status == 404


PLAIN_KEYS = ["a/b", "a", "b", "c", "h/.i"]
ODD_KEYS = [
    *("a//b", "/a", "a\\b", "a/./b", "../c", "d//e/"),
    *("d/" + "ü" * 300, "e" * 256 + "/f"),
]


def test_names_of_objects_stay_as_they_are(vendor: Any, s3: Any):
    """Stored as files, such keys would be invalid or collide with the keys of other objects."""
    all_keys = sorted(ODD_KEYS + PLAIN_KEYS)
    s3.create_bucket(Bucket=(bucket := new_name()))
    for key in all_keys:
        assert vendor.putContent(bucket, key, key).status == 200

    for listed in (s3.list_objects(Bucket=bucket), s3.list_objects_v2(Bucket=bucket)):
        assert sorted(item["Key"] for item in listed["Contents"]) == all_keys
    # A key that ends with a slash is a folder, whose content is not stored.
    for key in (key for key in all_keys if not key.endswith("/")):
        assert s3.get_object(Bucket=bucket, Key=key)["Body"].read().decode() == key
    for key in ODD_KEYS:
        for prefix in (key[: key.rfind("/") + 1], key):
            contents = vendor.listObjects(bucket, prefix=prefix).body.contents
            assert key in [item.key for item in contents]
    source = {"Bucket": bucket, "Key": "../c"}
    s3.copy_object(Bucket=bucket, Key="copy//of", CopySource=source)
    assert s3.get_object(Bucket=bucket, Key="copy//of")["Body"].read() == b"../c"
    odd_objects = [{"Key": key} for key in (*ODD_KEYS, "copy//of")]
    deleted = s3.delete_objects(Bucket=bucket, Delete={"Objects": odd_objects})["Deleted"]
    assert sorted(item["Key"] for item in deleted) == sorted(item["Key"] for item in odd_objects)
    assert [item["Key"] for item in s3.list_objects(Bucket=bucket)["Contents"]] == sorted(
        PLAIN_KEYS
    )


UNUSUAL_URL_KEYS = [
    *("a//b", "//a", "a\\b", "a/./b", "../c", "d/..", ".", "q?x=1&y#z"),
    *("a b+c%2Fd%", "u\u0308/\u00fc", "'\"<&>;=@!*()~$,:"),
    *("n" * 300, "/".join(["m" * 120] * 8) + "/" + "ü" * 19 + "x"),
]


def fetched(url: str, method: str = "GET", body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    """Request exactly this URL; most libraries would normalize its dot segments."""
    parts = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(parts.netloc, timeout=60)) as connection:
        target = parts.path + ("?" + parts.query if parts.query else "")
        connection.request(method, target, body=body or None, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


@pytest.mark.parametrize("is_temporary", [False, True])
@pytest.mark.parametrize("kind", ["s3v4", "s3", "vendor v4", "vendor v2"])
def test_a_url_with_a_signature_reads_and_writes_any_name(
    api: Api, s3: Any, kind: str, is_temporary: bool
):
    keys: tuple[str, ...] = (api.address.access_key, api.address.secret_key)
    if is_temporary:
        key = temporary(api)
        keys = (key["access"], key["secret"], key["securitytoken"])
    folder = new_name()
    with vendor_client(api, kind[-2:], *keys) as vendor:
        client = s3_client(api.address, *keys, signature=kind)

        def url(method: str, name: str) -> str:
            if kind.startswith("vendor"):
                return str(vendor.createSignedUrl(method, "data", name, expires=60).signedUrl)
            values = {"Bucket": "data", "Key": name}
            return str(client.generate_presigned_url(f"{method.lower()}_object", values))

        for name in (f"{folder}/{name}" for name in UNUSUAL_URL_KEYS):
            data = name.encode()
            assert fetched(url("PUT", name), "PUT", data)[0] == 200, name
            assert s3.get_object(Bucket="data", Key=name)["Body"].read() == data
            assert fetched(url("GET", name)) == (200, data), name
            assert fetched(url("GET", name).replace(folder, folder + "x"))[0] == 403
            assert fetched(url("GET", name), "DELETE")[0] == 403
    names = [f"{folder}/{name}" for name in UNUSUAL_URL_KEYS]
    pages = s3.list_objects_v2(Bucket="data", Prefix=folder)
    assert sorted(item["Key"] for item in pages["Contents"]) == sorted(names)


def test_a_url_with_a_signature_expires(api: Api, s3: Any):
    s3.put_object(Bucket="data", Key="a//b", Body=b"x")
    values = {"Bucket": "data", "Key": "a//b"}
    for kind in ("s3v4", "s3"):
        owner = s3_client(
            api.address, api.address.access_key, api.address.secret_key, signature=kind
        )
        lasting, short = (
            owner.generate_presigned_url("get_object", values, ExpiresIn=seconds)
            for seconds in (600, 1)
        )
        await_true(lambda url=short: fetched(url)[0] == 403)
        assert fetched(lasting) == (200, b"x")


def chunked(keys: Keys, endpoint: str, key: str, parts: list[bytes], end: str) -> dict[str, Any]:
    """Return a request whose body has a signature for each of its chunks."""
    moment = time.strftime(sigv4.MOMENT, time.gmtime())
    scope = sigv4.Scope("r", moment)
    path = quote(f"/data/{key}", safe="/~")
    headers = {
        "Content-Encoding": "aws-chunked",
        "x-amz-decoded-content-length": str(sum(map(len, parts))),
        **({"x-amz-trailer": "x-amz-checksum-crc32"} if end else {}),
    }
    request = sigv4.Request("PUT", path, (), {"Host": urlsplit(endpoint).netloc, **headers})
    signed = sigv4.headers(request, keys, scope, "STREAMING-AWS4-HMAC-SHA256-PAYLOAD" + end)
    scope_text = f"{moment[:8]}/r/s3/aws4_request"
    last, body = signed["authorization"].rpartition("=")[2], b""
    for part in (*parts, b""):
        lines = ("AWS4-HMAC-SHA256-PAYLOAD", moment, scope_text, last, hashlib.sha256().hexdigest())
        text = "\n".join((*lines, hashlib.sha256(part).hexdigest()))
        secret = sigv4.signing_key(keys.secret_key, scope_text)
        last = hmac.digest(secret, text.encode(), "sha256").hex()
        body += f"{len(part):x};chunk-signature={last}\r\n".encode() + part + b"\r\n" * bool(part)
    if end:
        checksum = base64.b64encode(zlib.crc32(b"".join(parts)).to_bytes(4, "big"))
        trailer = b"x-amz-checksum-crc32:" + checksum
        lines = ("AWS4-HMAC-SHA256-TRAILER", moment, scope_text, last)
        text = "\n".join((*lines, hashlib.sha256(trailer + b"\n").hexdigest()))
        last = hmac.digest(secret, text.encode(), "sha256").hex()
        body += trailer + b"\r\nx-amz-trailer-signature:" + last.encode() + b"\r\n"
    body += b"\r\n"
    return {"url": endpoint + path, "method": "PUT", "body": body, **signed}


@pytest.mark.parametrize("end", ["", "-TRAILER"])
@pytest.mark.parametrize("is_temporary", [False, True])
def test_a_body_in_signed_chunks_is_stored_under_any_name(
    api: Api, s3: Any, is_temporary: bool, end: str
):
    keys = Keys(api.address.access_key, api.address.secret_key)
    if is_temporary:
        key = temporary(api)
        keys = Keys(key["access"], key["secret"], key["securitytoken"])
    parts = [os.urandom(70_000), os.urandom(70_000), b"x"]
    for name in (f"{new_name()}/a//b", f"{new_name()}/ü..\\"):
        request = chunked(keys, api.address.s3_endpoint, name, parts, end)
        whole = request["body"]
        for broken in (
            whole[:100_000],
            whole.replace(b"chunk-signature=", b"chunk-signature=0", 1),
        ):
            assert fetched(**{**request, "body": broken})[0] >= 400
        changed = whole[:90_000] + bytes([whole[90_000] ^ 1]) + whole[90_001:]
        assert fetched(**{**request, "body": changed})[0] == 403
        if end:
            wrong = whole.replace(b"trailer-signature:", b"trailer-signature:0")[:-1]
            assert fetched(**{**request, "body": wrong})[0] in (400, 403)
        assert fetched(**{**request, "x-amz-date": "20200101T000000Z"})[0] == 403
        assert fetched(**request)[0] == 200
        stored = s3.get_object(Bucket="data", Key=name)
        assert stored["Body"].read() == b"".join(parts)
        assert "ContentEncoding" not in stored


def test_a_rule_for_one_bucket_gives_no_access_to_others(api: Api, s3: Any):
    """Copies, multipart uploads, presigned URLs and the list of buckets give no access either."""
    user = api.address.users["guest"]
    guest = s3_client(api.address, user["access_key"], user["secret_key"])
    with contextlib.suppress(ClientError):
        s3.create_bucket(Bucket="guest-1")
    s3.put_object(Bucket="data", Key="foreign", Body=b"x" * 10)
    upload = s3.create_multipart_upload(Bucket="data", Key="parts")["UploadId"]
    own_upload = guest.create_multipart_upload(Bucket="guest-1", Key="parts")["UploadId"]
    foreign = {"Bucket": "data", "Key": "foreign"}
    parts = {"Bucket": "data", "Key": "parts", "UploadId": upload}
    source = {"CopySource": "data/foreign"}
    own_target = {"Bucket": "guest-1", "Key": "copy"}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("list_objects_v2", {"Bucket": "data"}),
        ("head_bucket", {"Bucket": "data"}),
        ("get_object", foreign),
        ("head_object", foreign),
        ("put_object", foreign),
        ("delete_object", foreign),
        ("delete_objects", {"Bucket": "data", "Delete": {"Objects": [{"Key": "foreign"}]}}),
        ("copy_object", {**own_target, **source}),
        ("copy_object", {**foreign, "Key": "new", "CopySource": "guest-1/own"}),
        (
            "upload_part_copy",
            {**own_target, **source, "Key": "parts", "PartNumber": 1, "UploadId": own_upload},
        ),
        ("create_multipart_upload", {"Bucket": "data", "Key": "new"}),
        ("upload_part", {**parts, "PartNumber": 1, "Body": b"x"}),
        ("list_parts", parts),
        ("list_multipart_uploads", {"Bucket": "data"}),
        ("abort_multipart_upload", parts),
        ("delete_bucket", {"Bucket": "data"}),
        ("put_bucket_acl", {"Bucket": "data", "ACL": "public-read"}),
    ]
    guest.put_object(Bucket="guest-1", Key="own", Body=b"y")
    for name, values in calls:
        with pytest.raises(ClientError) as caught:
            getattr(guest, name)(**values)
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403, name
    for kind in ("s3", "s3v4"):
        signer = s3_client(api.address, user["access_key"], user["secret_key"], signature=kind)
        url = signer.generate_presigned_url("get_object", foreign)
        assert fetched(url)[0] == 403
        for change in (("AccessKeyId", "AccessKey%49d"), ("Credential", "%43redential")):
            assert fetched(url.replace(*change))[0] == 403
        assert fetched(url, Authorization="none")[0] == 403
        own_url = signer.generate_presigned_url("get_object", {"Bucket": "guest-1", "Key": "own"})
        assert fetched(own_url) == (200, b"y")
    assert [item["Name"] for item in guest.list_buckets()["Buckets"]] == ["guest-1"]
    guest.copy_object(Bucket="guest-1", Key="copy", CopySource="guest-1/own")
    assert s3.get_object(**foreign)["Body"].read() == b"x" * 10


@pytest.mark.parametrize("name", ["guest", "cleaner", "reader"])
def test_a_form_cannot_write_what_its_user_may_not(api: Api, s3: Any, name: str):
    user = api.address.users[name]
    guest = s3_client(api.address, user["access_key"], user["secret_key"])
    form = guest.generate_presigned_post("data", "by-form")
    values = {**form["fields"], "file": "text"}
    body = "".join(
        f'--b\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'
        for field, value in values.items()
    )
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    status, _ = fetched(form["url"], "POST", (body + "--b--\r\n").encode(), **kind)

    assert status == 403
    with pytest.raises(ClientError):
        s3.head_object(Bucket="data", Key="by-form")


@given(st.text().filter(lambda key: not set(key) & set("\ue000\ue001\ue002\ue003")))
def test_the_stored_name_of_any_object_can_be_turned_back(key: str):
    stored = stored_name(key)
    *folders, _ = stored.split("/")

    assert client_names(stored.encode()).decode() == key
    assert client_names(quote(stored, safe="").encode()).decode() == quote(key, safe="")
    assert "\\" not in stored
    assert not {"", ".", ".."} & set(folders)
    assert all(len(part.encode()) <= 255 for part in stored.split("/"))


def test_the_vendors_client_uploads_in_parts(vendor: Any, s3: Any, tmp_path: Any):
    path = tmp_path / "large.bin"
    path.write_bytes(os.urandom(11_000_000))
    key = new_name()
    done = vendor.uploadFile("data", key, str(path), partSize=5 * 1024 * 1024, taskNum=3)

    assert done.status == 200, done
    assert s3.get_object(Bucket="data", Key=key)["Body"].read() == path.read_bytes()


def test_obs_refuses_an_unknown_key_and_a_wrong_secret(session_api: Api, s3: Any):
    import boto3
    from botocore.config import Config

    address = session_api.address
    for access, secret in (("NOBODY", "x"), (address.access_key, "x")):
        client = boto3.session.Session().client(
            "s3",
            endpoint_url=address.s3_endpoint,
            aws_access_key_id=access,
            aws_secret_access_key=secret,
            region_name="r",
            config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1}),
        )
        with pytest.raises(ClientError) as caught:
            client.list_objects(Bucket="data")
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403


def test_writing_reading_listing_and_deleting_are_separate_permissions(session_api: Api, s3: Any):
    users = session_api.address.users
    clients = {
        name: s3_client(session_api.address, users[name]["access_key"], users[name]["secret_key"])
        for name in ("reader", "writer", "cleaner")
    }
    key, bucket = {"Bucket": "data", "Key": new_name()}, {"Bucket": new_name()}
    source = {"CopySource": "data/" + key["Key"]}
    calls: list[tuple[str, dict[str, Any], set[str]]] = [
        ("put_object", key, {"writer"}),
        ("get_object", key, {"reader"}),
        ("head_object", key, {"reader"}),
        ("list_objects_v2", {"Bucket": "data"}, {"reader", "cleaner"}),
        ("copy_object", {**key, "Key": key["Key"] + "2", **source}, set()),
        ("delete_object", key, {"cleaner"}),
        ("delete_objects", {"Bucket": "data", "Delete": {"Objects": [{"Key": "x"}]}}, {"cleaner"}),
        ("create_bucket", bucket, {"cleaner"}),
        ("delete_bucket", bucket, {"cleaner"}),
    ]

    def allowed(client: Any, name: str, values: dict[str, Any]) -> bool:
        try:
            return bool(getattr(client, name)(**values))
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 403:
                raise
            return False

    for name, values, expected in calls:
        users_allowed = {user for user, client in clients.items() if allowed(client, name, values)}
        assert users_allowed == expected, name


def temporary(api: Api) -> dict[str, str]:
    """Return a temporary key."""
    identity = {"methods": ["hw_ak_sk"], "hw_ak_sk": {"access": {"key": api.address.access_key}}}
    identity["hw_ak_sk"]["secret"] = {"key": api.address.secret_key}
    _, _, headers = api.ask("POST", "/v3/auth/tokens", {"auth": {"identity": identity}})
    _, values, _ = api.ask(
        "POST",
        "/v3.0/OS-CREDENTIAL/securitytokens",
        {"auth": {"identity": {"methods": ["token"], "token": {}}}},
        headers={"X-Auth-Token": headers["x-subject-token"]},
    )
    credential: dict[str, str] = values["credential"]
    return credential


def test_a_temporary_key_works_for_obs_until_it_expires(api: Api, s3: Any):
    key = temporary(api)
    keys = (key["access"], key["secret"], key["securitytoken"])

    def code(*keys: str) -> str:
        with pytest.raises(ClientError) as caught:
            s3_client(api.address, *keys).list_objects(Bucket="data", MaxKeys=1)
        return str(caught.value.response["Error"]["Code"])

    client = s3_client(api.address, *keys)
    name = f"{new_name()}/ü a+b~"
    client.put_object(Bucket="data", Key=name, Body=b"x" * 100_000)
    assert s3.get_object(Bucket="data", Key=name)["Body"].read() == b"x" * 100_000
    assert client.list_objects(Bucket="data", Prefix=name)["Contents"][0]["Key"] == name
    assert client.get_object(Bucket="data", Key=name)["ContentLength"] == 100_000
    assert code(keys[0], "wrong", keys[2]) == "SignatureDoesNotMatch"
    assert code(*keys[:2], "wrong") == "InvalidToken"
    api.fault("expire-tokens")
    assert code(*keys) == "ExpiredToken"


@pytest.mark.parametrize("signature", ["obs", "v2", "v4"])
def test_the_vendors_client_works_with_a_temporary_key(api: Api, s3: Any, signature: str):
    key, name = temporary(api), f"{new_name()}/ü a+b"
    for secret, status in ((key["secret"], 200), ("wrong", 403)):
        with vendor_client(api, signature, key["access"], secret, key["securitytoken"]) as client:
            assert client.putContent("data", name, "text").status == status
    assert s3.get_object(Bucket="data", Key=name)["Body"].read() == b"text"


def test_requests_that_cannot_succeed_have_the_codes_of_obs(s3: Any):
    """SeaweedFS has others for parts that were never sent, and for a bucket that is missing."""
    name, missing = {"Bucket": "data", "Key": new_name()}, {"Bucket": "no-such", "Key": "k"}
    upload = {**name, "UploadId": s3.create_multipart_upload(**name)["UploadId"]}
    parts = [{"PartNumber": 1, "ETag": '"' + 32 * "0" + '"'}]

    def complete(listed: list[Any], **more: str) -> None:
        s3.complete_multipart_upload(**{**upload, **more}, MultipartUpload={"Parts": listed})

    refused = [
        (lambda: complete([]), (400, "MalformedXML")),
        (lambda: complete(parts), (400, "InvalidPart")),
        (lambda: complete(parts, UploadId=upload["UploadId"] + "0"), (404, "NoSuchUpload")),
        (lambda: s3.put_object(**missing, Body=b"x"), (404, "NoSuchBucket")),
        (lambda: s3.create_multipart_upload(**missing), (404, "NoSuchBucket")),
        (lambda: s3.get_object(**missing), (404, "NoSuchBucket")),
        (lambda: s3.list_objects_v2(Bucket="no-such"), (404, "NoSuchBucket")),
        (lambda: s3.delete_object(**missing), (404, "NoSuchBucket")),
    ]
    answers = []
    for ask, _ in refused:
        with pytest.raises(ClientError) as caught:
            ask()
        answer = caught.value.response
        answers.append((answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]))
    s3.abort_multipart_upload(**upload)

    assert answers == [expected for _, expected in refused]


def test_large_objects_pass_the_proxy_unchanged(s3: Any):
    data = os.urandom(20_000_000)
    key = new_name()
    s3.put_object(Bucket="data", Key=key, Body=data, ChecksumAlgorithm="SHA256")

    assert s3.get_object(Bucket="data", Key=key)["Body"].read() == data


def test_a_full_obs_refuses_writes_only(api: Api, s3: Any):
    key = new_name()
    s3.put_object(Bucket="data", Key=key, Body=b"x")
    api.fault("full-obs")
    with pytest.raises(ClientError) as caught:
        s3.put_object(Bucket="data", Key=key, Body=b"y" * 3_000_000)

    assert caught.value.response["Error"]["Code"] == "InsufficientStorageSpace"
    assert s3.get_object(Bucket="data", Key=key)["Body"].read() == b"x"
    s3.delete_objects(Bucket="data", Delete={"Objects": [{"Key": key}]})


def test_slow_obs_delays_the_requested_number_of_requests(api: Api, s3: Any):
    api.fault("slow-obs", count=1, amount=0.7)
    started_s = time.monotonic()
    s3.list_objects(Bucket="data", MaxKeys=1)

    assert time.monotonic() - started_s >= 0.7
    assert daemon.faults(api.home) == []


def test_obs_error_answers_503_the_requested_number_of_times(api: Api, s3: Any):
    api.fault("obs-error", count=1)
    with pytest.raises(ClientError) as caught:
        s3.list_objects(Bucket="data", MaxKeys=1)

    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
    s3.list_objects(Bucket="data", MaxKeys=1)
