"""Requests about a running job that others write into its store."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice

from jobentry.control.insight import stored_requests
from jobentry.system.requests import request

GOOD = [request("stacks", with_threads=True, nonce=str(number)) for number in range(2)]
HOSTILE = [
    *(b"", b"{}", b"[]", b"5", b"\xff", b"[" * 4000, b"x" * 9_000_000),
    *(request("profile", rank=0, seconds=600), request("exec", command="rm"), b'{"kind": []}'),
    b'{"kind": "stacks"' + b" " * 9000 + b"}",
]


def test_only_requests_for_stacks_are_taken_from_a_store() -> None:
    """Each of them once; a store without a request, or one that refuses, is asked again."""
    answers: list[bytes | int] = [404, 403, *HOSTILE, GOOD[0], GOOD[0], 404, *HOSTILE, GOOD[1]]
    served = iter(answers)

    class Store(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = next(served)
            self.send_response(answer if isinstance(answer, int) else 200)
            self.end_headers()
            self.wfile.write(b"" if isinstance(answer, int) else answer)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Store) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        try:
            uri = "http://127.0.0.1:%d/request.json" % server.server_port
            taken = list(islice(stored_requests(uri, pause=lambda _: None), 2))
        finally:
            server.shutdown()

    assert [line for line, _ in taken] == GOOD
    assert taken[0][1] == {"kind": "stacks", "with_threads": True, "with_native": False}
