"""What a create request asks for: every rule of the service's that needs no look at OBS. No I/O."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from cloudjob.emulator.answers import ApiError
from cloudjob.emulator.settings import Engine, Flavor, Settings

HOME = "/home/ma-user"
RETRY_NUM = "fault-tolerance/job-retry-num"
RETRY_ALWAYS = "fault-tolerance/job-unconditional-retry"
RETRY_HANG = "fault-tolerance/hang-retry"

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")
_VARIABLES, _VALUE_BYTES, _NAME_BYTES = 100, 4096, 8192
_DESCRIPTION = 256
_HOURS = 1 << 20
TAGS, _TAG = 20, 128
# Letters of any language, digits, blanks and a few signs.
_TAG_KEY = re.compile(r"[\w .:=+@-]{1,128}\Z")
_TAG_VALUE = re.compile(r"[\w .:/=+@-]{0,255}\Z")
_RETRIES = 3


class Place(NamedTuple):
    """A place in OBS."""

    bucket: str
    key: str

    @property
    def prefix(self) -> str:
        """The key as that of a folder."""
        return self.key if not self.key or self.key.endswith("/") else self.key + "/"


def place(url: Any) -> Place:
    """Return the place that a URL names: ``obs://b/k``, ``s3://b/k`` or ``/b/k``.

    Raises:
        ApiError: It names none.
    """
    text = str(url or "")
    for scheme in ("obs://", "s3://", "/"):
        if text.startswith(scheme):
            bucket, _, key = text[len(scheme) :].partition("/")
            if _BUCKET.match(bucket) and "//" not in f"/{key}" and ".." not in key.split("/"):
                return Place(bucket, key)
    raise ApiError("ModelArts.2791", f"{text}, reason: not a path of OBS")


def job(body: Mapping[str, Any], algorithm: Mapping[str, Any] | None, settings: Settings) -> Any:
    """Return the body of a create request made whole.

    Args:
        algorithm: The algorithm that the body names by its id; None when it names none.

    Raises:
        ApiError: The service would refuse it.
    """
    whole = copy.deepcopy(dict(body))
    if whole.setdefault("kind", "job") != "job":
        raise ApiError("ModelArts.2788", f"kind: {whole['kind']} is not supported here")
    whole["metadata"] = _metadata(inner(whole, "metadata"))
    wanted = inner(whole, "algorithm")
    if algorithm is not None:
        wanted = _with_algorithm(wanted, algorithm)
    whole["algorithm"] = _algorithm(wanted, settings)
    whole["spec"] = _spec(inner(whole, "spec"), settings)
    return whole


def flavor_of(whole: Mapping[str, Any], settings: Settings) -> Flavor:
    """Return the flavor of a job; that of a CPU pool has no name."""
    resource = whole["spec"]["resource"]
    asked = resource.get("flavor_id") or ""
    found = next((item for item in settings.flavors if item.id == asked), None)
    return found or Flavor("", max_nodes=settings.pools.get(resource.get("pool_id") or "", 1))


def engine_of(asked: Mapping[str, Any], settings: Settings) -> Engine | None:
    """Return the preset engine that is asked for; None when none is.

    Raises:
        ApiError: There is no such engine.
    """
    number, name = str(asked.get("engine_id") or ""), str(asked.get("engine_name") or "")
    version = str(asked.get("engine_version") or "")
    if not (number or name or version):
        return None
    for engine in settings.engines:
        if number == engine.id or (not number and (name, version) == (engine.name, engine.version)):
            return engine
    raise ApiError("ModelArts.2780", number or f"{name} {version}".strip())


def output_urls(whole: Mapping[str, Any]) -> list[str]:
    """Return where a job writes, in one spelling."""
    places = (place(item["remote"]["obs"]["obs_url"]) for item in whole["algorithm"]["outputs"])
    return [f"{item.bucket}/{item.prefix}" for item in places]


def retries(whole: Mapping[str, Any]) -> int:
    """Return how often a job may be started again; 0 without fault tolerance."""
    return int(whole["metadata"]["annotations"].get(RETRY_NUM, 0))


# -- parts ----------------------------------------------------------------------------------------


def _metadata(given: dict[str, Any]) -> dict[str, Any]:
    name = given.get("name")
    if not isinstance(name, str) or not _NAME.match(name):
        raise ApiError("ModelArts.2788", "name: 1 to 64 letters, digits, hyphens and underscores")
    check_description(given.setdefault("description", ""))
    given["workspace_id"] = str(given.get("workspace_id") or "0")
    if given["workspace_id"] != "0":
        raise ApiError("ModelArts.0102")
    notes = given.get("annotations") or {}
    if not _is_texts(notes):
        raise ApiError("ModelArts.2788", "annotations: texts are needed")
    number = notes.get(RETRY_NUM)
    if number is not None and number not in [str(item) for item in range(1, _RETRIES + 1)]:
        raise ApiError("ModelArts.2788", f"{RETRY_NUM}: 1 to {_RETRIES} (given {number})")
    given["annotations"] = notes
    return given


def check_description(text: Any) -> None:
    """Refuse what is no description.

    Raises:
        ApiError: It is none.
    """
    if not isinstance(text, str) or len(text) > _DESCRIPTION:
        raise ApiError("ModelArts.2788", f"description: at most {_DESCRIPTION} characters")


def check_path(path: Any, key: str) -> None:
    """Refuse what is no absolute path within a node.

    Raises:
        ApiError: It is none.
    """
    is_text = isinstance(path, str) and path.startswith("/") and path.isprintable()
    parts = PurePosixPath(path).parts if is_text else ()
    if len(parts) < 2 or ".." in parts or parts[0] != "/":
        raise ApiError("ModelArts.2788", f"{key}: {path} is no absolute path without ..")


def _with_algorithm(given: dict[str, Any], algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what an algorithm says and the job does not."""
    config = copy.deepcopy(algorithm["job_config"])
    merged = {key: given.get(key) or config.get(key) for key in {*given, *config}}
    merged["id"], merged["name"] = given["id"], algorithm["metadata"]["name"]
    own = objects(given.get("parameters"), "parameters")
    asked = {str(item.get("name")) for item in own}
    defaults = [item for item in config.get("parameters") or () if item["name"] not in asked]
    merged["parameters"] = [*own, *defaults]
    for key in ("inputs", "outputs"):
        # An algorithm names its channels; only the job can say where they lie.
        merged[key] = given.get(key) or []
    for key in ("code_tree", "parameters_customization"):
        merged.pop(key, None)
    return merged


def _algorithm(given: dict[str, Any], settings: Settings) -> dict[str, Any]:
    asked = inner(given, "engine")
    engine = engine_of(asked, settings)
    image = str(asked.get("image_url") or "")
    if engine:
        asked.update(engine_id=engine.id, engine_name=engine.name, engine_version=engine.version)
        _check_preset(given)
    elif not image:
        raise ApiError("ModelArts.2780", "")
    elif not given.get("command"):
        raise ApiError("ModelArts.2788", "command: a custom image needs one")
    command = given.get("command") or ""
    if not isinstance(command, str) or len(command.encode()) > settings.command_limit_bytes:
        raise ApiError("ModelArts.2788", "command: too long, or no text")
    if given.get("code_dir"):
        place(given["code_dir"])
    _check_local_code_dir(given.get("local_code_dir"))
    if given.get("working_dir"):
        check_path(given["working_dir"], "working_dir")
    given["engine"] = asked
    given["parameters"] = _parameters(given.get("parameters"))
    given["inputs"] = _channels(given.get("inputs"), "inputs")
    given["outputs"] = _channels(given.get("outputs"), "outputs")
    given["environments"] = _environments(given.get("environments"))
    return given


def _check_preset(given: Mapping[str, Any]) -> None:
    if not given.get("code_dir"):
        raise ApiError("ModelArts.2757", "code_dir is empty")
    boot = str(given.get("boot_file") or "")
    if not boot.endswith(".py"):
        raise ApiError("ModelArts.2758", f"boot_file: a .py file is needed (given {boot})")
    code, file = place(given["code_dir"]), place(boot)
    if file.bucket != code.bucket or not file.key.startswith(code.prefix):
        raise ApiError("ModelArts.2758", f"{boot} does not lie in {given['code_dir']}")


def _check_local_code_dir(path: Any) -> None:
    if not path:
        return
    check_path(path, "local_code_dir")
    parts = PurePosixPath(path).parts
    refused = [PurePosixPath(HOME, name).parts for name in ("modelarts", "modelarts-dev", "infer")]
    is_refused = any(parts[: len(other)] == other for other in refused)
    if (
        parts[:2] != ("/", "home")
        or len(parts) < 3
        or parts == PurePosixPath(HOME).parts
        or is_refused
    ):
        raise ApiError("ModelArts.2788", f"local_code_dir: {path} is not allowed")


def _parameters(given: Any) -> list[dict[str, Any]]:
    names = set()
    made = []
    for item in objects(given, "parameters"):
        name = str(item.get("name") or "")
        if not name:
            raise ApiError("ModelArts.2788", "parameters: one has no name")
        if name in names:
            raise ApiError("ModelArts.2767", name)
        names.add(name)
        value = item.get("value")
        made.append({**item, "name": name, "value": "" if value is None else str(value)})
    return made


def _channels(given: Any, key: str) -> list[dict[str, Any]]:
    names = set()
    made = []
    for index, item in enumerate(objects(given, key)):
        name = str(item.get("name") or "")
        if not _VARIABLE.match(name) or name in names:
            raise ApiError("ModelArts.2753", f"{key}: the name {name!r} is wrong or comes twice")
        names.add(name)
        method = item.get("access_method") or "parameter"
        if method not in ("parameter", "env"):
            raise ApiError("ModelArts.2753", f"{key}: access_method {method}")
        remote = item.get("remote")
        remote = remote if isinstance(remote, dict) else {}
        if "dataset" in remote:
            raise ApiError("ModelArts.2788", f"{key}: datasets are not supported here")
        obs = remote.get("obs")
        url = obs.get("obs_url") if isinstance(obs, dict) else ""
        place(url)
        local = item.get("local_dir") or f"{HOME}/modelarts/{key}/{name}_{index}"
        check_path(local, f"{key}: local_dir")
        whole = {**item, "access_method": method, "local_dir": local}
        if key == "outputs":
            whole.update(mode="upload_periodically", period=30)
        made.append(whole)
    return made


def _environments(given: Any) -> dict[str, str]:
    given = given or {}
    if not _is_texts(given):
        raise ApiError("ModelArts.2788", "environments: names and texts are needed")
    if len(given) > _VARIABLES:
        raise ApiError("ModelArts.2788", f"environments: at most {_VARIABLES}")
    for name, value in given.items():
        if not _VARIABLE.match(name) or len(name) > _NAME_BYTES or name.startswith("MA_"):
            raise ApiError("ModelArts.2788", f"environments: the name {name[:80]} is not allowed")
        if len(value) > _VALUE_BYTES or "$" in value:
            raise ApiError("ModelArts.2788", f"environments: the value of {name} is not allowed")
    return dict(given)


def _spec(given: dict[str, Any], settings: Settings) -> dict[str, Any]:
    resource = inner(given, "resource")
    given["resource"] = _resource(resource, settings)
    given["log_export_path"] = inner(given, "log_export_path")
    if given["log_export_path"].get("obs_url"):
        place(given["log_export_path"]["obs_url"])
    stop = given.get("auto_stop")
    if stop:
        duration = stop.get("duration") if isinstance(stop, dict) else None
        is_number = isinstance(duration, int) and 1 <= duration <= _HOURS
        if not is_number or stop.get("time_unit") != "HOURS":
            raise ApiError("ModelArts.2788", "auto_stop: HOURS, and at least one")
    policy = given.get("schedule_policy") or {}
    if not isinstance(policy, dict) or policy.get("priority", 1) not in (1, 2, 3):
        raise ApiError("ModelArts.2788", "schedule_policy: priority is 1, 2 or 3")
    objects(given.get("volumes"), "volumes")
    return given


def _resource(resource: dict[str, Any], settings: Settings) -> dict[str, Any]:
    pool, asked = resource.get("pool_id") or "", resource.get("flavor_id") or ""
    if pool and str(pool) not in settings.pools:
        raise ApiError("ModelArts.2788", f"pool_id: {pool}")
    found = next((item for item in settings.flavors if item.id == asked), None)
    if asked and found is None:
        raise ApiError("ModelArts.2781", asked)
    if not asked and not pool:
        raise ApiError("ModelArts.2763", "flavor_id is empty")
    if found and bool(found.pool) != bool(pool):
        raise ApiError("ModelArts.2763", f"{asked} is not one of this resource pool")
    count = resource.get("node_count")
    count = 1 if count is None else count
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ApiError("ModelArts.2788", f"node_count: {count}")
    most = settings.pools[pool] if pool else found.max_nodes if found else 1
    if count > most:
        raise ApiError("ModelArts.2793", count)
    resource["node_count"] = count
    return resource


def tags(given: Any) -> dict[str, str]:
    """Return the tags of a request.

    Raises:
        ApiError: They break a rule of the service's.
    """
    found = {}
    for tag in objects(given, "tags"):
        key, value = tag.get("key"), tag.get("value")
        value = "" if value is None else value
        if not (isinstance(key, str) and isinstance(value, str)):
            raise ApiError("ModelArts.2788", "tags: keys and values are texts")
        is_key = _TAG_KEY.match(key) and key == key.strip() and not key.startswith("_sys_")
        if not is_key or not _TAG_VALUE.match(value):
            raise ApiError("ModelArts.2788", f"tags: {key[:_TAG]}={value[:_TAG]}")
        found[key] = value
    if len(found) > TAGS:
        raise ApiError("ModelArts.2788", f"tags: at most {TAGS}")
    return found


# -- values ---------------------------------------------------------------------------------------


def inner(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an object within an object; empty when it is not there.

    Raises:
        ApiError: It is something else.
    """
    found = given.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ApiError("ModelArts.2788", f"{key}: an object is needed")
    return dict(found)


def objects(given: Any, key: str) -> list[dict[str, Any]]:
    """Return a list of objects; empty when it is not there.

    Raises:
        ApiError: It is something else.
    """
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise ApiError("ModelArts.2788", f"{key}: a list of objects is needed")
    return given


def texts(given: Any) -> list[str]:
    """Return a list of texts, which may have come as numbers; empty for anything else."""
    return [str(item) for item in given] if isinstance(given, list) else []


def _is_texts(given: Any) -> bool:
    return isinstance(given, dict) and all(
        isinstance(item, str) for pair in given.items() for item in pair
    )
