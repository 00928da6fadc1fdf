"""What other local users, and web pages in a local browser, can access in an emulator."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cloudjob.backends.process.keeper import descendants_of
from tests.support.emulator import Api, new_name

LISTEN = "0A"
# The preface that a gRPC client sends, and the type of the frame with which a server answers.
GRPC, SETTINGS = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + "\0\0\0\4\0\0\0\0\0", "\4"
# Runs as the user nobody if root starts it, and prints each answer. A request is repeated over TLS
# if the plain-text answer is empty or says that the server requires HTTPS.
PROBE = r"""
import json, os, socket, ssl, sys
given = json.load(sys.stdin)
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

def ask(address, text, tls):
    kind = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(kind) as plain:
        plain.settimeout(20)
        plain.connect(address if isinstance(address, str) else tuple(address))
        with (context.wrap_socket(plain) if tls else plain) as client:
            client.sendall(text.encode())
            return client.recv(65536)

for address in given["addresses"]:
    for text in given["requests"]:
        for tls in (False, True):
            try:
                answer = ask(address, text, tls)
            except OSError:
                continue
            print(json.dumps([address, text, tls, answer.decode("latin-1")]))
            if answer and b"to an HTTPS server" not in answer:
                break
"""


def listening(pid: int) -> tuple[list[tuple[str, int]], list[str]]:
    """Return the TCP addresses and the Unix sockets on which a process and its children listen."""
    inodes: dict[str, int] = {}
    for process in (pid, *descendants_of(pid)):
        for entry in Path(f"/proc/{process}/fd").iterdir():
            name = str(entry.readlink())
            if name.startswith("socket:["):
                inodes[name[8:-1]] = process
    tcp = [
        ("127.0.0.1", int(fields[1].rpartition(":")[2], 16))
        for fields in (*table("tcp"), *table("tcp6"))
        if fields[3] == LISTEN and fields[9] in inodes
    ]
    assert not [fields for fields in (*table("udp"), *table("udp6")) if fields[9] in inodes]
    unix = [
        str(Path(f"/proc/{inodes[fields[6]]}/cwd").resolve() / fields[7])
        for fields in table("unix")
        # The flag 00010000 (__SO_ACCEPTCON) marks a listening socket; the last field is its path.
        if len(fields) > 7 and fields[6] in inodes and fields[3] == "00010000"
    ]
    return tcp, unix


def table(name: str) -> Iterator[list[str]]:
    """Yield the fields of each line in a socket table of /proc/net."""
    for line in Path("/proc/net", name).read_text().splitlines()[1:]:
        yield line.split()


def answers_to_other_user(addresses: Any, requests: list[str]) -> list[Any]:
    """Return the answers that another user gets at these addresses."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", PROBE],
        input=json.dumps({"addresses": addresses, "requests": requests}),
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_another_user_gets_no_data_from_any_port_or_socket(session_api: Api, s3: Any):
    key = new_name()
    s3.put_object(Bucket="data", Key=key, Body=b"secret")
    s3.list_objects(Bucket="data")
    tcp, unix = listening(session_api.address.pid)
    endpoints = {session_api.address.endpoint, session_api.address.s3_endpoint}
    assert endpoints <= {f"http://{host}:{port}" for host, port in tcp}
    assert len(tcp) > len(endpoints), "SeaweedFS listens, too"
    assert [Path(path).name for path in unix if path.endswith("s3.sock")]
    lines = ("GET /", "GET /status", "GET /dir/assign", "GET /metrics", "GET /buckets/?pretty=y")
    lines += (f"GET /buckets/data/{key}", f"PUT /buckets/data/{key}", f"GET /data/{key}")
    lines += ("OPTIONS /", f"DELETE /buckets/data/{key}", "GET /debug/pprof/", "POST /")
    hosts = ("localhost:80", "evil.example", "localhost:80\r\nOrigin: http://evil.example")
    requests = [
        f"{line} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        for line in lines
        for host in hosts
    ]
    requests.append(GRPC)

    answers = answers_to_other_user([*tcp, *unix], requests)

    assert {tuple(address) for address, *_ in answers} == set(tcp), "a Unix socket is open to all"
    for *request, answer in answers:
        head, _, body = answer.partition("\r\n\r\n")
        assert "access-control-allow" not in head.lower(), request
        if GRPC in request:
            assert answer[3:4] != SETTINGS, request
        elif body:
            assert head.split(" ")[1][0] in "45", request
    assert s3.get_object(Bucket="data", Key=key)["Body"].read() == b"secret"


def test_a_web_page_gets_no_object_even_with_a_signed_url(session_api: Api, s3: Any):
    key = new_name()
    s3.put_object(Bucket="data", Key=key, Body=b"secret")
    url = s3.generate_presigned_url("get_object", {"Bucket": "data", "Key": key})
    target = url.removeprefix(session_api.address.s3_endpoint)
    host = session_api.address.s3_endpoint.removeprefix("http://")
    tcp = [(host.partition(":")[0], int(host.partition(":")[2]))]
    request = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"

    def response(headers: str) -> str:
        return str(answers_to_other_user(tcp, [f"{request}{headers}\r\n"])[0][-1])

    plain, foreign = response(""), response("Origin: http://evil.example\r\n")
    assert (plain.split()[1], foreign.split()[1]) == ("200", "403")
    assert "access-control" not in (plain + foreign).lower()


def test_the_api_refuses_signed_requests_for_another_host_or_origin(session_api: Api):
    path = "{p}/training-job-flavors"
    for headers in (
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
    ):
        status, values, sent = session_api.ask("GET", path, headers=headers)
        assert (status, values["error_code"]) == (404, "APIGW.0101")
        assert not [name for name in sent if name.startswith("access-control")]
    host = session_api.address.endpoint.removeprefix("http://")
    for headers in ({}, {"Origin": session_api.address.endpoint}, {"Host": host}):
        assert session_api.ask("GET", path, headers=headers)[0] == 200
