"""Images: those registered with ModelArts or saved from jobs, and a repository's tags in SWR."""

from __future__ import annotations

import contextlib
import tarfile
import threading
import uuid
from typing import Annotated, Any, Literal

from pydantic import Field

from cloudjob.emulator.app import Answer, Endpoint
from cloudjob.emulator.errors import ServiceRefusal
from cloudjob.emulator.models import Model, PageQuery, StoredResource, now_ms
from cloudjob.emulator.nodes import ImageMissing
from cloudjob.emulator.process_nodes import ProcessRuntime
from cloudjob.emulator.request import Request
from cloudjob.emulator.service import JOB, EmulatedService
from cloudjob.errors import CloudJobError

_IMAGES = "/v1/{project_id}/images"
_SAVE = JOB + "/tasks/{task_id}/save-image-job"


class _Image(StoredResource):
    """An image that is registered, or that the settings name."""

    kind = "image"
    id: str
    name: str
    namespace: str
    tag: str
    swr_path: str
    arch: str = "x86_64"
    type: str
    status: str
    status_message: str
    visibility: str = "PRIVATE"
    workspace_id: str = "0"
    create_at: int
    update_at: int


class _Images(PageQuery):
    limit: Annotated[int, Field(ge=1, le=500)] = 10
    name: Annotated[str, Field(max_length=512)] = ""
    namespace: Annotated[str, Field(max_length=512)] = ""
    sort_dir: Literal["ASC", "DESC"] = "DESC"
    sort_key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_,-]{1,128}$")] = "create_at"
    type: Literal["BUILD_IN", "DEDICATED"] | None = None

    def matches(self, image: _Image) -> bool:
        """Whether an image is in the requested list."""
        return (
            self.name in ("", image.name)
            and self.namespace in ("", image.namespace)
            and self.type in (None, image.type)
        )


def images(service: EmulatedService, request: Request) -> Any:
    """Return a page of images: the registered ones and those of the settings."""
    query, settings = request.parsed_query(_Images), service.settings
    built_in = dict.fromkeys([*settings.images, *(item.image for item in settings.engines)])
    stored = service.database.resources(_Image)
    stored += [_image_at(service, path, "BUILD_IN") for path in built_in]
    stored = list(filter(query.matches, stored))
    listed = [item.model_dump() for item in stored]
    for key in reversed(query.sort_key.split(",")):
        listed.sort(key=lambda item: item.get(key, ""), reverse=query.sort_dir == "DESC")
    page = query.of(listed)
    return {
        "current": query.offset,
        "data": page,
        "pages": -(-len(stored) // query.limit),
        "size": len(page),
        "total": len(stored),
    }


class _Registration(Model):
    swr_path: Annotated[str, Field(min_length=1)]


def register(service: EmulatedService, request: Request) -> Any:
    return _registered(service, request.body(_Registration).swr_path)


def _registered(service: EmulatedService, path: str) -> Any:
    image = _image_at(service, path, "DEDICATED")
    service.database.put_resource(image.id, path, image)
    return image.model_dump()


def image(service: EmulatedService, request: Request) -> Any:
    """Return an image, whose status is ``ERROR`` if the engine does not have it."""
    return _named(service, request).model_dump()


def _named(service: EmulatedService, request: Request) -> _Image:
    stored = service.database.resource(_Image, request.path_params["image"])
    if stored is None:
        raise ServiceRefusal("ModelArts.2788", f"image: {request.path_params['image']} not found")
    return stored


def sync(service: EmulatedService, request: Request) -> Any:
    """Check again whether the engine has the image."""
    return _registered(service, _named(service, request).swr_path)


def remove(service: EmulatedService, request: Request) -> Any:
    """Remove the registration of an image."""
    service.database.remove_resource(_Image, _named(service, request).id)
    return {}


def _image_at(service: EmulatedService, path: str, kind: str) -> _Image:
    status = "ACTIVE"
    try:
        service.runtime.check_image(path)
    except (ImageMissing, CloudJobError):
        status = "ERROR"
    name, _, tag = path.rpartition("/")[2].partition(":")
    created_ms = now_ms()
    return _Image(
        id=str(uuid.uuid5(uuid.NAMESPACE_URL, path)),
        name=name,
        namespace=path.rpartition("/")[0],
        tag=tag or "latest",
        swr_path=path,
        type=kind,
        status=status,
        status_message="" if status == "ACTIVE" else "the image cannot be pulled",
        create_at=created_ms,
        update_at=created_ms,
    )


class _Saving(Model):
    name: Annotated[str, Field(pattern=r"^[a-z0-9]+([._-]+[a-z0-9]+)*$", max_length=255)]
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]+([._-]+[a-z0-9]+)*$", max_length=64)]
    tag: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=64)]
    description: Annotated[str, Field(max_length=512)] = ""


class _Saved(_Saving, StoredResource):
    """The progress of a task's image."""

    kind = "saved-image"
    status: str = "CREATING"
    message: str = ""
    create_time: int = Field(default_factory=now_ms)


# The tasks whose images this process saves.
_saving: set[str] = set()
_lock = threading.Lock()


def save(service: EmulatedService, request: Request) -> Any:
    """Start to save the container of a running task as an image of the engine.

    Raises:
        ServiceRefusal: Nodes are processes, the job does not run, or the engine has such an image.
    """
    row, runtime = service.job(request), service.runtime
    index = service.node(request, row)
    if isinstance(runtime, ProcessRuntime):
        raise ServiceRefusal("ModelArts.2858", "saving an image: nodes are processes")
    if row.phase != "Running" or not row.run.handle:
        raise ServiceRefusal("ModelArts.2858", f"saving an image: the job is {row.phase}")
    requested = request.body(_Saving)
    image = f"{requested.namespace}/{requested.name}:{requested.tag}"
    task = f"{row.id}/{index}"
    with contextlib.suppress(ImageMissing):
        runtime.check_image(image)
        raise ServiceRefusal("ModelArts.2788", f"tag: the image {image} exists")
    with _lock:
        if task in _saving:
            raise ServiceRefusal("ModelArts.2858", "saving an image: this task is being saved")
        _saving.add(task)
    progress = _Saved(**requested.model_dump())
    answer = progress.model_dump()
    service.database.put_resource(task, image, progress)

    def run() -> None:
        scratch = service.folder
        progress.status = "CREATE_FAILED"
        try:
            runtime.save_image(row.run.handle, index, scratch, image)
            progress.status = "ACTIVE"
        except (CloudJobError, tarfile.TarError, OSError) as error:
            progress.message = str(error)
        finally:
            service.database.put_resource(task, image, progress)
            _saving.discard(task)

    threading.Thread(target=run, name="save-image", daemon=True).start()
    return answer


def saved(service: EmulatedService, request: Request) -> Any:
    """Return the progress of the last saving of a task's image."""
    row = service.job(request)
    task = f"{row.id}/{service.node(request, row)}"
    is_saving = task in _saving
    task_state = service.database.resource(_Saved, task)
    if task_state is None:
        raise ServiceRefusal("ModelArts.2858", "no image of this task was saved")
    if task_state.status == "CREATING" and not is_saving:
        task_state.status, task_state.message = (
            "CREATE_FAILED",
            "the emulator was restarted meanwhile",
        )
    return task_state.model_dump()


class _Tags(PageQuery):
    limit: Annotated[int, Field(ge=1, le=100)] = 100
    tag: str = ""


def tags(service: EmulatedService, request: Request) -> Any:
    """Return the tags of a repository; here ``offset`` is the number of an item.

    If nodes are processes, there are no images, and every image counts as existing.
    """
    name = request.path_params["repository"].replace("$", "/")
    repository = f"{request.path_params['namespace']}/{name}"
    query = request.parsed_query(_Tags)
    tag_names = service.runtime.tags(repository)
    if tag_names == []:
        missing = {"errorCode": "SVCSTG.SWR.4040002", "errorMessage": "repo not found"}
        return Answer(404, {"errors": [missing]})
    if tag_names is None:
        tag_names = [query.tag or "latest"]
    tag_names = [tag for tag in tag_names if query.tag in tag]
    page = tag_names[query.offset : query.offset + query.limit]
    last = query.offset + max(0, len(page) - 1)
    listed = [
        {"Tag": tag, "path": f"{repository}:{tag}", "tag_type": 0, "is_trusted": False}
        for tag in page
    ]
    return Answer(200, listed, {"Content-Range": f"{query.offset}-{last}/{len(tag_names)}"})


ENDPOINTS = (
    Endpoint("GET", _IMAGES, images),
    Endpoint("POST", _IMAGES, register),
    Endpoint("GET", _IMAGES + "/{image}", image),
    Endpoint("DELETE", _IMAGES + "/{image}", remove),
    Endpoint("POST", _IMAGES + "/{image}/sync", sync),
    Endpoint("POST", _SAVE, save),
    Endpoint("GET", _SAVE, saved),
    Endpoint("GET", "/v2/manage/namespaces/{namespace}/repos/{repository}/tags", tags),
)
