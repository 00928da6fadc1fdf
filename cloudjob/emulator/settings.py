"""What the emulated account has: flavors, pools, engines, quotas, limits; from one YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cloudjob.errors import SpecError, UsageError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Flavor:
    """A size of nodes.

    Args:
        kind: ``CPU``, ``GPU`` or ``Ascend``.
        max_nodes: How many nodes one job may have of it.
        cards: Accelerators on a node, which its containers hear of and do not get.
        pool: The dedicated pool it belongs to; empty for the public one.
    """

    id: str
    kind: str = "CPU"
    max_nodes: int = 16
    cpu_cores: int = 8
    memory_gb: int = 32
    cards: int = 0
    card: str = ""
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Engine:
    """A preset engine.

    Args:
        image: The image of this machine's engine in which its jobs run.
    """

    name: str
    version: str
    image: str = "cloudjob/base:latest"

    @property
    def id(self) -> str:
        """The engine's id, which is its version in new engines."""
        return self.version


@dataclass(frozen=True, slots=True)
class Settings:
    """All that a user may set.

    Args:
        engine: Where nodes run: ``docker``, ``process``, or ``auto`` for docker where it answers.
        pools: The dedicated resource pools, each with its number of nodes.
        public_nodes: How many nodes of the public pool run at once; more wait in the queue.
        max_jobs: How many jobs may be in the queue or running.
        requests_per_min: More are refused with 429.
        hour_s: How long an hour of ``auto_stop`` lasts, for tests.
        lock_s: How long an access key is refused after more than five wrong signatures in a row.
        hang_s: How long a job with hang detection may neither compute nor write.
        grace_s: The wait between SIGTERM and SIGKILL.
        command_limit_bytes: The longest ``command``.
    """

    region: str = "emulator-1"
    user: str = "emulator"
    domain: str = "emulator"
    password: str = ""
    engine: str = "auto"
    image: str = "cloudjob/base:latest"
    python: str = ""
    pools: Mapping[str, int] = field(default_factory=lambda: {"pool-emulator": 8})
    public_nodes: int = 32
    max_jobs: int = 20_000
    code_limit_bytes: int = 5 << 30
    code_limit_files: int = 1000
    code_limit_depth: int = 32
    log_preview_bytes: int = 5 * MIB
    log_limit_bytes: int = 1 << 30
    requests_per_min: int = 60_000
    token_h: float = 24.0
    hour_s: float = 3600.0
    lock_s: float = 300.0
    hang_s: float = 1800.0
    grace_s: float = 30.0
    upload_period_s: float = 30.0
    metric_period_s: float = 60.0
    poll_s: float = 0.1
    command_limit_bytes: int = 1 << 17
    flavors: tuple[Flavor, ...] = ()
    engines: tuple[Engine, ...] = ()
    images: tuple[str, ...] = ()


_FLAVORS = (
    Flavor("modelarts.vm.cpu.2u", max_nodes=16, cpu_cores=2, memory_gb=8),
    Flavor("modelarts.vm.cpu.8u", max_nodes=16, cpu_cores=8, memory_gb=32),
    Flavor("modelarts.vm.pnt1.large", "GPU", 8, 8, 64, 1, "NVIDIA-P100"),
    Flavor("modelarts.vm.p100.2xlarge", "GPU", 8, 16, 128, 2, "NVIDIA-P100"),
)
# A dedicated pool is divided by cards, and these are all the sizes there are.
_VISUAL = {"xlarge": 1, "2xlarge": 2, "4xlarge": 4, "8xlarge": 8, "16xlarge": 16}
_ENGINES = (
    Engine("PyTorch", "pytorch_2.1.0-cuda_12.1-py_3.10.6-ubuntu_22.04-x86_64"),
    Engine("PyTorch", "pytorch_1.8.0-cuda_10.2-py_3.7-ubuntu_18.04-x86_64"),
    Engine("MPI", "mindspore_1.3.0-cuda_10.1-py_3.7-ubuntu_1804-x86_64"),
    Engine("Horovod", "horovod_0.22.1-pytorch_1.8.0-cuda_10.2-py_3.7-ubuntu_18.04-x86_64"),
    Engine("TensorFlow", "tensorflow_2.1.0-cuda_10.1-py_3.7-ubuntu_18.04-x86_64"),
)


def defaults() -> Settings:
    """Return what an account has for which no file says anything else."""
    return _whole(Settings())


def load(path: Path | None) -> Settings:
    """Return what the file says, and the defaults where it says nothing.

    Raises:
        UsageError: The file cannot be read.
        SpecError: It says things that mean nothing; with every one of them.
    """
    if path is None:
        return defaults()
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(
            f"reading {path}: {error}", hint="`cloudjob docs emulator` has an example"
        ) from (error)
    problems: list[str] = []
    settings = _read(found, problems)
    if problems:
        raise SpecError(
            [f"{path}: {problem}" for problem in problems],
            hint="`cloudjob docs emulator` lists the keys",
        )
    return _whole(settings)


def _read(found: Any, problems: list[str]) -> Settings:
    if not isinstance(found, dict):
        problems.append(f"a mapping is needed (given {type(found).__name__})")
        return Settings()
    known = {item.name for item in fields(Settings)}
    values: dict[str, Any] = {}
    for key, value in found.items():
        if key not in known:
            problems.append(f"{key}: there is no such key")
        elif key in _LISTS:
            values[key] = _listed(key, value, problems)
        else:
            values[key] = _value(key, value, problems)
    if values.get("engine", "auto") not in ("auto", "docker", "process"):
        problems.append(f"engine: (given {values['engine']}; allowed auto, docker, process)")
    return Settings(**values)


_LISTS: dict[str, Any] = {"flavors": Flavor, "engines": Engine, "images": str}


def _listed(key: str, value: Any, problems: list[str]) -> tuple[Any, ...]:
    kind = _LISTS[key]
    if not isinstance(value, list):
        problems.append(f"{key}: a list is needed")
        return ()
    made = []
    for index, item in enumerate(value):
        try:
            made.append(str(item) if kind is str else kind(**item))
        except TypeError as error:
            problems.append(f"{key}[{index}]: {str(error).replace('.__init__()', '')}")
    return tuple(made)


def _value(key: str, value: Any, problems: list[str]) -> Any:
    default = getattr(Settings(), key)
    if isinstance(default, Mapping):
        if isinstance(value, dict) and all(isinstance(item, int) for item in value.values()):
            return {str(name): item for name, item in value.items()}
        problems.append(f"{key}: names and numbers of nodes are needed")
        return default
    if isinstance(default, str):
        return str(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        problems.append(f"{key}: a number is needed (given {value!r})")
        return default
    return type(default)(value)


def _whole(settings: Settings) -> Settings:
    """Fill in flavors and engines, and those of the dedicated pools."""
    from dataclasses import replace

    flavors = settings.flavors or _FLAVORS
    known = {flavor.id for flavor in flavors}
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
        if f"modelarts.pool.visual.{size}" not in known and settings.pools
    )
    return replace(settings, flavors=(*flavors, *visual), engines=settings.engines or _ENGINES)
