"""Training jobs: create, show, list, change, stop, delete."""

from __future__ import annotations

import time
import uuid
from ipaddress import ip_address
from typing import Any

from cloudjob.emulator import experiments, views, wanted
from cloudjob.emulator.answers import ApiError
from cloudjob.emulator.app import Answer, Request, Routes
from cloudjob.emulator.database import JobRow
from cloudjob.emulator.limits import check_code_limits
from cloudjob.emulator.obs import ObsError
from cloudjob.emulator.service import JOB, JOBS, PROJECT, Service, number
from cloudjob.emulator.wanted import Place, inner, objects, texts

_PAGE = 50
_LAST = 1 << 31
STOPPABLE = ("Creating", "Pending", "Running")
# What one may sort and filter by -> the column.
_SORTS = {
    "create_time": "create_ms",
    "name": "name",
    "job_name": "name",
    "phase": "phase",
    "status": "phase",
    "start_time": "start_ms",
    "duration": "(end_ms - start_ms)",
    "user_name": "user_name",
}
_FILTERS = {
    "name": "name",
    "create_time": "create_ms",
    "phase": "phase",
    "algorithm_name": "algorithm_name",
    "kind": "kind",
    "user_name": "user_name",
    "node_count": "nodes",
    "pool_id": "pool",
}
_NUMBERS = ("create_ms", "nodes")
# How many conditions a search may have, values each of them, and characters a value.
_FILTERS_AT_ONCE, _VALUES, _LENGTH = 50, 100, 256
_TAGS, _HOSTS = 10, 10
_WINDOW_MS = 31 * 86_400_000


class Jobs:
    """Answers what clients ask of training jobs as such."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def add_to(self, routes: Routes) -> None:
        """Add what is answered here."""
        routes.add("POST", JOBS, self.create)
        routes.add("POST", JOBS + "/batch-delete", self.delete_many)
        routes.add("GET", JOB, self.show)
        routes.add("PUT", JOB, self.change)
        routes.add("DELETE", JOB, self.delete)
        routes.add("POST", JOB + "/actions", self.act)
        routes.add("POST", PROJECT + "/training-job-searches", self.search)
        routes.add("GET", PROJECT + "/training-job-names", self.check_name)

    # -- create -------------------------------------------------------------------------------

    def create(self, request: Request) -> Answer:
        """``POST /training-jobs``: 201 and the job."""
        service = self._service
        body = request.json()
        asked = body.get("algorithm")
        whole = wanted.job(body, self._algorithm(asked), service.settings)
        tags = wanted.tags(body.get("tags"))
        self._check_obs(whole)
        with service.database.transaction():
            # Together: of requests that come at the same time one takes the name.
            self._check_room(whole)
            experiments.refer(service.database, whole["metadata"])
            row = self._row(whole)
            service.database.add_job(row, wanted.output_urls(whole), tags)
            service.database.add_event(row.id, "Training job created.")
        service.runner.wake()
        return Answer(201, views.job(row, service.settings))

    def _algorithm(self, asked: Any) -> dict[str, Any] | None:
        if not isinstance(asked, dict):
            return None
        if asked.get("subscription_id"):
            raise ApiError("ModelArts.2755")
        if not asked.get("id"):
            return None
        found = self._service.database.thing("algorithm", str(asked["id"]))
        if found is None:
            raise ApiError("ModelArts.2755")
        return found

    def _check_room(self, whole: dict[str, Any]) -> None:
        service = self._service
        metadata = whole["metadata"]
        if service.database.has_name(metadata["name"], metadata["workspace_id"]):
            raise ApiError("ModelArts.2751", metadata["name"])
        used = service.database.output_in_use(wanted.output_urls(whole))
        if used:
            raise ApiError("ModelArts.2753", f"Other running job contain {used}")
        if service.database.count_unfinished() >= service.settings.max_jobs:
            raise ApiError("ModelArts.0118", "number of training jobs")

    def _check_obs(self, whole: dict[str, Any]) -> None:
        algorithm, spec = whole["algorithm"], whole["spec"]
        try:
            if algorithm.get("code_dir"):
                self._check_code(wanted.place(algorithm["code_dir"]), algorithm)
            channels = [*algorithm["inputs"], *algorithm["outputs"]]
            urls = [item["remote"]["obs"]["obs_url"] for item in channels]
            log = spec["log_export_path"].get("obs_url")
            for url in [*urls, log] if log else urls:
                if not self._service.obs.has_bucket(wanted.place(url).bucket):
                    raise ApiError("ModelArts.2791", f"{url}, reason: the bucket does not exist")
        except ObsError as error:
            raise ApiError("ModelArts.0010") from error

    def _check_code(self, code: Place, algorithm: dict[str, Any]) -> None:
        service, settings = self._service, self._service.settings
        if not service.obs.has_bucket(code.bucket):
            raise ApiError("ModelArts.2757", f"{algorithm['code_dir']}: no such bucket")
        found = service.obs.list(code.bucket, code.prefix, limit=settings.code_limit_files * 2 + 2)
        check_code_limits(found, settings)
        if not found:
            raise ApiError("ModelArts.2757", f"{algorithm['code_dir']} is empty")
        if algorithm.get("boot_file"):
            boot = wanted.place(algorithm["boot_file"])
            if boot.key not in {item.key for item in found}:
                raise ApiError("ModelArts.2758", f"{algorithm['boot_file']} does not exist")

    def _row(self, whole: dict[str, Any]) -> JobRow:
        policy = whole["spec"].get("schedule_policy") or {}
        return JobRow(
            id=str(uuid.uuid4()),
            name=whole["metadata"]["name"],
            workspace=whole["metadata"]["workspace_id"],
            kind=whole["kind"],
            phase="Creating",
            secondary="Creating",
            priority=int(policy.get("priority", 1)),
            algorithm_name=str(whole["algorithm"].get("name") or ""),
            user_name=self._service.settings.user,
            create_ms=int(time.time() * 1000),
            start_ms=0,
            end_ms=0,
            nodes=whole["spec"]["resource"]["node_count"],
            pool=whole["spec"]["resource"].get("pool_id") or "",
            is_stopping=0,
            body=whole,
            run={},
        )

    # -- show and change ----------------------------------------------------------------------

    def show(self, request: Request) -> Answer:
        """``GET /training-jobs/{id}``."""
        return Answer(200, views.job(self._service.job(request), self._service.settings))

    def change(self, request: Request) -> Answer:
        """``PUT /training-jobs/{id}``: its description, and the priority of one that waits."""
        row = self._service.job(request)
        asked = request.json()
        body = row.body
        if "description" in asked:
            wanted.check_description(asked["description"])
            body["metadata"]["description"] = asked["description"]
        policy = inner(inner(asked, "spec"), "schedule_policy")
        values: dict[str, Any] = {}
        if "priority" in policy:
            if policy["priority"] not in (1, 2, 3) or row.is_final:
                raise ApiError("ModelArts.2788", "schedule_policy: priority is 1, 2 or 3")
            body["spec"]["schedule_policy"] = {
                **(body["spec"].get("schedule_policy") or {}),
                **policy,
            }
            values["priority"] = policy["priority"]
        self._service.database.update_job(row.id, body=body, **values)
        return self.show(request)

    def check_name(self, request: Request) -> Answer:
        """``GET /training-job-names?job_name=``: whether a name is taken."""
        query = request.query
        name, workspace = query.get("job_name", ""), query.get("workspace_id") or "0"
        return Answer(200, {"is_duplicate": self._service.database.has_name(name, workspace)})

    # -- stop and delete ----------------------------------------------------------------------

    def act(self, request: Request) -> Answer:
        """``POST /training-jobs/{id}/actions``: 202 and the job, which is Terminating."""
        service = self._service
        row = service.job(request)
        action = request.json().get("action_type")
        if action != "terminate":
            raise ApiError("ModelArts.2788", f"action_type: {action}")
        if not service.database.change_phase(row.id, STOPPABLE, "Terminating", is_stopping=1):
            raise ApiError("ModelArts.2796", f"It is {row.phase}.")
        service.database.add_event(row.id, "Training job is being terminated.")
        service.runner.wake()
        return Answer(202, views.job(service.job(request), service.settings))

    def delete(self, request: Request) -> Answer:
        """``DELETE /training-jobs/{id}``: 202; one that runs is ended first."""
        self._delete(self._service.job(request))
        return Answer(202, "")

    def delete_many(self, request: Request) -> Answer:
        """``POST /training-jobs/batch-delete``: 202; all of them, or none when one is unknown."""
        asked = objects(request.json().get("jobs"), "jobs")
        if not asked:
            raise ApiError("ModelArts.2788", "jobs: a list is needed")
        ids = [str(inner(item, "metadata").get("id")) for item in asked]
        for row in [self._service.job_of(job) for job in ids]:
            self._delete(row)
        return Answer(202, "")

    def _delete(self, row: JobRow) -> None:
        self._service.database.update_job(row.id, is_stopping=1)
        self._service.runner.remove(row.id)

    # -- list ---------------------------------------------------------------------------------

    def search(self, request: Request) -> Answer:
        """``POST /training-job-searches``: a page of jobs; ``offset`` is the page's number."""
        asked = request.json()
        limit = number(asked.get("limit"), _PAGE, 1, _PAGE, "limit")
        page = number(asked.get("offset"), 0, 0, _LAST, "offset")
        sort = str(asked.get("sort_by") or "create_time")
        order = str(asked.get("order") or "desc")
        if sort not in _SORTS or order not in ("asc", "desc"):
            raise ApiError("ModelArts.2790", f"{sort} {order}")
        where, values = self._where(asked)
        total, rows = self._service.database.find_jobs(
            where,
            values,
            order=f"{_SORTS[sort]} {order}, rowid {order}",
            limit=limit,
            skip=page * limit,
        )
        items = [views.job(row, self._service.settings) for row in rows]
        answer = {
            "total": total,
            "count": len(items),
            "limit": limit,
            "offset": page,
            "sort_by": sort,
            "order": order,
            "group_by": asked.get("group_by") or "",
            "workspace_id": asked.get("workspace_id") or "0",
            "ai_project": "default-ai-project",
            "train_type": asked.get("train_type") or "",
            "items": items,
        }
        return Answer(200, answer)

    def _where(self, asked: dict[str, Any]) -> tuple[str, list[Any]]:
        words, values = ["workspace = ?"], [str(asked.get("workspace_id") or "0")]
        filters = objects(asked.get("filters"), "filters")
        if len(filters) > _FILTERS_AT_ONCE:
            raise ApiError("ModelArts.2789", f"at most {_FILTERS_AT_ONCE} (given {len(filters)})")
        conditions = [
            *map(self._condition, filters),
            *tag_conditions(asked.get("tags")),
            *_host_conditions(asked.get("host_ips")),
            *_type_conditions(asked.get("train_type")),
        ]
        if asked.get("tags") or asked.get("host_ips"):
            conditions.append(_window(filters))
        for word, found in conditions:
            words.append(word)
            values += found
        return " AND ".join(words), values

    def _condition(self, item: Any) -> tuple[str, list[Any]]:
        key, operator = item.get("key"), item.get("operator") or "in"
        values = texts(item.get("value"))
        if key == "user_id":
            # There is one user, so all or none.
            is_own = self._service.account.user_id in values
            return ("1" if is_own != (operator == "not") else "0"), []
        column = _FILTERS.get(str(key))
        is_small = 0 < len(values) <= _VALUES and max(map(len, values)) <= _LENGTH
        if column is None or not is_small:
            raise ApiError("ModelArts.2789", str(key)[:_LENGTH])
        marks = ", ".join("?" * len(values))
        if operator == "between" and len(values) == 2:
            as_is = "CAST(? AS INTEGER)" if column in _NUMBERS else "?"
            return f"{column} BETWEEN {as_is} AND {as_is}", values
        if operator == "like":
            pattern = r"%{}%"
            words = " OR ".join(f"{column} LIKE ? ESCAPE '\\'" for _ in values)
            return f"({words})", [pattern.format(_escaped(str(text))) for text in values]
        if operator in ("in", "not"):
            return f"{column} {'NOT ' if operator == 'not' else ''}IN ({marks})", values
        raise ApiError("ModelArts.2789", f"{key} {str(operator)[:_LENGTH]}")


def tag_conditions(tags: Any) -> list[tuple[str, list[Any]]]:
    """Return the SQL for jobs with each of these tags, with one of its values if it has any.

    Raises:
        ApiError: They are too many, or one comes twice.
    """
    made = []
    keys: set[str] = set()
    for tag in objects(tags, "tags"):
        key, values = str(tag.get("key")), texts(tag.get("values"))
        is_small = len(keys) < _TAGS and len(values) <= _TAGS
        if not is_small or key in keys or len(set(values)) < len(values):
            raise ApiError("ModelArts.2788", f"tags: at most {_TAGS}, and each once")
        keys.add(key)
        values = [value for value in values if value]
        which = f" AND value IN ({', '.join('?' * len(values))})" if values else ""
        made.append((f"id IN (SELECT job FROM tags WHERE key = ?{which})", [key, *values]))
    return made


def _host_conditions(hosts: Any) -> list[tuple[str, list[Any]]]:
    """Return the SQL for jobs that ran on one of these hosts: all of them ran on this machine."""
    if not hosts:
        return []
    if not isinstance(hosts, list) or len(hosts) > _HOSTS:
        raise ApiError("ModelArts.2788", f"host_ips: a list of at most {_HOSTS} is needed")
    try:
        found = [ip_address(host if isinstance(host, str) else "") for host in hosts]
    except ValueError as error:
        raise ApiError("ModelArts.2788", f"host_ips: {error}") from error
    return [("start_ms > 0" if any(host.is_loopback for host in found) else "0", [])]


def _type_conditions(kind: Any) -> list[tuple[str, list[Any]]]:
    """Return the SQL for custom jobs (``job``) or fine-tuning jobs, of which there are none."""
    if kind in (None, "", "job"):
        return []
    if kind != "ftjob":
        raise ApiError("ModelArts.2788", "train_type: job or ftjob")
    return [("0", [])]


def _window(filters: list[dict[str, Any]]) -> tuple[str, list[Any]]:
    """Return the SQL for the time of which jobs are searched by tags or hosts: 31 days at most."""
    for item in filters:
        if item.get("key") == "create_time" and item.get("operator") == "between":
            first, last = (number(text, 0, 0, 1 << 53, "create_time") for text in item["value"])
            if last - first > _WINDOW_MS:
                raise ApiError("ModelArts.2789", "create_time: at most 31 days")
            return "1", []
    return "create_ms >= ?", [int(time.time() * 1000) - _WINDOW_MS]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
