"""What belongs to one training job: logs, metrics, events, tasks, stages."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from cloudjob.emulator import logs as logs_
from cloudjob.emulator import views
from cloudjob.emulator.answers import ApiError
from cloudjob.emulator.app import Answer, Request, Routes
from cloudjob.emulator.database import JobRow
from cloudjob.emulator.ground import export_log, logs_of
from cloudjob.emulator.logs import NodeLog
from cloudjob.emulator.obs import ObsError
from cloudjob.emulator.service import JOB, JOBS, PROJECT, Service, number

_TASK = JOB + "/tasks/{task_id}"
_URL_S = 300
_EVENTS, _MOST_EVENTS = 50, 100
_LINES, _MOST_LINES = 100, 1000
_LAST = 1 << 31
_PATTERN = 256
_TYPES = ("text/plain", "application/octet-stream")
# What the service offers and this one does not; asked for, it says that the parameter is invalid.
_NOT_HERE = (
    ("POST", JOBS.removesuffix("/training-jobs") + "/gallery-algorithm-publication"),
    ("POST", _TASK + "/save-image-job"),
    ("GET", _TASK + "/save-image-job"),
    ("GET", JOB + "/ft-artifacts"),
    ("POST", JOB + "/ft-artifacts/publish"),
    ("GET", JOB + "/ft-detail"),
    ("GET", JOB + "/ft-metrics"),
    ("GET", JOB + "/autosearch-parameter-analysis"),
    ("GET", JOB + "/autosearch-parameter-analysis/{name}"),
    ("GET", JOB + "/autosearch-trials"),
    ("GET", JOB + "/autosearch-trials/{trial}"),
    ("POST", JOB + "/autosearch-trial-earlystop/{trial}"),
    ("GET", JOBS + "/autosearch/yaml-templates"),
    ("GET", JOBS + "/autosearch/yaml-templates/{type}/{name}"),
)


class Parts:
    """Answers what clients ask of one job."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def add_to(self, routes: Routes) -> None:
        """Add what is answered here."""
        for method, path in _NOT_HERE:
            routes.add(method, path, self._not_here(path))
        routes.add("GET", _TASK + "/logs/preview", self.preview)
        routes.add("GET", _TASK + "/logs/url", self.log_url)
        routes.add("GET", JOB + "/logs/{task_id}", self.log_lines)
        routes.add("GET", JOB + "/metrics/{task_id}", self.metrics)
        routes.add("GET", JOB + "/events", self.events)
        routes.add("GET", JOB + "/tasks", self.tasks)
        routes.add("GET", JOB + "/stages", self.stages)
        routes.add("GET", JOB + "/route_plan", self.route_plan)
        routes.add("POST", _TASK + "/reports/{report_type}", self.report)
        routes.add("GET", PROJECT + "/training-event-categories", self.categories)

    def _not_here(self, path: str) -> Callable[[Request], Answer]:
        name = path.removeprefix(PROJECT)

        def refuse(request: Request) -> Answer:
            if "job_id" in request.words:
                self._service.job(request)
            raise ApiError("ModelArts.2788", f"{name} is not supported for this job")

        return refuse

    # -- logs ---------------------------------------------------------------------------------

    def _log(self, request: Request) -> tuple[JobRow, int, NodeLog]:
        row = self._service.job(request)
        index = self._service.node(request, row)
        folder = logs_of(self._service.runner.context.folder, row.id)
        return row, index, NodeLog(folder / str(index))

    def preview(self, request: Request) -> Answer:
        """``GET …/tasks/{task}/logs/preview``: the last bytes of a log; 204 for none yet."""
        _, _, log = self._log(request)
        found, size = log.tail(self._service.settings.log_preview_bytes)
        if not size:
            raise ApiError("ModelArts.2776")
        text = found.decode("utf-8", "replace")
        return Answer(200, {"content": text, "current_size": len(found), "full_size": size})

    def log_url(self, request: Request) -> Answer:
        """``GET …/tasks/{task}/logs/url``: a URL of the whole log in OBS, for five minutes."""
        row, index, _ = self._log(request)
        kind = request.query.get("Content-Type") or request.headers.get("content-type", "")
        kind = kind if kind in _TYPES else _TYPES[0]
        try:
            place = export_log(self._service.runner.context, row, index)
            if place is None:
                raise ApiError("ModelArts.2776")
            return Answer(200, {"obs_url": self._service.obs.url(place, kind, _URL_S)})
        except ObsError as error:
            raise ApiError("ModelArts.0010") from error

    def log_lines(self, request: Request) -> Answer:
        """``GET …/logs/{task}?base_line&lines&order``: lines of a log by their numbers."""
        _, _, log = self._log(request)
        query = request.query
        count = number(query.get("lines"), _LINES, 1, _MOST_LINES, "lines")
        found, size = log.tail(self._service.settings.log_preview_bytes)
        if not size:
            raise ApiError("ModelArts.2776")
        all_lines = found.decode("utf-8", "replace").splitlines(keepends=True)
        base = number(query.get("base_line"), -1, 0, _LAST, "base_line")
        if query.get("order", "desc") == "asc":
            first = base if base >= 0 else 0
        else:
            first = (base if base >= 0 else len(all_lines)) - count
        first = max(0, first)
        shown = list(logs_.lines("".join(all_lines), first, count))
        return Answer(
            200,
            {
                "start_line": str(first),
                "end_line": str(first + len(shown)),
                "lines": len(shown),
                "content": "".join(shown),
            },
        )

    # -- what happened ------------------------------------------------------------------------

    def metrics(self, request: Request) -> Answer:
        """``GET …/metrics/{task}``: percent a minute; -1 for not known, 204 for none yet."""
        row = self._service.job(request)
        index = self._service.node(request, row)
        found = self._service.database.metrics(row.id, f"worker-{index}")
        if not found:
            raise ApiError("ModelArts.2777")
        unknown = [-1.0] * len(found)
        values = {
            "cpuUsage": [cpu for cpu, _ in found],
            "memUsage": [memory for _, memory in found],
            **dict.fromkeys(("gpuUtil", "gpuMemUsage", "npuUtil", "npuMemUsage"), unknown),
        }
        shown = [{"metric": name, "value": value} for name, value in values.items()]
        return Answer(200, {"metrics": shown})

    def events(self, request: Request) -> Answer:
        """``GET …/events``: what happened, filtered and in pages; ``offset`` is a page's number."""
        row = self._service.job(request)
        query = request.query
        limit = number(query.get("limit"), _EVENTS, 1, _MOST_EVENTS, "limit")
        page = number(query.get("offset"), 0, 0, _LAST, "offset")
        order = query.get("order") or "desc"
        if order not in ("asc", "desc"):
            raise ApiError("ModelArts.2764", f"order: {order}")
        where, values = _event_filters(row.id, query)
        database = self._service.database
        total, found = database.events(where, values, order=order, limit=limit, skip=page * limit)
        end_ms = row.end_ms or found[0][0] if found else row.end_ms
        shown = [
            {"message": message, "level": level, "time": _rfc3339(time_ms), "source": source}
            for time_ms, level, source, message in found
        ]
        answer = {
            "total": total,
            "limit": limit,
            "offset": page,
            "order": order,
            "start_time": query.get("start_time") or _rfc3339(row.create_ms),
            "end_time": query.get("end_time") or _rfc3339(end_ms or row.create_ms),
            "events": shown,
        }
        return Answer(200, answer)

    def tasks(self, request: Request) -> Answer:
        """``GET …/tasks?schedule_count``: where each task ran, each time it was scheduled."""
        row = self._service.job(request)
        query = request.query
        asked = number(query.get("schedule_count"), -1, 0, _LAST, "schedule_count")
        count = int(row.run.get("attempt", 0)) + 1 if row.start_ms else 0
        found = [
            {"task": name, "ip": _address(index), "host_ip": "127.0.0.1", "schedule_count": time}
            for time in range(1, count + 1)
            for index, name in enumerate(views.tasks(row))
            if asked in (-1, time)
        ]
        return Answer(200, found)

    def stages(self, request: Request) -> Answer:
        """``GET …/stages``: the parts of each attempt."""
        row = self._service.job(request)
        records = row.run.get("running_records") or []
        shown = [
            {"record_order": order, "stages": _stages(row, record)}
            for order, record in enumerate(records)
        ]
        return Answer(200, {"total_count": len(shown), "running_records": shown})

    def route_plan(self, request: Request) -> Answer:
        """``GET …/route_plan``: ranks are never renumbered here."""
        row = self._service.job(request)
        return Answer(200, {"job_id": row.id, "status": "disabled", "rank_mapping": ""})

    def report(self, request: Request) -> Answer:
        """``POST …/reports/{type}``: what a task tells of itself becomes an event."""
        row = self._service.job(request)
        index = self._service.node(request, row)
        kind = request.words["report_type"]
        told = request.json().get("type") or ""
        self._service.database.add_event(row.id, f"[worker-{index}] {kind}: {told}", source="Task")
        return Answer(200, {})

    def categories(self, request: Request) -> Answer:
        """``GET /training-event-categories``: what a notification may be about."""
        names = ("Started", "Completed", "Failed", "Terminated", "Restarted", "Hanged", "Preempted")
        shown = [
            {"id": f"Job{name}", "name": f"Job{name}", "description": "", "notification": True}
            for name in names
        ]
        return Answer(200, {"event-categories": shown})


def _event_filters(job: str, query: dict[str, str]) -> tuple[str, list[Any]]:
    words = ["job = ?"]
    values: list[Any] = [job]
    for key in ("level", "source"):
        if query.get(key):
            words.append(f"{key} = ?")
            values.append(query[key])
    pattern = query.get("pattern") or ""
    if len(pattern) > _PATTERN:
        raise ApiError("ModelArts.2764", "pattern")
    if pattern:
        words.append("instr(message, ?) > 0")
        values.append(pattern)
    begin, end = query.get("start_time"), query.get("end_time")
    if bool(begin) != bool(end):
        raise ApiError("ModelArts.2764", "start_time and end_time belong together")
    if begin:
        words.append("time_ms BETWEEN ? AND ?")
        values += [
            number(begin, 0, 0, 1 << 53, "start_time"),
            number(end, 0, 0, 1 << 53, "end_time"),
        ]
    return " AND ".join(words), values


def _stages(row: JobRow, record: dict[str, Any]) -> list[dict[str, Any]]:
    begin, end = int(record["start_at"]) * 1000, int(record.get("end_at") or 0) * 1000
    times = {
        "Queuing": (row.create_ms, begin),
        "Running": (begin, end),
    }
    return [
        {
            "job_id": row.id,
            "name": name,
            "en_message": name,
            "zh_message": name,
            "start_time": _rfc3339(first),
            "end_time": _rfc3339(last) if last else "",
            "stage_order": order,
            "sub_stages": [],
        }
        for order, (name, (first, last)) in enumerate(times.items())
    ]


def _address(index: int) -> str:
    return f"127.0.{index // 254}.{index % 254 + 1}"


def _rfc3339(milliseconds: int) -> str:
    moment = datetime.fromtimestamp(milliseconds / 1000, timezone.utc)
    return moment.isoformat(timespec="seconds")
