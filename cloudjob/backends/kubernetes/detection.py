"""Whether this user has access to a Kubernetes cluster; it is not asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def found_here(environ: Mapping[str, str]) -> str:
    """Return that there is a kubeconfig file; else empty."""
    home = Path(environ.get("HOME") or "/nonexistent")
    has_file = environ.get("KUBECONFIG") or home.joinpath(".kube/config").exists()
    return "a kubeconfig file" if has_file else ""
