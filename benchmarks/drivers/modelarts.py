"""Measure one step with the backend modelarts and its emulator, both on this machine.

modelarts.py submit HOME         all requests of a submit, except those that transfer code
modelarts.py list HOME COUNT     pages of a list of that many jobs, and the emulator's memory
modelarts.py kept-alive HOME     requests on one connection to the emulator
modelarts.py http-server HOME    the same on one connection to Python's http.server

It starts an emulator below HOME, and stops it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_SUBMITS, _PAGES, _REQUESTS = 5, 200, 300
_SETTINGS = "engine: process\nrequests_per_min: 1000000\n"


def submit(home: Path, _address: Any) -> dict[str, float]:
    """Run the checks and create a job: from an open backend to its handle."""
    from cloudjob.backends.modelarts.backend import ModelArtsBackend
    from cloudjob.model.job import JobSpec
    from cloudjob.model.submission import StoredCode, submission_of
    from cloudjob.store import open_store

    took = []
    for number in range(_SUBMITS):
        spec = JobSpec(script="t.py", nodes=2, backend="modelarts")
        job = f"quick-{number}"
        backend = ModelArtsBackend(home, {}, environ={}, user_home=home)
        uri, access = backend.store()
        os.environ.update(access)
        # The service requires the code folder of a job.
        open_store(uri).put_bytes(b"", f"{job}/node/boot.sh")
        base = f"obs://cloudjob/{job}"
        submission = submission_of(
            spec, job, code=StoredCode(f"{base}/code.json", "sha256:0"),
            record_uri=f"{base}/record/exit.json", outputs_uri=f"{base}/outputs",
        )  # fmt: skip
        fresh = ModelArtsBackend(home, {}, environ={}, user_home=home)
        begun = time.monotonic()
        request = fresh.build(submission)
        wrong = [check for check in fresh.checks(spec, uri) if not check.is_ok]
        handle = fresh.send(request)
        took.append(time.monotonic() - begun)
        assert not wrong, wrong
        fresh.remove(handle)
    return {"request_s": statistics.median(took)}


def list_(home: Path, address: Any, count: str) -> dict[str, float]:
    """Request the first page, the last page and a filtered one, repeatedly."""
    from cloudjob.backends.modelarts.backend import ModelArtsBackend

    _fill(home, int(count))
    client = ModelArtsBackend(home, {}, environ={}, user_home=home)._client()
    last = (int(count) - 1) // 50
    bodies: list[dict[str, Any]] = [
        {"limit": 50},
        {"limit": 50, "offset": last},
        {"limit": 50, "filters": [{"key": "name", "operator": "like", "value": ["7"]}]},
    ]
    took: list[list[float]] = [[] for _ in bodies]
    before = 0.0
    for number in range(_PAGES):
        for body, each in zip(bodies, took, strict=True):
            begun = time.monotonic()
            answer = client._call("POST", "/training-job-searches", "searching jobs", json=body)
            each.append(time.monotonic() - begun)
            assert len(answer["items"]) == 50, answer["total"]
        if number == _PAGES // 10:
            before = _rss_mib(address["pid"])
    after = _rss_mib(address["pid"])
    slowest_s = max(statistics.median(each) for each in took)
    return {"page_ms": 1000 * slowest_s, "server_rss_mib": after, "grown_mib": after - before}


def kept_alive(_home: Path, address: Any) -> dict[str, float]:
    """Send requests without a signature to the emulator, which refuses each one at once."""
    return _timed_posts(f"{address['endpoint']}/v2/project/training-job-searches", 401)


def http_server(_home: Path, _address: Any) -> dict[str, float]:
    """Send the same requests to Python's own server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        return _timed_posts(f"http://127.0.0.1:{server.server_port}/", 200)
    finally:
        server.shutdown()


def _timed_posts(url: str, status: int) -> dict[str, float]:
    """Return the median time of a request, all on one connection."""
    import requests

    took = []
    with requests.Session() as session:
        session.trust_env = False
        for _ in range(_REQUESTS):
            begun = time.monotonic()
            answer = session.post(url, json={"limit": 50})
            took.append(time.monotonic() - begun)
            assert answer.status_code == status, answer.text
    return {"request_s": statistics.median(took)}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body are sent together, as a server should.
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'{"total": 0, "count": 0, "items": []}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _fill(home: Path, count: int) -> None:
    """Put jobs of an earlier time into the database."""
    from cloudjob.emulator import models
    from cloudjob.emulator.database import FINAL, Database, JobRow, StopRequest
    from cloudjob.emulator.settings import defaults

    request = {
        "kind": "job",
        "metadata": {"name": "old"},
        "algorithm": {"engine": {"image_url": "a/b:c"}, "command": "true"},
        "spec": {"resource": {"flavor_id": "modelarts.vm.cpu.2u", "node_count": 1}},
    }
    body = models.job(request, defaults())
    database = Database(home / "emulator" / "state.db")
    with database.transaction():
        for index in range(count):
            phase = FINAL[index % 3]
            body.metadata.name = name = f"old-{index:05d}"
            row = JobRow(
                id=f"{index:08d}-0000-0000-0000-000000000000", name=name, workspace="0", kind="job",
                phase=phase, secondary=phase, priority=1, algorithm_name="", user_name="emulator",
                create_ms=1_000_000 + index, start_ms=1, end_ms=2, nodes=1, pool="",
                stop_request=StopRequest.NONE, body=body, run=models.Run(),
            )  # fmt: skip
            database.add_job(row, (), {})
    database.close()


def _rss_mib(process: int) -> float:
    text = Path(f"/proc/{process}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def _emulator(home: Path, *args: str) -> str:
    argv = (sys.executable, "-m", "cloudjob.cli", "emulator", *args)
    env = {**os.environ, "CLOUDJOB_HOME": str(home)}
    return subprocess.run(argv, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    steps: dict[str, Callable[..., dict[str, float]]] = {
        "submit": submit, "list": list_, "kept-alive": kept_alive, "http-server": http_server,
    }  # fmt: skip
    place = Path(sys.argv[2])
    place.mkdir(parents=True, exist_ok=True)
    settings = place / "settings.yaml"
    settings.write_text(_SETTINGS)
    up = json.loads(_emulator(place, "up", "--settings", str(settings), "--json"))
    try:
        figures = steps[sys.argv[1]](place, up, *sys.argv[3:])
    finally:
        _emulator(place, "down")
    print(json.dumps(figures))
