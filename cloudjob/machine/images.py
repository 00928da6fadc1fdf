"""Builds the container images of ``images/``; each tag is a hash of the image's inputs."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cloudjob import installation
from cloudjob.backends import delivery as deliveries
from cloudjob.backends.docker import delivery, engine
from cloudjob.backends.docker.delivery import Member
from cloudjob.errors import BackendError, UsageError
from jobentry.contract.paths import ENTRY

REPOSITORY = "cloudjob"
_LATEST = "latest"
# Characters that a tag may not contain, and its maximum length.
_NO_TAG = re.compile(r"[^A-Za-z0-9_.-]")
_MAX_TAG_LENGTH = 128
# The labels of an image.
INPUTS_LABEL = "cloudjob.inputs"
# The label of the build stage in which pip runs. In a build with the user's files, this stage has a
# unique name and is removed afterwards.
_STAGE_LABEL = "cloudjob.stage"
_OWN_STAGE = "build-"
# Age at which such a stage must belong to a build that was killed.
_STALE_S = 24 * 3600.0
_CA_BUNDLE = "images/ca.pem"
_PIP_CONFIG = "images/pip.conf"
_ENTRY = "cloudjob/jobentry.pyz"
# Text that marks the engine's own lines in the output of a build.
_ENGINES_OWN = ("Step ", "--->", "Removing intermediate", "\x1b[0m")


# Called with the bytes so far and in total.
OnPull = Callable[[int, int], None]


class Recipe(NamedTuple):
    """The inputs of an image.

    Args:
        dockerfile: Its text.
        files: The files that it copies: path in the build context -> bytes.
        base: The image that it is based on.
    """

    name: str
    dockerfile: str
    files: Mapping[str, bytes]
    base: str


class Built(NamedTuple):
    """An existing image."""

    tag: str
    id: str
    is_new: bool


def names() -> list[str]:
    """Return the images that can be built."""
    return sorted(path.name.removesuffix(".Dockerfile") for path in _folder().glob("*.Dockerfile"))


def build(
    name: str,
    *,
    base: str = "",
    ca_bundle: str = "",
    pip_config: str = "",
    on_step: Callable[[str], None] = lambda _: None,
    on_pull: OnPull = lambda _done_bytes, _total_bytes: None,
) -> Built:
    """Build the image ``name`` unless it exists, and return it.

    ``latest`` is the image on the Dockerfile's own base, which is built first if it is ours. An
    image on another base gets a tag that names this base, and ``latest`` does not change.

    Args:
        base: The base image, instead of the Dockerfile's own.
        ca_bundle: A file of certificates that pip trusts during the build.
        pip_config: A pip configuration that is used during the build.
        on_step: Called with each line of progress.
        on_pull: Called while the base is pulled, with the bytes so far and in total.

    Raises:
        BackendError: The engine cannot be reached, or the build failed.
        UsageError: There is no such image, or a file cannot be read.
    """
    extra = {_CA_BUNDLE: _given(ca_bundle), _PIP_CONFIG: _given(pip_config)}
    additions = {path: data for path, data in extra.items() if data}
    client = engine.connect()
    with contextlib.closing(client):
        recipe = recipe_of(name, base)
        built = _build(client, recipe, additions, on_step, on_pull)
        tag = f"on-{_NO_TAG.sub('-', base)}"[:_MAX_TAG_LENGTH] if base else _LATEST
        _tag(client, built, name, tag)
    return built


def recipe_of(name: str, base: str = "") -> Recipe:
    """Return the inputs of the image ``name``.

    Raises:
        UsageError: There is no such image.
    """
    if name not in names():
        raise UsageError(
            f"building the image {name}: there is no such image",
            hint=f"choose one of {', '.join(names())}",
        )
    text = (_folder() / f"{name}.Dockerfile").read_text(encoding="utf-8")
    files = {path: data for path, data in _files(name) if path in text}
    if not base:
        default = re.search(r"(?m)^ARG BASE=(.*)", text)
        assert default
        base = default[1].strip()
    return Recipe(name, text, files, base)


def inputs(recipe: Recipe, base_id: str) -> str:
    """Return the hash of everything that goes into an image.

    The CA bundle and the pip configuration are left out: they determine where packages come from,
    not which packages, and their hash would let others guess their contents.
    """
    digest = hashlib.sha256()
    parts = {"Dockerfile": recipe.dockerfile.encode("utf-8"), "BASE": base_id.encode("ascii")}
    for key, data in sorted({**recipe.files, **parts}.items()):
        digest.update(b"%s\0%d\0%s" % (key.encode("utf-8"), len(data), data))
    return digest.hexdigest()


def context(recipe: Recipe, extra: Mapping[str, bytes]) -> bytes:
    """Return the build context as an archive; the same files give the same bytes."""
    files = {**recipe.files, **extra, "Dockerfile": recipe.dockerfile.encode("utf-8")}
    return delivery.tar(
        Member(path, 0o755 if content.startswith(b"#!") else 0o644, content, is_users=False)
        for path, content in sorted(files.items())
    )


def _build(
    client: Any,
    recipe: Recipe,
    extra: Mapping[str, bytes],
    on_step: Callable[[str], None],
    on_pull: OnPull,
) -> Built:
    base, base_id = _base(client, recipe, on_step, on_pull)
    digest = inputs(recipe, base_id)
    tag = f"{REPOSITORY}/{recipe.name}:{digest[:12]}"
    image_id = _image_id(client, tag)
    if image_id:
        return Built(tag, image_id, is_new=False)
    on_step(f"building {tag} from {base}")
    labels = {
        "cloudjob.image": recipe.name,
        INPUTS_LABEL: digest,
        delivery.ENTRY_LABEL: delivery.entry_digest(),
    }
    # Without the user's files, the stage is kept, so that the next build can reuse it.
    stage = {"STAGE": _OWN_STAGE + os.urandom(8).hex()} if extra else {}
    try:
        with engine.translate_errors(f"building {tag}"):
            stream = client.build(
                fileobj=io.BytesIO(context(recipe, extra)),
                custom_context=True,
                tag=tag,
                buildargs={"BASE": base, **stage},
                labels=labels,
                rm=True,
                forcerm=True,
                decode=True,
                timeout=None,
            )
            _follow(stream, tag, on_step)
    finally:
        if stage:
            _remove_stage(client, stage["STAGE"])
    return Built(tag, _image_id(client, tag), is_new=True)


def _remove_stage(client: Any, image_id: str) -> None:
    """Remove the stage of a build, and the stages of builds that were killed.

    The engine's own ``prune`` would also remove stages of running builds, and runs only once.
    """
    with engine.translate_errors("removing the build stage that contains your files"):
        images = client.images(filters={"dangling": True, "label": _STAGE_LABEL})
    for image in images:
        name = image["Labels"][_STAGE_LABEL]
        is_stale = name.startswith(_OWN_STAGE) and time.time() - image["Created"] > _STALE_S
        if name == image_id or is_stale:
            _remove_image(client, image["Id"])


def _remove_image(client: Any, image: str) -> None:
    import tenacity

    def remove() -> None:
        try:
            with engine.translate_errors("removing the build stage that contains your files"):
                client.remove_image(image)
        except BackendError as error:
            # Another build may have removed the same stale stage.
            if engine.status_code(error) != engine.NOT_FOUND:
                raise

    # The engine fails if another build removes a parent of this image at the same time.
    stop, wait = tenacity.stop_after_attempt(5), tenacity.wait_fixed(0.2)
    tenacity.Retrying(stop=stop, wait=wait, reraise=True)(remove)


def _base(
    client: Any, recipe: Recipe, on_step: Callable[[str], None], on_pull: OnPull
) -> tuple[str, str]:
    """Return the name and id of the base image, which is built or pulled if it is missing."""
    base = recipe.base
    if base == f"{REPOSITORY}/base:{_LATEST}" and recipe.name != "base":
        # Our current base, which may differ from the image last built under this name.
        inner = _build(client, recipe_of("base"), {}, on_step, on_pull)
        _tag(client, inner, "base", _LATEST)
        return inner.tag, inner.id
    image_id = _image_id(client, base)
    if image_id:
        return base, image_id
    on_step(f"pulling {base}")
    try:
        with engine.translate_errors(f"pulling {base}"):
            stream = client.pull(base, stream=True, decode=True)
            _follow(_counted(stream, on_pull), base, on_step)
    except BackendError as error:
        hint = "`cloudjob docs images` shows how to make debian:bookworm-slim without a registry"
        raise BackendError(error.message, hint=error.hint or hint) from error
    return base, _image_id(client, base)


def _tag(client: Any, built: Built, name: str, tag: str) -> None:
    with engine.translate_errors(f"tagging {built.tag}"):
        client.tag(built.id, f"{REPOSITORY}/{name}", tag)


def _image_id(client: Any, reference: str) -> str:
    """Return the id of an image, empty when the engine does not have it."""
    try:
        with engine.translate_errors(f"looking for the image {reference}"):
            return str(client.inspect_image(reference)["Id"])
    except BackendError as error:
        if engine.status_code(error) == engine.NOT_FOUND:
            return ""
        raise


def _counted(stream: Iterator[dict[str, Any]], on_pull: OnPull) -> Iterator[dict[str, Any]]:
    """Yield the engine's reports about a pull, and report the total bytes of all layers."""
    layers: dict[str, tuple[int, int]] = {}
    for report in stream:
        layer, status = str(report.get("id")), report.get("status")
        detail = report.get("progressDetail") or {}
        if status == "Downloading" and detail.get("total"):
            layers[layer] = (detail["current"], detail["total"])
        elif status == "Download complete" and layer in layers:
            layers[layer] = (layers[layer][1], layers[layer][1])
        if layer in layers:
            on_pull(*(sum(column) for column in zip(*layers.values(), strict=True)))
        yield report


def _follow(stream: Iterator[dict[str, Any]], what: str, on_step: Callable[[str], None]) -> None:
    """Report each line of a build or pull; raise an error if the engine reports a failure."""
    last: list[str] = []
    for report in stream:
        if "error" in report:
            message = str(report["error"]).strip()
            output = [line for line in last if not line.startswith(_ENGINES_OWN)]
            tail = f": {output[-1]}" if output else ""
            raise BackendError(f"building {what}: {message}{tail}", hint=_hint([message, *last]))
        # Leave out a download's progress, which the engine reports many times a second.
        text = str(
            report.get("stream") or ("" if "progress" in report else report.get("status", ""))
        )
        for line in text.splitlines():
            if line.strip():
                last = [*last[-20:], line.strip()]
                on_step(line.rstrip())


def _hint(lines: list[str]) -> str:
    text = "\n".join(lines)
    if "CERTIFICATE_VERIFY_FAILED" in text or "SSLError" in text:
        return "pip does not trust the index: add its certificates with --ca-bundle FILE"
    if "No matching distribution" in text:
        return "the index does not have the package: --pip-config FILE can select another index"
    return ""


def _files(name: str) -> Iterator[tuple[str, bytes]]:
    entry = deliveries.files()
    yield _ENTRY, entry[ENTRY]
    yield f"entrypoints/{deliveries.BOOT}", entry[deliveries.BOOT]
    yield "images/pip-install.sh", _read(_folder() / "pip-install.sh")
    requirements = _folder() / f"{name}.txt"
    if requirements.exists():
        yield f"images/{name}.txt", _read(requirements)


def _folder() -> Path:
    inside = installation.FOLDER / "dockerfiles"
    return inside if inside.is_dir() else installation.FOLDER.parent / "images"


def _given(path: str) -> bytes:
    return _read(Path(path)) if path else b""


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"reading {path}: {(error.strerror or str(error)).lower()}", hint="is the path right?"
        ) from error
