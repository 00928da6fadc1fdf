"""Measure one step of a submit with its source, or of a node with the package.

packaging.py pack SOURCE HOME    scan, pack, put it into the store below HOME, record it
packaging.py unpack HOME FOLDER  fetch and unpack the last package
packaging.py zip SOURCE FILE     a ZIP as SkyPilot makes it: walk, ZipFile.write, deflated
packaging.py copy SOURCE FOLDER  a copy as TorchX makes it of its workspace
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def pack(source: str, home: str) -> dict[str, int]:
    """Pack as ``cloudjob submit`` does, up to the point where a job would be sent."""
    from cloudjob.package import PackOptions, cache, claims
    from cloudjob.package import pack as make
    from cloudjob.store import open_store

    uri = Path(home, "store").as_uri()
    store = open_store(uri)
    path = cache.path_of(Path(home), Path(source), uri)
    scratch = Path(home, "layer")
    package = make(
        Path(source), scratch, script="train.py", limit_bytes=1 << 40,
        options=PackOptions(home=Path(home)), source_cache=cache.load(path),
    )  # fmt: skip
    if "--pack-only" in sys.argv:
        return {"sent_bytes": package.layers[-1].size_bytes}
    with claims.Claim(store, "bench") as claim:
        kept = claim.keep(package)
        if not package.is_cached:
            cache.save(path, cache.with_layers(package.source_cache, kept.layers))
        store.put_bytes(claims.descriptor(package, kept.layers), "bench/code.json")
    scratch.unlink(missing_ok=True)
    return {"sent_bytes": kept.sent_bytes}


def unpack(home: str, folder: str) -> dict[str, int]:
    """Unpack as the entry does."""
    from jobentry.staging.code_package import fetch_code

    uri = Path(home, "store", "bench", "code.json")
    fetch_code(uri.as_uri(), json.loads(uri.read_bytes())["digest"], folder)
    return {}


def zip_(source: str, file: str) -> dict[str, int]:
    """Create a ZIP with the calls and the defaults of SkyPilot 0.14."""
    import zipfile

    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for parent, folders, names in os.walk(source):
            for name in (*folders, *names):
                path = os.path.join(parent, name)  # noqa: PTH118 (as there)
                archive.write(path, path)
    return {"sent_bytes": Path(file).stat().st_size}


def copy(source: str, folder: str) -> dict[str, int]:
    """Copy file by file, as TorchX copies a workspace to a job's folder."""
    import shutil

    shutil.copytree(source, folder, symlinks=True)
    return {}


if __name__ == "__main__":
    modes = {"pack": pack, "unpack": unpack, "zip": zip_, "copy": copy}
    print(json.dumps(modes[sys.argv[1]](*sys.argv[2:4])))
