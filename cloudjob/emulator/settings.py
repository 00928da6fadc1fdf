"""The settings of the emulated account: flavors, pools, engines, quotas, limits; in a YAML file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from cloudjob.errors import SpecError, UsageError
from cloudjob.model.kinds import dotted

MIB = 1 << 20
_CONFIG = ConfigDict(extra="forbid", coerce_numbers_to_str=True)


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Flavor:
    """A size of nodes.

    Args:
        max_nodes: The most nodes of this flavor in one job.
        cards: The accelerators of a node, which only its variables show: there are no real devices.
        pool: The dedicated pool it belongs to; empty for the public one.
    """

    id: str
    kind: Literal["CPU", "GPU", "Ascend"] = "CPU"
    max_nodes: int = 16
    cpu_cores: int = 8
    memory_gb: int = 32
    cards: int = 0
    card: str = ""
    pool: str = ""


@dataclass(frozen=True, slots=True, config=_CONFIG)
class PresetEngine:
    """A preset engine.

    Args:
        image: The image in which its jobs run; the container engine must have it.
    """

    name: str
    version: str
    image: str = "cloudjob/base:latest"

    @property
    def id(self) -> str:
        """The engine's id, which is its version in new engines."""
        return self.version


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Settings:
    """The settings of an emulator.

    Args:
        first_version: Whether nodes also get the variables of the platform's first version.
        users: The permissions of further users, as patterns of actions by the user's name.
        projects: The names of further projects, each with its own jobs.
        pip_url: The package index in a job's ``MA_PIP_URL``; empty leaves the variable unset.
        engine: Where nodes run: ``docker``, ``process``, or ``auto`` for docker if it answers.
        pools: The dedicated resource pools, each with its number of nodes.
        public_nodes: The most nodes of the public pool at once; further jobs wait in the queue.
        max_jobs: The most jobs in the queue and running.
        requests_per_min: The rate limit; further requests are refused with 429.
        hour_s: The duration of an hour of ``auto_stop`` in seconds, for tests.
        lock_s: How long an access key is refused after more than five wrong signatures in a row.
        hang_s: How long a job with hang detection may neither compute nor write.
        grace_s: The wait between SIGTERM and SIGKILL.
        command_limit_bytes: The longest ``command``.
    """

    region: str = "emulator-1"
    user: str = "emulator"
    domain: str = "emulator"
    password: str = ""
    users: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    projects: tuple[str, ...] = ()
    engine: Literal["auto", "docker", "process"] = "auto"
    image: str = "cloudjob/base:latest"
    python: str = ""
    first_version: bool = False
    pip_url: str = ""
    pools: dict[str, int] = Field(default_factory=lambda: {"pool-emulator": 8})
    public_nodes: NonNegativeInt = 32
    max_jobs: NonNegativeInt = 20_000
    code_limit_bytes: NonNegativeInt = 5 << 30
    code_limit_files: NonNegativeInt = 1000
    code_limit_depth: NonNegativeInt = 32
    log_preview_bytes: NonNegativeInt = 5 * MIB
    log_limit_bytes: NonNegativeInt = 1 << 30
    requests_per_min: NonNegativeInt = 60_000
    token_h: NonNegativeFloat = 24.0
    hour_s: NonNegativeFloat = 3600.0
    lock_s: NonNegativeFloat = 300.0
    hang_s: NonNegativeFloat = 1800.0
    grace_s: NonNegativeFloat = 30.0
    upload_period_s: NonNegativeFloat = 30.0
    metric_period_s: NonNegativeFloat = 60.0
    poll_s: NonNegativeFloat = 0.1
    command_limit_bytes: NonNegativeInt = 1 << 17
    flavors: tuple[Flavor, ...] = ()
    engines: tuple[PresetEngine, ...] = ()
    images: tuple[str, ...] = ()


_FLAVORS = (
    Flavor("modelarts.vm.cpu.2u", max_nodes=16, cpu_cores=2, memory_gb=8),
    Flavor("modelarts.vm.cpu.8u", max_nodes=16, cpu_cores=8, memory_gb=32),
    Flavor("modelarts.vm.pnt1.large", "GPU", 8, 8, 64, 1, "NVIDIA-P100"),
    Flavor("modelarts.vm.p100.2xlarge", "GPU", 8, 16, 128, 2, "NVIDIA-P100"),
    Flavor("modelarts.kat1.xlarge", "Ascend", 8, 24, 96, 1, "Ascend-910"),
    Flavor("modelarts.kat1.8xlarge", "Ascend", 8, 192, 720, 8, "Ascend-910"),
)
# The flavors of a dedicated pool, by their number of cards.
_VISUAL = {"xlarge": 1, "2xlarge": 2, "4xlarge": 4, "8xlarge": 8, "16xlarge": 16}
_ENGINES = (
    PresetEngine("PyTorch", "pytorch_2.1.0-cuda_12.1-py_3.10.6-ubuntu_22.04-x86_64"),
    PresetEngine("PyTorch", "pytorch_1.8.0-cuda_10.2-py_3.7-ubuntu_18.04-x86_64"),
    PresetEngine("MPI", "mindspore_1.3.0-cuda_10.1-py_3.7-ubuntu_1804-x86_64"),
    PresetEngine("Horovod", "horovod_0.22.1-pytorch_1.8.0-cuda_10.2-py_3.7-ubuntu_18.04-x86_64"),
    PresetEngine("TensorFlow", "tensorflow_2.1.0-cuda_10.1-py_3.7-ubuntu_18.04-x86_64"),
    PresetEngine("MindSpore", "mindspore_2.2.0-py_3.9-ubuntu_20.04-x86_64"),
    PresetEngine("Ascend-Powered-Engine", "mindspore_2.2.12-cann_7.0.1-py_3.9-euler_2.10-aarch64"),
)


def defaults() -> Settings:
    """Return the settings of an emulator without a settings file."""
    return _whole(Settings())


def load(path: Path | None) -> Settings:
    """Return the settings in the file, with defaults for missing values.

    Raises:
        UsageError: The file cannot be read.
        SpecError: The file has errors; all of them are listed.
    """
    if path is None:
        return defaults()
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(
            f"reading {path}: {error}", hint="`cloudjob docs emulator` has an example"
        ) from error
    if isinstance(values, dict) and values.keys() == {"emulator"}:
        values = values["emulator"]
    if not isinstance(values, dict):
        raise SpecError([f"{path}: must be a mapping (given {type(values).__name__})"])
    try:
        return _whole(TypeAdapter(Settings).validate_python(values))
    except ValidationError as error:
        raise SpecError(
            [
                f"{path}: {dotted(problem['loc'])}: {problem['msg']} (given {problem['input']!r})"
                for problem in error.errors(include_url=False)
            ],
            hint="`cloudjob docs emulator` lists the keys",
        ) from error


def _whole(settings: Settings) -> Settings:
    """Fill in flavors and engines, and those of the dedicated pools.

    Raises:
        SpecError: A further user or project has the same name as the first one.
    """
    if settings.user in settings.users or settings.region in settings.projects:
        raise SpecError(
            [f"users, projects: {settings.user} and {settings.region} exist already"],
            hint="choose other names",
        )
    flavors = settings.flavors or _FLAVORS
    flavor_ids = {flavor.id for flavor in flavors}
    visual = tuple(
        Flavor(
            f"modelarts.pool.visual.{size}",
            "GPU",
            max_nodes=max(settings.pools.values(), default=0),
            cards=cards,
            card="NVIDIA-P100",
            pool="*",
        )
        for size, cards in _VISUAL.items()
        if f"modelarts.pool.visual.{size}" not in flavor_ids and settings.pools
    )
    return replace(settings, flavors=(*flavors, *visual), engines=settings.engines or _ENGINES)
