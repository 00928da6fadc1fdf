"""Images: those registered with ModelArts, and the tags of a repository in SWR."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from pydantic import Field

from cloudjob.emulator.app import Answer, Endpoint, Request
from cloudjob.emulator.errors import ApiError
from cloudjob.emulator.models import Model, Page
from cloudjob.emulator.nodes import ImageMissing
from cloudjob.emulator.service import Service
from cloudjob.errors import CloudJobError
from cloudjob.times import now_ms

_IMAGES = "/v1/{project_id}/images"


class _Images(Page):
    limit: Annotated[int, Field(ge=1, le=500)] = 10


def images(service: Service, request: Request) -> Any:
    """Return a page of images: those registered, and those of the settings."""
    asked, settings = request.parsed_query(_Images), service.settings
    known = dict.fromkeys([*settings.images, *(item.image for item in settings.engines)])
    found = service.database.things("image")
    found += [_image(service, path, "BUILD_IN") for path in known]
    shown = found[asked.offset * asked.limit : (asked.offset + 1) * asked.limit]
    return {
        "current": asked.offset,
        "data": shown,
        "pages": -(-len(found) // asked.limit),
        "size": len(shown),
        "total": len(found),
    }


class _Registration(Model):
    swr_path: Annotated[str, Field(min_length=1)]


def register(service: Service, request: Request) -> Any:
    path = request.body(_Registration).swr_path
    made = _image(service, path, "DEDICATED")
    service.database.put_thing("image", made["id"], path, made)
    return made


def image(service: Service, request: Request) -> Any:
    """Return an image, whose status is ``ERROR`` if the engine does not have it."""
    found = service.database.thing("image", request.path_params["image"])
    if found is None:
        raise ApiError("ModelArts.2788", f"image: {request.path_params['image']} not found")
    return found


def sync(service: Service, request: Request) -> Any:
    """Look for the image again."""
    made = _image(service, image(service, request)["swr_path"], "DEDICATED")
    service.database.put_thing("image", made["id"], made["swr_path"], made)
    return made


def remove(service: Service, request: Request) -> Any:
    """Remove an image from the register."""
    image(service, request)
    service.database.remove_thing("image", request.path_params["image"])
    return {}


def _image(service: Service, path: str, kind: str) -> dict[str, Any]:
    status = "ACTIVE"
    try:
        service.scheduler.context.machines.check_image(path)
    except (ImageMissing, CloudJobError):
        status = "ERROR"
    name, _, tag = path.rpartition("/")[2].partition(":")
    created_ms = now_ms()
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
        "create_at": created_ms,
        "update_at": created_ms,
    }


class _Tags(Page):
    limit: Annotated[int, Field(ge=1, le=100)] = 100
    tag: str = ""


def tags(service: Service, request: Request) -> Any:
    """Return the tags of a repository; here ``offset`` is the number of an item.

    Where nodes are processes, there are no images, and every image is taken to exist.
    """
    name = request.path_params["repository"].replace("$", "/")
    repository = f"{request.path_params['namespace']}/{name}"
    asked = request.parsed_query(_Tags)
    found = service.scheduler.context.machines.tags(repository)
    if found == []:
        missing = {"errorCode": "SVCSTG.SWR.4040002", "errorMessage": "repo not found"}
        return Answer(404, {"errors": [missing]})
    if found is None:
        found = [asked.tag or "latest"]
    found = [tag for tag in found if asked.tag in tag]
    shown = found[asked.offset : asked.offset + asked.limit]
    last = asked.offset + max(0, len(shown) - 1)
    listed = [
        {"Tag": tag, "path": f"{repository}:{tag}", "tag_type": 0, "is_trusted": False}
        for tag in shown
    ]
    return Answer(200, listed, {"Content-Range": f"{asked.offset}-{last}/{len(found)}"})


ENDPOINTS = (
    Endpoint("GET", _IMAGES, images),
    Endpoint("POST", _IMAGES, register),
    Endpoint("GET", _IMAGES + "/{image}", image),
    Endpoint("DELETE", _IMAGES + "/{image}", remove),
    Endpoint("POST", _IMAGES + "/{image}/sync", sync),
    Endpoint("GET", "/v2/manage/namespaces/{namespace}/repos/{repository}/tags", tags),
)
