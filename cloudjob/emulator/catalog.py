"""What the account has beside jobs: flavors, engines, pools, quotas, algorithms, images, tags."""

from __future__ import annotations

import re
import time
import uuid
from typing import Any

from cloudjob.emulator import experiments, views, wanted
from cloudjob.emulator.answers import ApiError
from cloudjob.emulator.app import Answer, Request, Routes
from cloudjob.emulator.jobs import tag_conditions
from cloudjob.emulator.service import PROJECT, Service, number
from cloudjob.errors import CloudJobError

_PAGE, _MOST = 10, 100
_LAST = 1 << 31
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_EXPERIMENT_SORTS = ("create_time", "update_time", "name")
_TAGGED = PROJECT + "/modelarts-training-job"


class Catalog:
    """Answers what clients ask of the account."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def add_to(self, routes: Routes) -> None:
        """Add what is answered here."""
        routes.add("GET", PROJECT + "/training-job-flavors", self.flavors)
        routes.add("GET", PROJECT + "/training-pool-flavors", self.pool_flavor)
        routes.add("GET", PROJECT + "/training-job-engines", self.engines)
        routes.add("GET", PROJECT + "/training-quotas", self.quotas)
        routes.add("PUT", PROJECT + "/training-quotas", self.change_quotas)
        routes.add("GET", PROJECT + "/pools", self.pools)
        routes.add("GET", PROJECT + "/pools/{pool}", self.pool)
        routes.add("GET", PROJECT + "/search-algorithms", self.search_algorithms)
        images = "/v1/{project_id}/images"
        routes.add("GET", images, self.images)
        routes.add("POST", images, self.register_image)
        routes.add("GET", images + "/{image}", self.image)
        routes.add("DELETE", images + "/{image}", self.remove_image)
        repository = "/v2/manage/namespaces/{namespace}/repos/{repository}"
        routes.add("GET", repository + "/tags", self.image_tags)
        self._add_algorithms(routes)
        self._add_experiments(routes)
        self._add_tags(routes)

    def _add_algorithms(self, routes: Routes) -> None:
        path = PROJECT + "/algorithms"
        routes.add("POST", path, self.create_algorithm)
        routes.add("GET", path, self.algorithms)
        routes.add("GET", path + "/{algorithm_id}", self.algorithm)
        routes.add("PUT", path + "/{algorithm_id}", self.change_algorithm)
        routes.add("DELETE", path + "/{algorithm_id}", self.remove_algorithm)

    def _add_experiments(self, routes: Routes) -> None:
        path = PROJECT + "/training-experiments"
        routes.add("POST", path, self.create_experiment)
        routes.add("GET", path, self.experiments)
        routes.add("GET", path + "/{experiment_id}", self.experiment)
        routes.add("PUT", path + "/{experiment_id}", self.change_experiment)
        routes.add("DELETE", path + "/{experiment_id}", self.remove_experiment)
        routes.add("GET", PROJECT + "/training-experiment-names", self.check_experiment)

    def _add_tags(self, routes: Routes) -> None:
        routes.add("GET", _TAGGED + "/tags", self.all_tags)
        routes.add("GET", _TAGGED + "/{job_id}/tags", self.tags)
        routes.add("POST", _TAGGED + "/{job_id}/tags/create", self.add_tags)
        routes.add("DELETE", _TAGGED + "/{job_id}/tags/delete", self.remove_tags)
        routes.add("POST", _TAGGED + "/resource-instances/filter", self.tagged)
        routes.add("POST", _TAGGED + "/resource-instances/count", self.count_tagged)

    # -- flavors, engines, pools, quotas ------------------------------------------------------

    def flavors(self, request: Request) -> Answer:
        """``GET /training-job-flavors?flavor_type=``."""
        kind = request.query.get("flavor_type")
        if kind and kind not in ("CPU", "GPU", "Ascend"):
            raise ApiError("ModelArts.2764", f"flavor_type: {kind}")
        found = [
            views.flavor(item)
            for item in self._service.settings.flavors
            if not item.pool and (not kind or item.kind == kind)
        ]
        return Answer(200, {"total_count": len(found), "flavors": found})

    def pool_flavor(self, request: Request) -> Answer:
        """``GET /training-pool-flavors?flavor_id&pool_id``: the most that a node can give."""
        asked = request.query.get("flavor_id", "")
        for item in self._service.settings.flavors:
            if item.id == asked:
                return Answer(200, {"cpu_core_num": item.cpu_cores, "mem_size": item.memory_gb})
        raise ApiError("ModelArts.2781", asked)

    def engines(self, request: Request) -> Answer:
        """``GET /training-job-engines``."""
        found = [views.engine(item) for item in self._service.settings.engines]
        return Answer(200, {"total": len(found), "items": found})

    def quotas(self, request: Request) -> Answer:
        """``GET /training-quotas``."""
        settings = self._service.settings
        used = self._service.database.unfinished()
        nodes = sum(item[3] for item in used if item[1] == "Running")
        found = [
            {"resource": "training-job", "quota": settings.max_jobs, "used": len(used)},
            {"resource": "node", "quota": settings.public_nodes, "used": nodes},
        ]
        return Answer(200, {"quotas": found})

    def change_quotas(self, request: Request) -> Answer:
        """``PUT /training-quotas``: only an administrator may, and the emulator has none."""
        raise ApiError("ModelArts.2788", "quotas: they stand in the emulator's settings")

    def pools(self, request: Request) -> Answer:
        """``GET /pools``: the dedicated resource pools."""
        found = [self._pool(name) for name in self._service.settings.pools]
        return Answer(200, {"apiVersion": "v2", "kind": "PoolList", "items": found})

    def pool(self, request: Request) -> Answer:
        """``GET /pools/{name}``."""
        name = request.words["pool"]
        if name not in self._service.settings.pools:
            raise ApiError("ModelArts.2788", f"pool: {name}")
        return Answer(200, self._pool(name))

    def _pool(self, name: str) -> dict[str, Any]:
        count = self._service.settings.pools[name]
        return {
            "apiVersion": "v2",
            "kind": "Pool",
            "metadata": {"name": name, "labels": {}, "annotations": {}},
            "spec": {"type": "Dedicate", "scope": ["Train"], "resources": [{"count": count}]},
            "status": {"phase": "Running", "scope": [{"scopeType": "Train", "state": "Enabled"}]},
        }

    def search_algorithms(self, request: Request) -> Answer:
        """``GET /search-algorithms``: none, as there is no search here."""
        return Answer(200, {"search_algo_count": 0, "search_algo_list": []})

    # -- algorithms ---------------------------------------------------------------------------

    def create_algorithm(self, request: Request) -> Answer:
        """``POST /algorithms``: 200 and the algorithm, as the service has it."""
        body = self._whole_algorithm(request.json(), str(uuid.uuid4()))
        database = self._service.database
        with database.transaction():
            names = [item["metadata"]["name"] for item in database.things("algorithm")]
            if body["metadata"]["name"] in names:
                raise ApiError("ModelArts.2752")
            return self._keep_algorithm(body)

    def change_algorithm(self, request: Request) -> Answer:
        """``PUT /algorithms/{id}``."""
        old = self._thing("algorithm", request)
        asked = request.json()
        asked["metadata"] = {**old["metadata"], **wanted.inner(asked, "metadata")}
        body = self._whole_algorithm(asked, old["metadata"]["id"])
        body["metadata"]["create_time"] = old["metadata"]["create_time"]
        body["metadata"]["update_time"] = int(time.time() * 1000)
        return self._keep_algorithm(body)

    def _keep_algorithm(self, body: dict[str, Any]) -> Answer:
        metadata = body["metadata"]
        self._service.database.put_thing("algorithm", metadata["id"], metadata["name"], body)
        return Answer(200, body)

    def _whole_algorithm(self, asked: dict[str, Any], number_: str) -> dict[str, Any]:
        metadata, config = wanted.inner(asked, "metadata"), wanted.inner(asked, "job_config")
        name = metadata.get("name")
        if not isinstance(name, str) or not _NAME.match(name):
            raise ApiError("ModelArts.2788", "name: 1 to 64 letters, digits, - and _")
        wanted.check_description(metadata.get("description") or "")
        engine = wanted.inner(config, "engine")
        found = wanted.engine_of(engine, self._service.settings)
        if found:
            engine.update(engine_id=found.id, engine_name=found.name, engine_version=found.version)
        if config.get("code_dir"):
            wanted.place(config["code_dir"])
        lists = {
            key: wanted.objects(config.get(key), key) for key in ("parameters", "inputs", "outputs")
        }
        if not all(
            item.get("name") and isinstance(item["name"], str) for item in lists["parameters"]
        ):
            raise ApiError("ModelArts.2788", "parameters: one has no name")
        return {
            "metadata": {
                "description": "",
                "workspace_id": "0",
                "ai_project": "default-ai-project",
                "user_name": self._service.settings.user,
                "domain_id": self._service.account.domain_id,
                "source": "custom",
                "api_version": "",
                "is_valid": True,
                "state": "",
                "tags": None,
                "attr_list": None,
                "version_num": 0,
                "size": 0,
                "create_time": int(time.time() * 1000),
                "update_time": 0,
                **metadata,
                "id": number_,
            },
            "job_config": {**config, **lists, "engine": engine},
            "resource_requirements": asked.get("resource_requirements") or [],
            "advanced_config": asked.get("advanced_config") or {},
        }

    def algorithms(self, request: Request) -> Answer:
        """``GET /algorithms?offset&limit&order&searches``: a page; ``offset`` is its number."""
        found = self._service.database.things("algorithm")
        text = (request.query.get("searches") or "").partition("name:")[2]
        found = [item for item in found if text in item["metadata"]["name"]]
        return Answer(200, _page(request, found))

    def algorithm(self, request: Request) -> Answer:
        """``GET /algorithms/{id}``."""
        return Answer(200, self._thing("algorithm", request))

    def remove_algorithm(self, request: Request) -> Answer:
        """``DELETE /algorithms/{id}``: 202."""
        self._thing("algorithm", request)
        self._service.database.remove_thing("algorithm", request.words["algorithm_id"])
        return Answer(202, "")

    def _thing(self, kind: str, request: Request) -> dict[str, Any]:
        number_ = request.words[f"{kind}_id"]
        found = self._service.database.thing(kind, number_)
        if found is None:
            raise (
                ApiError("ModelArts.2755")
                if kind == "algorithm"
                else ApiError("ModelArts.2788", f"{kind}: {number_} not found")
            )
        return found

    # -- experiments --------------------------------------------------------------------------

    def create_experiment(self, request: Request) -> Answer:
        """``POST /training-experiments``: 201."""
        asked = wanted.inner(request.json(), "metadata")
        return Answer(201, experiments.create(self._service.database, asked))

    def experiments(self, request: Request) -> Answer:
        """``GET /training-experiments``: sorted by one of three keys, in pages."""
        database = self._service.database
        key = request.query.get("sort_by") or "create_time"
        if key not in _EXPERIMENT_SORTS:
            raise ApiError("ModelArts.2790", key)
        found = sorted(
            database.things("experiment"), key=lambda item: item["metadata"][key], reverse=True
        )
        page = _page(request, found)
        page["items"] = [experiments.counted(database, item) for item in page["items"]]
        return Answer(200, page)

    def experiment(self, request: Request) -> Answer:
        """``GET /training-experiments/{id}``."""
        found = self._thing("experiment", request)
        return Answer(200, experiments.counted(self._service.database, found))

    def change_experiment(self, request: Request) -> Answer:
        """``PUT /training-experiments/{id}``: 200, its name and its description."""
        found = self._thing("experiment", request)
        asked = request.json()
        # The reference has both keys at the top; some clients send them as they create.
        asked = {**wanted.inner(asked, "metadata"), **asked}
        changed = experiments.change(self._service.database, found, asked)["metadata"]
        return Answer(200, {key: changed[key] for key in ("name", "description")})

    def remove_experiment(self, request: Request) -> Answer:
        """``DELETE /training-experiments/{id}``: 202."""
        self._thing("experiment", request)
        self._service.database.remove_thing("experiment", request.words["experiment_id"])
        return Answer(202, "")

    def check_experiment(self, request: Request) -> Answer:
        """``GET /training-experiment-names?experiment_name=``."""
        name = request.query.get("experiment_name", "")
        return Answer(200, {"is_duplicate": experiments.has_name(self._service.database, name)})

    # -- images -------------------------------------------------------------------------------

    def images(self, request: Request) -> Answer:
        """``GET /v1/{project}/images``: those registered, and those of the settings."""
        found = self._service.database.things("image")
        settings = self._service.settings
        known = dict.fromkeys([*settings.images, *(item.image for item in settings.engines)])
        found += [self._image(path, "BUILD_IN") for path in known]
        limit = number(request.query.get("limit"), 10, 1, 500, "limit")
        page = number(request.query.get("offset"), 0, 0, _LAST, "offset")
        shown = found[page * limit : (page + 1) * limit]
        answer = {
            "current": page,
            "data": shown,
            "pages": -(-len(found) // limit),
            "size": len(shown),
            "total": len(found),
        }
        return Answer(200, answer)

    def register_image(self, request: Request) -> Answer:
        """``POST /v1/{project}/images``: 200 and the image."""
        path = str(request.json().get("swr_path") or "")
        if not path:
            raise ApiError("ModelArts.2788", "swr_path")
        made = self._image(path, "DEDICATED")
        self._service.database.put_thing("image", made["id"], path, made)
        return Answer(200, made)

    def image(self, request: Request) -> Answer:
        """``GET /v1/{project}/images/{id}``: whether the engine has it stands in its status."""
        number_ = request.words["image"]
        found = self._service.database.thing("image", number_)
        if found is None:
            raise ApiError("ModelArts.2788", f"image: {number_} not found")
        return Answer(200, found)

    def remove_image(self, request: Request) -> Answer:
        """``DELETE /v1/{project}/images/{id}``."""
        if not self._service.database.remove_thing("image", request.words["image"]):
            raise ApiError("ModelArts.2788", f"image: {request.words['image']} not found")
        return Answer(200, {})

    def image_tags(self, request: Request) -> Answer:
        """``GET /v2/manage/namespaces/{namespace}/repos/{repository}/tags`` of SWR.

        Where nodes are processes, there are no images, and each is taken for one that is there.
        """
        namespace, name = request.words["namespace"], request.words["repository"]
        repository = f"{namespace}/{name.replace('$', '/')}"
        tags = self._service.runner.context.machines.tags(repository)
        if tags == []:
            missing = {"errorCode": "SVCSTG.SWR.4040002", "errorMessage": "repo not found"}
            return Answer(404, {"errors": [missing]})
        like = request.query.get("tag") or ""
        tags = [like or "latest"] if tags is None else [tag for tag in tags if like in tag]
        limit = number(request.query.get("limit"), 100, 1, 100, "limit")
        begin = number(request.query.get("offset"), 0, 0, _LAST, "offset")
        shown = tags[begin : begin + limit]
        listed = [
            {"Tag": tag, "path": f"{repository}:{tag}", "tag_type": 0, "is_trusted": False}
            for tag in shown
        ]
        last = begin + max(0, len(shown) - 1)
        return Answer(200, listed, {"Content-Range": f"{begin}-{last}/{len(tags)}"})

    def _image(self, path: str, kind: str) -> dict[str, Any]:
        from cloudjob.emulator.nodes import ImageMissing

        status = "ACTIVE"
        try:
            self._service.runner.context.machines.check_image(path)
        except (ImageMissing, CloudJobError):
            status = "ERROR"
        name, _, tag = path.rpartition("/")[2].partition(":")
        now_ms = int(time.time() * 1000)
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, path)),
            "name": name,
            "namespace": path.rpartition("/")[0],
            "tag": tag or "latest",
            "swr_path": path,
            "arch": "x86_64",
            "type": kind,
            "status": status,
            "status_message": "" if status == "ACTIVE" else "the image cannot be pulled",
            "visibility": "PRIVATE",
            "workspace_id": "0",
            "create_at": now_ms,
            "update_at": now_ms,
        }

    # -- tags ---------------------------------------------------------------------------------

    def tags(self, request: Request) -> Answer:
        """``GET /modelarts-training-job/{id}/tags``."""
        row = self._service.job(request)
        found = self._service.database.tags(row.id)
        return Answer(200, {"tags": [{"key": key, "value": value} for key, value in found]})

    def all_tags(self, request: Request) -> Answer:
        """``GET /modelarts-training-job/tags``: every key with its values."""
        found: dict[str, list[str]] = {}
        for key, value in self._service.database.tags():
            found.setdefault(key, []).append(value)
        shown = [{"key": key, "values": values} for key, values in found.items()]
        return Answer(200, {"tags": shown})

    def add_tags(self, request: Request) -> Answer:
        """``POST /modelarts-training-job/{id}/tags/create``: 204."""
        row = self._service.job(request)
        asked = wanted.tags(_tags(request))
        with self._service.database.transaction():
            if len({**dict(self._service.database.tags(row.id)), **asked}) > wanted.TAGS:
                raise ApiError("ModelArts.2788", f"tags: at most {wanted.TAGS}")
            self._service.database.add_tags(row.id, asked)
        return Answer(204)

    def remove_tags(self, request: Request) -> Answer:
        """``DELETE /modelarts-training-job/{id}/tags/delete``: 204."""
        row = self._service.job(request)
        self._service.database.remove_tags(row.id, [str(tag.get("key")) for tag in _tags(request)])
        return Answer(204)

    def tagged(self, request: Request) -> Answer:
        """``POST …/resource-instances/filter``: the jobs with these tags."""
        limit = number(request.query.get("limit"), 10, 1, 1000, "limit")
        skip = number(request.query.get("offset"), 0, 0, _LAST, "offset")
        total, rows = self._tagged(request, limit, skip)
        shown = [
            {
                "resource_id": row.id,
                "resource_name": row.name,
                "workspace_id": row.workspace,
                "resource_detail": {},
                "tags": [
                    {"key": key, "value": value}
                    for key, value in self._service.database.tags(row.id)
                ],
            }
            for row in rows
        ]
        return Answer(200, {"resources": shown, "total_count": total})

    def count_tagged(self, request: Request) -> Answer:
        """``POST …/resource-instances/count``: how many they are."""
        return Answer(200, {"total_count": self._tagged(request, 0, 0)[0]})

    def _tagged(self, request: Request, limit: int, skip: int) -> Any:
        asked = request.json()
        words, values = ["workspace = ?"], [str(asked.get("workspace_id") or "0")]
        if asked.get("without_any_tag"):
            words.append("id NOT IN (SELECT job FROM tags)")
        for word, found in tag_conditions(asked.get("tags")):
            words.append(word)
            values += found
        matches = wanted.objects(asked.get("matches"), "matches")
        for match in matches:
            if match.get("key") != "resource_name" or len(matches) > 1:
                raise ApiError("ModelArts.2789", str(match.get("key"))[:64])
            words.append("instr(name, ?) > 0")
            values.append(str(match.get("value")))
        return self._service.database.find_jobs(
            " AND ".join(words), values, order="create_ms DESC", limit=limit, skip=skip
        )


def _tags(request: Request) -> list[dict[str, Any]]:
    found = request.json().get("tags")
    if not found:
        raise ApiError("ModelArts.2788", "tags: a list is needed")
    return wanted.objects(found, "tags")


def _page(request: Request, found: list[dict[str, Any]]) -> dict[str, Any]:
    query = request.query
    limit = number(query.get("limit"), _PAGE, 1, _MOST, "limit")
    page = number(query.get("offset"), 0, 0, _LAST, "offset")
    order = query.get("order") or "desc"
    if order == "asc":
        found = found[::-1]
    shown = found[page * limit : (page + 1) * limit]
    return {
        "total": len(found),
        "count": len(shown),
        "limit": limit,
        "offset": page,
        "sort_by": query.get("sort_by") or "create_time",
        "order": order,
        "group_by": query.get("group_by") or "",
        "items": shown,
    }
