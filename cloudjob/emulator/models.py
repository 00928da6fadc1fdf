"""Pydantic models of requests, and of what the database keeps of them as JSON.

Their validation errors are those that the service documents. A request stays a model from its
validation until it is stored, and is one again when it is read. The models use neither OBS nor the
database. Unknown keys are kept, because the service returns them.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    model_serializer,
    model_validator,
)

from cloudjob.emulator.errors import ServiceRefusal
from cloudjob.emulator.obs.request import BUCKET
from cloudjob.emulator.settings import Flavor, PresetEngine, Settings

HOME = "/home/ma-user"
RETRY_NUM = "fault-tolerance/job-retry-num"
RETRY_ALWAYS = "fault-tolerance/job-unconditional-retry"
RETRY_HANG = "fault-tolerance/hang-retry"
# The error code for a key or an order in which a list cannot be sorted.
UNSORTABLE = "ModelArts.2790"
TAGS = 20

_RETRIES = 3
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_VARIABLES, _VALUE_BYTES, _NAME_BYTES = 100, 4096, 8192
# Letters of any language, digits, spaces and a few signs.
_TAG_KEY = re.compile(r"[\w .:=+@-]{1,128}\Z")
_TAG_VALUE = re.compile(r"[\w .:/=+@-]{0,255}\Z")

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Description = Annotated[str, Field(max_length=256)]
Priority = Annotated[int, Field(ge=1, le=3)]
Offset = Annotated[int, Field(ge=0, le=1 << 31)]
Order = Literal["asc", "desc"]
Time = Annotated[int, Field(ge=0, le=1 << 53)]
M = TypeVar("M", bound="Model")
T = TypeVar("T")
# Validation of a list stops at its first error, because a body may contain millions of items.
Items = Annotated[list[T], FailFast()]


def _texts(values: dict[str, Any]) -> dict[str, Any]:
    if not all(isinstance(value, str) for value in values.values()):
        raise ValueError("must be a mapping of names to strings")
    return values


Texts = Annotated[dict[str, Any], AfterValidator(_texts)]


class Model(BaseModel):
    """A JSON object of a request; a null counts as a missing key.

    Args:
        codes: Key -> the error code for an invalid value; ``code`` for other keys.
    """

    model_config = ConfigDict(extra="allow", strict=True)
    code: ClassVar[str] = "ModelArts.2788"
    codes: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {key: value for key, value in body.items() if value is not None}

    def __conform__(self, _protocol: Any) -> str:
        """Return the text with which SQLite stores this object."""
        return self.model_dump_json()


class StoredResource(Model):
    """An object that the database keeps under an id.

    Args:
        kind: The name of its kind in the database.
    """

    kind: ClassVar[str]


class Query(Model):
    """The query of a request, with numbers as text; an empty value counts as missing."""

    model_config = ConfigDict(extra="ignore", strict=False)
    code: ClassVar[str] = "ModelArts.2764"


class PageQuery(Query):
    """The requested page of a list; ``offset`` is its number."""

    codes: ClassVar[Mapping[str, str]] = {"sort_by": UNSORTABLE, "order": UNSORTABLE}
    limit: Annotated[int, Field(ge=1, le=100)] = 10
    offset: Offset = 0

    def of(self, items: list[T]) -> list[T]:
        """Return the items of the page."""
        return items[self.offset * self.limit : (self.offset + 1) * self.limit]


def parse(model: type[M], value: Any, context: Any = None) -> M:
    """Return a validated model.

    Raises:
        ServiceRefusal: With the documented code of the first broken rule.
    """
    try:
        return model.model_validate(value, context=context)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, ServiceRefusal):
            raise cause from error
        where = ".".join(map(str, problem["loc"]))
        code = model.codes.get(str(next(iter(problem["loc"]), "")), model.code)
        raise ServiceRefusal(code, f"{where}: {cause or problem['msg']}") from error


def now_ms() -> int:
    """Return the time in milliseconds since the epoch, as the service writes it."""
    return int(time.time() * 1000)


def task_of(node: int) -> str:
    """Return the name of the task that a node runs."""
    return f"worker-{node}"


class ObsPlace(NamedTuple):
    """A place in OBS."""

    bucket: str
    key: str

    @property
    def prefix(self) -> str:
        """The key as the key of a folder, with a slash at its end."""
        return self.key if not self.key or self.key.endswith("/") else self.key + "/"


def place(url: str | None) -> ObsPlace:
    """Return the place that a URL names: ``obs://b/k``, ``s3://b/k`` or ``/b/k``.

    Raises:
        ServiceRefusal: The URL has none of these forms.
    """
    text = url or ""
    for scheme in ("obs://", "s3://", "/"):
        if text.startswith(scheme):
            bucket, _, key = text[len(scheme) :].partition("/")
            is_key = "//" not in f"/{key}" and ".." not in key.split("/") and "\0" not in key
            if BUCKET.match(bucket) and is_key:
                return ObsPlace(bucket, key)
    raise ServiceRefusal("ModelArts.2791", f"{text}, reason: not a path of OBS")


def check_path(path: str, key: str) -> None:
    """Check that a path is absolute and contains no ``..``.

    Raises:
        ServiceRefusal: The path is invalid.
    """
    parts = PurePosixPath(path).parts
    is_absolute = path.startswith("/") and path.isprintable() and parts[0] == "/"
    if not is_absolute or len(parts) < 2 or ".." in parts:
        raise ServiceRefusal("ModelArts.2788", f"{key}: {path} is not an absolute path without ..")


# -- tags -----------------------------------------------------------------------------------------


class Tag(Model):
    """A tag of a job."""

    key: str
    value: str = ""

    @model_validator(mode="after")
    def _check(self) -> Tag:
        key = self.key
        is_key = _TAG_KEY.match(key) and key == key.strip() and not key.startswith("_sys_")
        if not is_key or not _TAG_VALUE.match(self.value):
            raise ServiceRefusal("ModelArts.2788", f"tags: {key[:128]}={self.value[:128]}")
        return self


def by_key(tags: Iterable[Tag]) -> dict[str, str]:
    """Return the values of tags by their keys.

    Raises:
        ServiceRefusal: There are too many.
    """
    value_of = {tag.key: tag.value for tag in tags}
    if len(value_of) > TAGS:
        raise ServiceRefusal("ModelArts.2788", f"tags: at most {TAGS}")
    return value_of


# -- a job ----------------------------------------------------------------------------------------


class ExperimentReference(Model):
    """The experiment that a job belongs to."""

    id: str = ""
    name: str = ""
    description: Description | None = None
    serial_number: Any = None


class _Metadata(Model):
    name: Name
    description: Description = ""
    workspace_id: str = "0"
    annotations: Texts = {}
    training_experiment_reference: ExperimentReference | None = None

    @model_validator(mode="after")
    def _check(self) -> _Metadata:
        if self.workspace_id not in ("", "0"):
            raise ServiceRefusal("ModelArts.0102")
        self.workspace_id = "0"
        number = self.annotations.get(RETRY_NUM, "1")
        if number not in [str(item) for item in range(1, _RETRIES + 1)]:
            raise ServiceRefusal("ModelArts.2788", f"{RETRY_NUM}: 1 to {_RETRIES} (given {number})")
        return self

    @property
    def retries(self) -> int:
        """How often the job may be restarted; 0 without fault tolerance."""
        return int(self.annotations.get(RETRY_NUM, 0))

    def has(self, annotation: str) -> bool:
        """Whether an annotation is set to true."""
        return bool(self.annotations.get(annotation) == "true")


class Parameter(Model):
    """A parameter, which becomes ``--name=value``."""

    name: Annotated[str, Field(min_length=1)]
    value: Annotated[str, BeforeValidator(str)] = ""


class _ObsUrl(Model):
    obs_url: str | None = None


class _Remote(Model):
    obs: _ObsUrl = _ObsUrl()


class Channel(Model):
    """An input or an output: a folder of a node with its place in OBS."""

    name: str = ""
    access_method: str = ""
    local_dir: str = ""
    remote: _Remote = _Remote()

    @property
    def url(self) -> str:
        """Its URL in OBS."""
        return self.remote.obs.obs_url or ""

    @property
    def place(self) -> ObsPlace:
        """Its place in OBS."""
        return place(self.url)

    def complete(self, key: str, index: int) -> None:
        """Fill in the defaults of item ``index`` of the list ``key``, and check it."""
        if not _VARIABLE.match(self.name):
            raise ServiceRefusal("ModelArts.2753", f"{key}: the name {self.name!r} is wrong")
        self.access_method = self.access_method or "parameter"
        if self.access_method not in ("parameter", "env"):
            raise ServiceRefusal("ModelArts.2753", f"{key}: access_method {self.access_method}")
        if "dataset" in (self.remote.model_extra or {}):
            raise ServiceRefusal("ModelArts.2788", f"{key}: datasets are not supported here")
        place(self.remote.obs.obs_url)
        self.local_dir = self.local_dir or f"{HOME}/modelarts/{key}/{self.name}_{index}"
        check_path(self.local_dir, f"{key}: local_dir")


class _Output(Channel):
    mode: Any = None
    period: Any = None

    def complete(self, key: str, index: int) -> None:
        super().complete(key, index)
        self.mode, self.period = "upload_periodically", 30


# The service takes any value for the name of an engine.
_EngineText = Annotated[str, BeforeValidator(lambda value: str(value or ""))]


class EngineChoice(Model):
    """The preset engine of a job, or its own image, or both."""

    engine_id: _EngineText | None = None
    engine_name: _EngineText | None = None
    engine_version: _EngineText | None = None
    image_url: Any = None

    def preset(self, settings: Settings) -> PresetEngine | None:
        """Return the preset engine; None if the request names none.

        Raises:
            ServiceRefusal: There is no such engine.
        """
        number, name = self.engine_id or "", self.engine_name or ""
        version = self.engine_version or ""
        if not (number or name or version):
            return None
        for engine in settings.engines:
            by_name = not number and (name, version) == (engine.name, engine.version)
            if by_name or number == engine.id:
                return engine
        raise ServiceRefusal("ModelArts.2780", number or f"{name} {version}".strip())

    def complete(self, settings: Settings) -> PresetEngine | None:
        """Fill in all keys of a preset engine, and return it; None if the request names none."""
        engine = self.preset(settings)
        if engine:
            self.engine_id, self.engine_name = engine.id, engine.name
            self.engine_version = engine.version
        return engine

    @model_serializer(mode="wrap")
    def _given_keys(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if value is not None}


class Algorithm(Model):
    """What a job runs."""

    id: Any = None
    name: Any = None
    engine: EngineChoice = EngineChoice()
    code_dir: str = ""
    boot_file: str = ""
    command: str = ""
    local_code_dir: str = ""
    working_dir: str = ""
    parameters: Items[Parameter] = []
    inputs: Items[Channel] = []
    outputs: Items[_Output] = []
    environments: Texts = {}

    @property
    def channels(self) -> list[Channel]:
        """Inputs and outputs."""
        return [*self.inputs, *self.outputs]

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Algorithm:
        if not info.context:
            return self
        settings: Settings = info.context
        self._check_engine(settings)
        if len(self.command.encode()) > settings.command_limit_bytes:
            raise ServiceRefusal("ModelArts.2788", "command: too long")
        if self.code_dir:
            place(self.code_dir)
        if self.working_dir:
            check_path(self.working_dir, "working_dir")
        _check_local_code_dir(self.local_code_dir)
        _check_distinct([item.name for item in self.parameters], "ModelArts.2767", "")
        for key, channels in (("inputs", self.inputs), ("outputs", self.outputs)):
            for index, channel in enumerate(channels):
                channel.complete(key, index)
            _check_distinct([item.name for item in channels], "ModelArts.2753", f"{key}: ")
        _check_environments(self.environments)
        return self

    def _check_engine(self, settings: Settings) -> None:
        if self.engine.complete(settings):
            _check_preset(self.code_dir, self.boot_file)
        elif not self.engine.image_url:
            raise ServiceRefusal("ModelArts.2780", "")
        elif not self.command:
            raise ServiceRefusal("ModelArts.2788", "command: a custom image needs one")


class _Resource(Model):
    pool_id: str | None = None
    flavor_id: str | None = None
    node_count: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> _Resource:
        if not info.context:
            return self
        settings: Settings = info.context
        pool, flavor_id = self.pool_id or "", self.flavor_id or ""
        if pool and pool not in settings.pools:
            raise ServiceRefusal("ModelArts.2788", f"pool_id: {pool}")
        flavor = next((item for item in settings.flavors if item.id == flavor_id), None)
        if flavor_id and flavor is None:
            raise ServiceRefusal("ModelArts.2781", flavor_id)
        if not flavor_id and not pool:
            raise ServiceRefusal("ModelArts.2763", "flavor_id is empty")
        if flavor and bool(flavor.pool) != bool(pool):
            raise ServiceRefusal("ModelArts.2763", f"{flavor_id} is not one of this resource pool")
        max_nodes = settings.pools[pool] if pool else flavor.max_nodes if flavor else 1
        if self.node_count > max_nodes:
            raise ServiceRefusal("ModelArts.2793", self.node_count)
        return self


class _AutoStop(Model):
    time_unit: Literal["HOURS"]
    duration: Annotated[int, Field(ge=1, le=1 << 20)]


class SchedulePolicy(Model):
    """The priority of a job in the queue."""

    priority: Priority | None = None


class _Spec(Model):
    resource: Annotated[_Resource, Field(validate_default=True)] = {}  # type: ignore[assignment]
    log_export_path: _ObsUrl = _ObsUrl()
    auto_stop: _AutoStop | None = None
    schedule_policy: SchedulePolicy | None = None
    volumes: Items[dict[str, Any]] = []

    @model_validator(mode="after")
    def _check(self) -> _Spec:
        if self.log_export_path.obs_url:
            place(self.log_export_path.obs_url)
        return self


class JobRequest(Model):
    """The request that creates a job.

    Rules that depend on the settings are checked when it is received, and not when it is read from
    the database, because the settings may have changed since.
    """

    kind: Literal["job"] = "job"
    metadata: Annotated[_Metadata, Field(validate_default=True)] = {}  # type: ignore[assignment]
    algorithm: Annotated[Algorithm, Field(validate_default=True)] = {}  # type: ignore[assignment]
    spec: Annotated[_Spec, Field(validate_default=True)] = {}  # type: ignore[assignment]
    endpoints: Any = None
    tags: Items[Tag] = []

    def flavor(self, settings: Settings) -> Flavor:
        """Return the flavor of the job; the flavor of a CPU pool has no name."""
        resource = self.spec.resource
        flavor = next((item for item in settings.flavors if item.id == resource.flavor_id), None)
        return flavor or Flavor("", max_nodes=settings.pools.get(resource.pool_id or "", 1))

    def output_urls(self) -> list[str]:
        """Return the URLs of the job's outputs in a uniform spelling."""
        places = [item.place for item in self.algorithm.outputs]
        return [f"{item.bucket}/{item.prefix}" for item in places]


class AlgorithmConfig(Model):
    """What the jobs of a stored algorithm run; they may override any of it."""

    engine: EngineChoice = EngineChoice()
    code_dir: str = ""
    parameters: Items[Parameter] = []
    inputs: Items[dict[str, Any]] = []
    outputs: Items[dict[str, Any]] = []


def job(body: Mapping[str, Any], settings: Settings) -> JobRequest:
    """Return the body of a create request, validated and with all defaults.

    Raises:
        ServiceRefusal: The service would refuse it.
    """
    return parse(JobRequest, body, settings)


class _Parameters(Model):
    parameters: Items[Parameter] = []


def with_algorithm(
    requested: Mapping[str, Any], name: str, job_config: AlgorithmConfig
) -> dict[str, Any]:
    """Return the algorithm of a request with the values of a stored one for the keys it lacks.

    Args:
        name: The name of the stored algorithm.
    """
    config = job_config.model_dump()
    merged = {key: requested.get(key) or config.get(key) for key in {*requested, *config}}
    parameters = parse(_Parameters, {"parameters": requested.get("parameters")}).parameters
    own_names = {item.name for item in parameters}
    defaults = [item for item in job_config.parameters if item.name not in own_names]
    for key in ("code_tree", "parameters_customization"):
        merged.pop(key, None)
    return {
        **merged,
        "name": name,
        "parameters": [item.model_dump() for item in (*parameters, *defaults)],
        # An algorithm names its channels; only the job can give the URLs of their data.
        "inputs": requested.get("inputs") or [],
        "outputs": requested.get("outputs") or [],
    }


def _check_preset(code_dir: str, boot_file: str) -> None:
    if not code_dir:
        raise ServiceRefusal("ModelArts.2757", "code_dir is empty")
    if not boot_file.endswith(".py"):
        raise ServiceRefusal("ModelArts.2758", f"boot_file: must be a .py file (given {boot_file})")
    code, file = place(code_dir), place(boot_file)
    if file.bucket != code.bucket or not file.key.startswith(code.prefix):
        raise ServiceRefusal("ModelArts.2758", f"{boot_file} does not lie in {code_dir}")


def _check_local_code_dir(path: str) -> None:
    if not path:
        return
    check_path(path, "local_code_dir")
    local_dir, home = PurePosixPath(path), PurePosixPath(HOME)
    refused = [home / name for name in ("modelarts", "modelarts-dev", "infer")]
    is_below_home = (
        local_dir != home and local_dir != home.parent and local_dir.is_relative_to(home.parent)
    )
    if not is_below_home or any(local_dir.is_relative_to(other) for other in refused):
        raise ServiceRefusal("ModelArts.2788", f"local_code_dir: {path} is not allowed")


def _check_distinct(names: list[str], code: str, where: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ServiceRefusal(code, f"{where}{name}")


def _is_reserved(name: str) -> bool:
    # The documents tell users of Ascend engines to set this one exception.
    return name.startswith("MA_") and name != "MA_RUN_METHOD"


def _check_environments(variables: Mapping[str, str]) -> None:
    if len(variables) > _VARIABLES:
        raise ServiceRefusal("ModelArts.2788", f"environments: at most {_VARIABLES}")
    for name, value in variables.items():
        if not _VARIABLE.match(name) or len(name) > _NAME_BYTES or _is_reserved(name):
            raise ServiceRefusal(
                "ModelArts.2788", f"environments: the name {name[:80]} is not allowed"
            )
        if len(value) > _VALUE_BYTES or "$" in value:
            raise ServiceRefusal(
                "ModelArts.2788", f"environments: the value of {name} is not allowed"
            )


# -- the run of a job -----------------------------------------------------------------------------


class TaskAddress(Model):
    """Where a node runs."""

    task: str
    ip: str
    host_ip: str


class TaskStatus(Model):
    """How a node ended."""

    task: str
    exit_code: int | None = None
    message: str = ""


class RunRecord(Model):
    """One attempt, as the service shows it; times are in seconds."""

    start_at: int
    start_type: str
    end_at: int | None = None
    end_reason: str | None = None
    end_related_task: str | None = None
    end_recover: str | None = None


class Run(Model):
    """The data with which the run of a job resumes.

    Args:
        attempt: The number of earlier attempts.
        restarts: How often fault tolerance has restarted the job.
        key: The name of the attempt that prepared the current nodes.
        log_key: The name of the current attempt, under which its log is stored.
        handle: The current nodes; empty before their start.
        is_in_place: Whether the next attempt keeps the files of this one.
    """

    attempt: int = 0
    restarts: int = 0
    key: str = ""
    log_key: str = ""
    handle: str = ""
    image: str = ""
    is_in_place: bool = False
    task_ips: list[TaskAddress] = []
    task_statuses: list[TaskStatus] = []
    running_records: list[RunRecord] = []
