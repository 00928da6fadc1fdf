"""What users with few rights can do in the emulated OBS: every right, and forged requests.

Each test sends requests as every user, and compares what changed, and what the answers contain,
with the rights of the user.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import io
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
from botocore.auth import S3SigV4QueryAuth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from jobentry.contract import sigv4
from jobentry.contract.sigv4 import Keys
from tests.support.emulator import SETTINGS, Api, bucket_of, running, s3_client

RIGHTS = {
    "read": "obs:object:GetObject",
    "write": "obs:object:PutObject",
    "delete": "obs:object:DeleteObject",
    "list": "obs:bucket:ListBucket",
    "create": "obs:bucket:CreateBucket",
    "remove": "obs:bucket:DeleteBucket",
    # Everything, in another bucket.
    "guest": "obs:*@guest-*",
    "nothing": "modelarts:*",
}
SECRET, NAME = b"the-secret-content", "name-of-secret"
STORED = {"data": {NAME: SECRET}, "guest-1": {"own": b"own"}}
OTHERS = f"users: {{{', '.join(f'{name}: [{right!r}]' for name, right in RIGHTS.items())}}}\n"


@dataclass
class Obs:
    """An emulator, and its owner's client."""

    api: Api
    s3: Any
    clients: dict[tuple[str, str], Any] = field(default_factory=dict)

    def client(self, user: str, signature: str = "s3v4") -> Any:
        """Return the client of a user."""
        keys = self.keys(user)[:2]
        if (user, signature) not in self.clients:
            new_client = s3_client(self.api.address, *keys, signature=signature)
            self.clients[user, signature] = new_client
        return self.clients[user, signature]

    def keys(self, user: str) -> Keys:
        account = self.api.address.users[user]
        return Keys(account["access_key"], account["secret_key"])

    def state(self) -> dict[str, Any]:
        """Return the buckets, their objects, and the unfinished uploads."""
        objects_of: dict[str, Any] = {}
        for bucket in (item["Name"] for item in self.s3.list_buckets()["Buckets"]):
            listed = self.s3.list_objects_v2(Bucket=bucket).get("Contents", ())
            objects_of[bucket] = {item["Key"]: item["ETag"] for item in listed}
        uploads = self.s3.list_multipart_uploads(Bucket="data").get("Uploads", ())
        objects_of["uploads"] = {item["UploadId"] for item in uploads}
        return objects_of

    def has_copy(self) -> bool:
        """Whether the bucket guest-1 has the content of the secret object."""
        listed = self.s3.list_objects_v2(Bucket="guest-1").get("Contents", ())
        return any(
            self.s3.get_object(Bucket="guest-1", Key=item["Key"])["Body"].read() == SECRET
            for item in listed
        )

    def restore(self) -> str:
        """Make the state that each request finds; return the id of an unfinished upload."""
        for name in {"data", "guest-1", "empty"} - self.state().keys():
            self.s3.create_bucket(Bucket=name)
        now = self.state()
        uploads = now.pop("uploads") or self._upload()
        for bucket, items in now.items():
            for key in items.keys() - STORED.get(bucket, {}).keys():
                self.s3.delete_object(Bucket=bucket, Key=key)
            if bucket not in ("data", "guest-1", "empty", "cloudjob"):
                self.s3.delete_bucket(Bucket=bucket)
        for bucket, contents in STORED.items():
            for key, content in contents.items():
                if now[bucket].get(key) != f'"{hashlib.md5(content).hexdigest()}"':
                    self.s3.put_object(Bucket=bucket, Key=key, Body=content)
        return str(next(iter(uploads)))

    def _upload(self) -> list[str]:
        return [self.s3.create_multipart_upload(Bucket="data", Key="parts")["UploadId"]]


@pytest.fixture(scope="module")
def obs() -> Iterator[Obs]:
    settings = SETTINGS.partition("users:")[0] + OTHERS
    with running(settings) as api:
        yield Obs(api, bucket_of(api))


@dataclass
class Sent:
    """A request; ``target`` and ``headers`` are sent as they are.

    Args:
        headers: Headers that the signature covers, if it is one of version 4.
        more: Further header lines, which it does not cover.
        path: The path to sign, if it differs from that of the target.
    """

    method: str
    target: str
    headers: dict[str, str] = field(default_factory=dict)
    more: list[str] = field(default_factory=list)
    body: bytes = b""
    path: str = ""
    first: list[str] = field(default_factory=list)
    payload: str = sigv4.UNSIGNED
    is_signed: bool = True

    def send(self, obs: Obs, keys: Keys) -> tuple[int, bytes]:
        host = urlsplit(obs.api.address.s3_endpoint).netloc
        target = self.target.replace("HOST", host)
        _, _, query = target.partition("?")
        path = sigv4.encoded(unquote(self.path or target.partition("?")[0]), safe="/")
        pairs = parse_qsl(query, keep_blank_values=True)
        scope = sigv4.Scope("r", time.strftime(sigv4.MOMENT, time.gmtime()))
        request = sigv4.Request(self.method, path, pairs, {"host": host, **self.headers})
        signed = sigv4.headers(request, keys, scope, self.payload)
        if not self.is_signed:
            del signed["authorization"]
        lines = [f"{name}: {value}" for name, value in {**signed, **self.headers}.items()]
        if not any(line.lower().startswith(("content-length", "transfer")) for line in self.more):
            lines.append(f"content-length: {len(self.body)}")
        more = [line.replace("HOST", host) for line in self.more]
        lines = [f"{self.method} {target} HTTP/1.1", *self.first, *lines, *more]
        text = "\r\n".join([*lines, "connection: close", "", ""]).encode("utf-8")
        name, _, port = host.partition(":")
        with socket.create_connection((name, int(port)), timeout=60) as connection:
            connection.sendall(text + self.body)
            answer = http.client.HTTPResponse(connection)
            try:
                answer.begin()
                return answer.status, answer.read()
            except (http.client.HTTPException, ConnectionError):
                return 400, b""


def effects(before: dict[str, Any], after: dict[str, Any], body: bytes) -> set[str]:
    """Return the rights that explain what a request changed or revealed outside guest-*."""
    names = set()
    if SECRET in body or base64.b64encode(SECRET) in body:
        names.add("read")
    if b"<Contents>" in body and NAME.encode() in body:
        names.add("list")
    for bucket in before.keys() | after.keys():
        if bucket.startswith("guest-") or bucket == "uploads":
            continue
        if bucket not in before:
            names.add("create")
        elif bucket not in after:
            names.add("remove")
        else:
            old, new = before[bucket], after[bucket]
            names |= {"write" for key in new if old.get(key) != new[key]}
            names |= {"delete" for key in old if key not in new}
    if before["uploads"] != after["uploads"]:
        names.add("write")
    return names


def copied(source: str) -> Sent:
    return Sent("PUT", "/guest-1/copy", {"x-amz-copy-source": source})


def deleting(key: str, target: str = "/guest-1?delete", name: str = "Key") -> Sent:
    end = name.partition(" ")[0]
    return Sent(
        "POST", target, body=f"<Delete><Object><{name}>{key}</{end}></Object></Delete>".encode()
    )


OBJECT, TOKEN = f"/data/{NAME}", "Authorization: AWS nobody:AAAA"
CHUNKS = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
FORGED: dict[str, list[Sent]] = {
    "two authorizations": [
        Sent(method, target, body=body, **where)  # type: ignore[arg-type]
        for method, target, body in (
            ("GET", OBJECT, b""),
            ("PUT", OBJECT, b"new"),
            ("DELETE", OBJECT, b""),
            ("GET", "/data", b""),
            ("DELETE", "/empty", b""),
        )
        for where in ({"more": [TOKEN]}, {"first": [TOKEN]})
    ],
    "an unknown key": [
        Sent(method, OBJECT, more=[TOKEN], is_signed=False) for method in ("GET", "PUT", "DELETE")
    ],
    "no signature": [
        Sent(method, target, is_signed=False)
        for method in ("GET", "PUT", "DELETE", "HEAD", "POST")
        for target in (OBJECT, "/data", "/new-bucket", "/")
    ],
    "a signature in headers and another in the URL": [
        Sent("DELETE", OBJECT + query)
        for query in (
            "?AWSAccessKeyId=nobody&Signature=x&Expires=9999999999",
            "?X-Amz-Signature=0&X-Amz-Credential=nobody/1/r/s3/aws4_request",
            "?X-Amz-Credential=nobody/1/r/s3/aws4_request",
            "?x-amz-signature=0",
        )
    ],
    "parameters in another case, twice, encoded or combined": [
        Sent(method, OBJECT + query)
        for method in ("DELETE", "PUT", "GET", "POST")
        for query in (
            *("?UPLOADID=x", "?uploadid=x", "?Tagging", "?TAGGING=", "?uploadId=x&uploadId=y"),
            *("?uploadId=x&tagging", "?uploadId", "?%75ploadid=x", "?%75ploadId=x", "?ACL"),
            *("?tagging;uploadId=x", "?uploadId=x&UploadId=", "?versionid=null", "?append"),
            *("?uploads&delete", "?retention", "?legal-hold", "?torrent", "?restore", "?select"),
        )
    ],
    "sub-resources of the bucket": [
        Sent(method, "/data" + query, body=b"<a/>" if method in ("PUT", "POST") else b"")
        for method in ("PUT", "POST", "DELETE", "GET")
        for query in (
            *("?policy", "?Policy", "?acl", "?cors", "?lifecycle", "?versioning", "?Delete"),
            *("?DELETE", "?delete&uploads", "?prefix=&list-type=2&acl", "?website", "?tagging"),
            *("?list-type=2&LIST-TYPE=1", "?uploads&prefix=", "?versions", "?location"),
        )
    ],
    "another method": [
        Sent(
            "GET",
            target,
            {name: method} if name.startswith("x-amz") else {},
            more=[f"{name}: {method}"],
        )
        for target in (OBJECT, "/data", "/empty")
        for method in ("DELETE", "PUT")
        for name in ("X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override")
    ]
    + [Sent(method, OBJECT) for method in ("PATCH", "MOVE", "COPY", "get", "delete", "LINK")],
    "paths that other programs normalize": [
        Sent(method, path, body=b"new" if method == "PUT" else b"")
        for method in ("GET", "PUT", "DELETE")
        for path in (
            *(f"/guest-1/../data/{NAME}", f"/guest-1/%2e%2e/data/{NAME}"),
            *(f"/guest-1%2f..%2fdata%2f{NAME}", f"//data/{NAME}", f"/guest-1//../../data/{NAME}"),
            *(f"/%64ata/{NAME}", f"/guest-1/%00/../../data/{NAME}", f"/data%00/{NAME}"),
            *(f"/guest-1/%252e%252e/data/{NAME}", f"/guest-1/..%5c..%5cdata%5c{NAME}"),
            *(f"/guest-1\\..\\data\\{NAME}", f"/buckets/data/{NAME}", f"/guest-1/%ff/{NAME}"),
            *(f"/guest-1/%ee%80%83%ee%80%83/data/{NAME}", f"/guest-1/;/../data/{NAME}"),
            *(f"/guest-1%00/../data/{NAME}", f"/./data/{NAME}", f"/data/./{NAME}", f"/DATA/{NAME}"),
            *(
                f"/guest-1/%2e%2e%2f%2e%2e%2fdata%2f{NAME}",
                f"/data%2f{NAME}",
                f"/guest-1/%zz/{NAME}",
            ),
        )
    ],
    "targets that are whole URLs": [
        Sent(method, target, path=path)
        for method in ("GET", "PUT", "DELETE")
        for target in (
            *(f"http://HOST{OBJECT}", f"guest-1:{OBJECT}", f"http://guest-1{OBJECT}"),
            *(f"guest-1://x{OBJECT}", f"//guest-1@HOST{OBJECT}", f"?{OBJECT}", "*"),
        )
        for path in (OBJECT, "/guest-1/own")
    ],
    "other hosts": [
        Sent(method, target, more=more)
        for method in ("GET", "PUT", "DELETE")
        for target in (OBJECT, f"/{NAME}")
        for more in (
            *(["Host: data.HOST"], ["X-Forwarded-Host: data.HOST"], ["X-Forwarded-Prefix: /data"]),
            *(
                ["X-Forwarded-For: 127.0.0.1"],
                ["Forwarded: host=data.HOST"],
                ["X-Original-URL: /data"],
            ),
        )
    ],
    "headers of the server": [
        Sent(method, OBJECT, more=more, body=b"new" if method == "PUT" else b"")
        for method in ("GET", "PUT", "DELETE")
        for more in (
            ["X-Seaweedfs-Principal: emulator", "X-Seaweedfs-Session-Token: x"],
            ["s3-identity-id: emulator", "s3-is-admin: true", "X-Amz-Identity-Id: emulator"],
            ["Seaweed-Owner: emulator", "X-Amz-Account-Id: admin", "Cookie: a=b"],
        )
    ],
    "lengths": [
        Sent(
            "PUT",
            f"/{bucket}/x",
            more=more,
            body=b"0\r\n\r\nDELETE " + OBJECT.encode() + b" HTTP/1.1\r\nHost: HOST\r\n\r\n",
        )
        for bucket in ("data", "guest-1")
        for more in (
            ["Transfer-Encoding: chunked", "Content-Length: 5"],
            ["Content-Length: 5", "Transfer-Encoding: chunked"],
            ["Content-Length: 5", "Content-Length: 6"],
            ["Transfer-Encoding: chunked, identity"],
            ["Transfer-Encoding: \x0bchunked"],
        )
    ],
    "sources of copies": [
        copied(source)
        for source in (
            *(f"data/{NAME}", f"/data/{NAME}", f"%64ata/{NAME}", f"guest-1/../data/{NAME}"),
            *(f"guest-1/%2e%2e/data/{NAME}", f"//data/{NAME}", f"data/{NAME}?versionId=null"),
            *(
                f"guest-1%2f..%2fdata%2f{NAME}",
                f"arn:aws:s3:::data/{NAME}",
                f"guest-1\\..\\data/{NAME}",
            ),
            *(f"guest-1/x?versionId=../../data/{NAME}", f"guest-1/own?/../../data/{NAME}"),
            *(
                f"guest-1/%252e%252e/data/{NAME}",
                f"data%00/{NAME}",
                f"guest-1/x#/../../data/{NAME}",
            ),
        )
    ]
    + [
        Sent("PUT", "/guest-1/copy", {"x-amz-copy-source": "guest-1/own"}, [f"{name}: data/{NAME}"])
        for name in (
            "X-Amz-Copy-Source",
            "X-Obs-Copy-Source",
            "x-amz-copy-source ",
            "x_amz_copy_source",
        )
    ]
    + [Sent("PUT", f"/guest-1/copy?x-amz-copy-source=data/{NAME}")],
    "bodies that name objects": [
        deleting(key, target, name)
        for target in ("/guest-1?delete", "/data?delete", "/guest-1?Delete")
        for key in (
            *(f"../data/{NAME}", f"/../data/{NAME}", f"<![CDATA[../data/{NAME}]]>", NAME),
            *(f"..&#47;data/{NAME}", f"..\\data\\{NAME}", f"<!-- -->../data/{NAME}"),
        )
        for name in ("Key", 'x:Key xmlns:x="y"', "Key ", "Key\n")
    ],
    "chunks": [
        Sent(
            "PUT",
            f"/{bucket}/chunked",
            {"x-amz-decoded-content-length": size, "content-encoding": "aws-chunked"},
            body=b"3;chunk-signature=" + b"0" * 64 + b"\r\nnew\r\n0;chunk-signature=\r\n\r\n",
            payload=payload,
        )
        for bucket in ("data", "guest-1")
        for size in ("3", "0", "-1", "99999999999999999999")
        for payload in (
            CHUNKS,
            CHUNKS + "-TRAILER",
            "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
            "STREAMING-X",
        )
    ],
    "requests of other services": [
        Sent(
            method,
            target,
            more=["Content-Type: application/x-www-form-urlencoded"],
            body=b"Action=CreateAccessKey&UserName=emulator&Version=2010-05-08",
        )
        for method in ("POST", "PUT", "GET", "DELETE")
        for target in (
            "/",
            "/?Action=CreateAccessKey&UserName=emulator",
            "/?Action=AssumeRole",
            "/_mcp",
        )
    ],
}


FEW = ("nothing", "guest", "list")
OTHER_USERS = tuple(RIGHTS.keys() - {*FEW})


@pytest.mark.long
@pytest.mark.parametrize(
    "users", [FEW, pytest.param(OTHER_USERS, marks=pytest.mark.lengthy)], ids=["few", "others"]
)
@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_request_does_nothing_that_its_user_may_not_do(
    obs: Obs, kind: str, users: tuple[str, ...]
):
    """The state is compared where a request may have changed something, and after each user."""
    obs.restore()
    before = obs.state()

    def compare(user: str, what: object) -> None:
        nonlocal before
        after = obs.state()
        if after != before:
            assert effects(before, after, b"") <= {user}, (user, what)
            assert not obs.has_copy(), (user, what)
            obs.restore()
            before = obs.state()

    for user in users:
        for request in FORGED[kind]:
            status, body = request.send(obs, obs.keys(user))
            assert status < 500 or status == 501, (user, request, body)
            assert effects(before, before, body) <= {user}, (user, request, body)
            if request.method not in ("GET", "HEAD") and status < 300 and b"<Error>" not in body:
                compare(user, request)
        compare(user, "one of the refused requests")


# Calls of boto3, and the rights that each needs.
OPERATIONS: list[tuple[str, dict[str, Any], set[str]]] = [
    ("list_objects", {"Bucket": "data"}, {"list"}),
    ("list_objects_v2", {"Bucket": "data"}, {"list"}),
    ("list_object_versions", {"Bucket": "data"}, {"list"}),
    ("list_multipart_uploads", {"Bucket": "data"}, {"list"}),
    ("head_bucket", {"Bucket": "data"}, {"list"}),
    ("get_bucket_location", {"Bucket": "data"}, {"list"}),
    ("create_bucket", {"Bucket": "new-bucket"}, {"create"}),
    ("delete_bucket", {"Bucket": "empty"}, {"remove"}),
    ("get_object", {"Bucket": "data", "Key": NAME}, {"read"}),
    ("get_object", {"Bucket": "data", "Key": NAME, "Range": "bytes=0-1"}, {"read"}),
    ("head_object", {"Bucket": "data", "Key": NAME}, {"read"}),
    ("get_object_tagging", {"Bucket": "data", "Key": NAME}, {"read"}),
    ("put_object", {"Bucket": "data", "Key": "new", "Body": b"new"}, {"write"}),
    ("put_object_tagging", {"Bucket": "data", "Key": NAME, "Tagging": {"TagSet": []}}, {"write"}),
    ("delete_object_tagging", {"Bucket": "data", "Key": NAME}, {"write"}),
    ("create_multipart_upload", {"Bucket": "data", "Key": "parts"}, {"write"}),
    ("upload_part", {"Key": "parts", "PartNumber": 1, "Body": b"x"}, {"write"}),
    ("list_parts", {"Key": "parts"}, {"write"}),
    ("abort_multipart_upload", {"Key": "parts"}, {"write"}),
    ("delete_object", {"Bucket": "data", "Key": NAME}, {"delete"}),
    ("delete_objects", {"Bucket": "data", "Delete": {"Objects": [{"Key": NAME}]}}, {"delete"}),
    (
        "copy_object",
        {"Bucket": "data", "Key": "copy", "CopySource": f"data/{NAME}"},
        {"read", "write"},
    ),
    (
        "upload_part_copy",
        {"Key": "parts", "PartNumber": 1, "CopySource": f"data/{NAME}"},
        {"read", "write"},
    ),
    *(
        (f"{verb}_bucket_acl", {"Bucket": "data", **acl}, {"nobody"})
        for verb, acl in (("get", {}), ("put", {"ACL": "public-read"}))
    ),
    (
        "put_bucket_versioning",
        {"Bucket": "data", "VersioningConfiguration": {"Status": "Enabled"}},
        {"nobody"},
    ),
    ("delete_bucket_tagging", {"Bucket": "data"}, {"nobody"}),
    ("delete_bucket_cors", {"Bucket": "data"}, {"nobody"}),
]


@pytest.mark.parametrize("signature", ["s3v4", "s3"])
@pytest.mark.parametrize(("name", "values", "needed"), OPERATIONS)
def test_each_operation_needs_its_right(
    obs: Obs, name: str, values: dict[str, Any], needed: set[str], signature: str
):
    upload = obs.restore()
    if "part" in name.replace("multipart", "") or name.startswith("abort"):
        values = {"Bucket": "data", "UploadId": upload, **values}
    clients = {user: obs.client(user, signature) for user in RIGHTS}
    before = obs.state()
    for user, client in clients.items():
        if needed == {user}:
            continue
        with pytest.raises(ClientError) as caught:
            getattr(client, name)(**_fresh(values))
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403, user
    assert obs.state() == before
    if len(needed) == 1 and needed <= clients.keys():
        getattr(clients[next(iter(needed))], name)(**_fresh(values))


def _fresh(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a call, with a body that nothing has read."""
    body = {"Body": io.BytesIO(values["Body"])} if "Body" in values else {}
    return {**values, **body}


def test_a_user_sees_only_buckets_that_it_may_list(obs: Obs):
    obs.restore()
    buckets = {
        user: [item["Name"] for item in obs.client(user).list_buckets()["Buckets"]]
        for user in RIGHTS
    }

    everything = sorted(obs.state().keys() - {"uploads"})
    nothing: list[str] = []
    assert buckets == {
        **dict.fromkeys(RIGHTS, nothing),
        "list": everything,
        "guest": ["guest-1"],
    }


def asked(obs: Obs, method: str, target: str, **more: Any) -> tuple[int, bytes]:
    """Send a request that has no other headers, and return its answer."""
    host = urlsplit(obs.api.address.s3_endpoint).netloc
    connection = http.client.HTTPConnection(host, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, target, **more)
        answer = connection.getresponse()
        return answer.status, answer.read()


@pytest.mark.parametrize("operation", ["get_object", "put_object"])
def test_a_signed_url_is_for_one_object_and_one_operation(obs: Obs, operation: str):
    """Whoever has a link cannot change it, not even where version 2 of signatures is vague."""
    obs.restore()
    obs.s3.put_object(Bucket="data", Key=NAME + "#x", Body=SECRET)
    before = obs.state()
    method = operation.partition("_")[0].upper()
    place = {"Bucket": "data", "Key": NAME}
    user = "read" if method == "GET" else "write"
    url = urlsplit(obs.client(user, "s3").generate_presigned_url(operation, place))
    for target in (
        f"{url.path}#x?{url.query}",
        f"{url.path}?{url.query}&%61cl",
        f"{url.path}?{url.query}&%74agging",
        f"{url.path}?{url.query}&%72esponse-content-type=text/html",
        f"{url.path}?{url.query}&%75ploadId=x&partNumber=1",
        f"//[{url.path}?{url.query}",
        f"//x{url.path}?{url.query}",
    ):
        status, body = asked(obs, method, target)
        assert (status, SECRET in body) == (403, False), (target, body)
    assert obs.state() == before
    assert asked(obs, method, f"{url.path}?{url.query}")[0] == 200


@pytest.mark.parametrize("life", ["604801", "9" * 12, "-1", "+60", " 60", "6_0", "1.5", "", None])
def test_a_signed_url_is_valid_for_a_week_at_most(obs: Obs, life: str | None):
    """A URL without a time limit, or with one that is no number of seconds, is refused as well."""
    obs.restore()
    place = {"Bucket": "data", "Key": NAME}
    client = obs.client("read")
    week = urlsplit(client.generate_presigned_url("get_object", place, ExpiresIn=604800))
    assert asked(obs, "GET", f"{week.path}?{week.query}") == (200, SECRET)

    signer = S3SigV4QueryAuth(Credentials(*obs.keys("read")[:2]), "s3", "r", expires=life)
    request = AWSRequest("GET", f"{obs.api.address.s3_endpoint}{OBJECT}")
    signer.add_auth(request)
    url = urlsplit(request.url.replace("X-Amz-Expires=None&", ""))
    status, body = asked(obs, "GET", f"{url.path}?{url.query}")

    assert (status, b"AuthorizationQueryParametersError" in body) == (400, True), body


INVALID = [
    *(("PUT", "/data/new", {"x-amz-acl": text}) for text in ("evil", "", "PRIVATE", "private ,")),
    *(("GET", f"/data?{text}", {}) for text in ("encoding-type=evil", "list-type=3")),
    *(("GET", f"/data?max-keys={text}", {}) for text in ("-1", "a", "2147483648")),
]


@pytest.mark.parametrize(("method", "target", "headers"), INVALID)
def test_a_value_that_the_service_does_not_know_is_refused(
    obs: Obs, method: str, target: str, headers: dict[str, str]
):
    obs.restore()
    before = obs.state()
    owner = Keys(obs.api.address.access_key, obs.api.address.secret_key)
    status, body = Sent(method, target, headers).send(obs, owner)

    assert (status, b"<Code>InvalidArgument<" in body) == (400, True), body
    assert obs.state() == before


def test_a_range_that_is_none_counts_as_no_range(obs: Obs):
    obs.restore()
    size = len(SECRET)
    for text in ("bytes=5-4", "bytes=a-b", "bytes=-", "bytes=+1-2", "bytes=0-1,3-4", "bits=0-1"):
        answer = Sent("GET", OBJECT, {"range": text}).send(obs, obs.keys("read"))
        assert answer == (200, SECRET), text
    for text, status, part in (
        (f"bytes={size - 1}-{size + 90}", 206, SECRET[-1:]),
        (f"bytes=-{size + 90}", 206, SECRET),
        (f"bytes={size}-", 416, b"InvalidRange"),
    ):
        answer = Sent("GET", OBJECT, {"range": text}).send(obs, obs.keys("read"))
        assert (answer[0], part in answer[1]) == (status, True), text


def test_a_list_is_never_another_one_than_was_asked_for(obs: Obs):
    """SeaweedFS ignores delimiters of several characters, and refuses longer lists than its own."""
    obs.restore()
    for name in ("max-keys", "max-uploads"):
        sub_resource = "uploads&" if name == "max-uploads" else ""
        answer = Sent("GET", f"/data?{sub_resource}{name}=100000").send(obs, obs.keys("list"))
        assert (answer[0], b"1000<" in answer[1]) == (200, True), answer
    status, body = Sent("GET", "/data?delimiter=%2F%2F").send(obs, obs.keys("list"))
    assert (status, b"NotImplemented" in body) == (501, True)


def test_an_upload_that_breaks_off_changes_nothing(obs: Obs):
    obs.restore()
    before = obs.state()
    url = obs.client("write").generate_presigned_url("put_object", {"Bucket": "data", "Key": NAME})
    parts = urlsplit(url)
    for size in (0, 1, 50_000):
        name, _, port = parts.netloc.partition(":")
        head = f"PUT {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        with socket.create_connection((name, int(port)), timeout=60) as connection:
            connection.sendall(f"{head}Content-Length: 100000\r\n\r\n".encode() + b"x" * size)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
        obs.s3.put_object(Bucket="guest-1", Key="own", Body=b"own")
        assert obs.state() == before


def test_a_list_of_objects_to_delete_with_another_digest_is_refused(obs: Obs):
    obs.restore()
    before = obs.state()
    request = deleting(NAME, "/data?delete")
    request.payload = "0" * 64

    assert request.send(obs, obs.keys("delete"))[0] == 400
    assert obs.state() == before


def test_headers_that_the_store_keeps_arrive_as_they_were_sent(obs: Obs):
    obs.restore()
    kept = {"x-amz-meta-spaces": "a  b", "cache-control": "no-cache,  no-store"}
    request = Sent("PUT", "/data/kept", {**kept, "x-amz-meta-letters": "ü"}, body=b"x")
    status, body = request.send(obs, obs.keys("write"))
    stored = obs.s3.get_object(Bucket="data", Key="kept")

    assert status == 200, body
    assert stored["Metadata"]["spaces"] == "a  b"
    assert stored["CacheControl"] == "no-cache,  no-store"


def test_a_body_that_does_not_have_its_signed_digest_is_not_stored(obs: Obs):
    obs.restore()
    before = obs.state()
    for body in (b"y" * 20, b"x" * 19, b"", b"z" * 200_000):
        request = Sent("PUT", OBJECT, body=body, payload="0" * 64)
        status, answer = request.send(obs, obs.keys("write"))
        assert (status, b"XAmzContentSHA256Mismatch" in answer) == (400, True)
    assert obs.state() == before


def test_a_signature_in_headers_covers_the_body(obs: Obs):
    """Without the header of the digest, a signature is one of an empty body."""
    obs.restore()
    before = obs.state()
    url = f"{obs.api.address.s3_endpoint}{OBJECT}"
    signed = AWSRequest("PUT", url)
    SigV4Auth(Credentials(*obs.keys("write")[:2]), "s3", "r").add_auth(signed)
    status, body = asked(obs, "PUT", OBJECT, body=b"another", headers=dict(signed.headers))

    assert (status, b"x-amz-content-sha256" in body) == (400, True)
    assert obs.state() == before


@pytest.mark.parametrize("number", ["a", "0", "-1", "10001", "", "1.0", "%F0%9D%9F%99", "9" * 30])
def test_a_part_with_an_invalid_number_is_refused(obs: Obs, number: str):
    upload = obs.restore()
    before = obs.state()
    query = f"partNumber={number}"
    for method, more in (("PUT", f"&uploadId={upload}"), ("GET", "")):
        status, body = Sent(method, f"{OBJECT}?{query}{more}").send(
            obs, Keys(obs.api.address.access_key, obs.api.address.secret_key)
        )
        assert (status, b"InvalidArgument" in body) == (400, True)
    assert obs.state() == before


@pytest.mark.parametrize("kind", ["aws:kms", "kms", "evil", ""])
def test_an_encryption_that_the_emulator_lacks_is_refused(obs: Obs, kind: str):
    obs.restore()
    before = obs.state()
    header = {"x-amz-server-side-encryption": kind}

    assert Sent("PUT", "/data/new", header, body=b"x").send(obs, obs.keys("write"))[0] == 501
    assert obs.state() == before
