"""A job that is ready to send: its spec, its URIs and the variables of its nodes. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudjob.model import mindspore
from cloudjob.model.text import MASK, hide, secret_texts, secret_values, secrets_masked
from jobentry.contract import env, names
from jobentry.contract.env import MindSpore, NodeEnv, OpenMpi
from jobentry.contract.launchers import LAUNCHERS

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec


# The keys of a job that ``show`` shows as they are.
_SHOWN = (
    *("name", "backend", "launcher", "nodes", "procs_per_node", "script", "image", "flavor"),
    *("output_sync_s", "restore_outputs", "timeout_min", "start_timeout_min", "grace_s"),
    "retries",
)


class StoredCode(NamedTuple):
    """Where the package is stored.

    Args:
        uri: Its descriptor.
        digest: The digest of the tree: ``sha256:`` and 64 hex digits.
        layers: The URIs of its layers, from the oldest to the newest.
    """

    uri: str
    digest: str
    layers: tuple[str, ...] = ()


class Submission(NamedTuple):
    """A job made ready to send.

    Args:
        job: The job's id, unique among all jobs and valid in a host name.
        record_uri: Where the head stores its record.
        outputs: The output folders, each with the URI that it is stored at.
        access: The variables with which an entry reaches the store: hidden like secrets, but not
            passed to the ranks.
    """

    spec: JobSpec
    job: str
    code: StoredCode
    record_uri: str
    outputs: tuple[tuple[str, str], ...]
    access: Mapping[str, str] = MappingProxyType({})

    def __repr__(self) -> str:
        return f"Submission({self.job})"

    @property
    def masked_names(self) -> tuple[str, ...]:
        """The variables whose values must not be shown."""
        return (*self.spec.secrets, *self.access)


def submission_of(
    spec: JobSpec, job: str, *, code: StoredCode, record_uri: str, outputs_uri: str
) -> Submission:
    """Return ``spec`` ready to send; an output without a URI gets one below ``outputs_uri``."""
    return Submission(
        spec=spec,
        job=job,
        code=code,
        record_uri=record_uri,
        outputs=tuple((name, uri or f"{outputs_uri}/{name}") for name, uri in spec.outputs.items()),
    )


def node_env(submission: Submission, node: int, hosts: tuple[str, ...]) -> NodeEnv:
    """Return the environment of a node, as the entry reads it."""
    spec = submission.spec
    return NodeEnv(
        job=submission.job,
        node=node,
        hosts=hosts,
        slots=spec.ranks_per_node,
        launcher=spec.launcher,
        code_uri=submission.code.uri,
        code_digest=submission.code.digest,
        record_uri=submission.record_uri,
        env_names=tuple(spec.env),
        secret_names=tuple(spec.secrets),
        inputs=tuple(spec.inputs.items()),
        input_nodes=tuple(spec.input_nodes.items()),
        outputs=submission.outputs,
        output_sync_s=spec.output_sync_s,
        restore_outputs=spec.restore_outputs,
        grace_s=spec.grace_s,
        timeout_s=spec.timeout_min * 60,
        start_timeout_s=spec.start_timeout_min * 60,
        stall_s=spec.network.stall_min * 60,
        preflight=spec.preflight,
        hang_action=spec.hang.action,
        hang_after_s=spec.hang.after_min * 60,
        hang_scale=spec.hang.scale,
        first_version=spec.modelarts.first_version,
        # The options of mpirun that users set as variables of the job.
        open_mpi=OpenMpi(
            bind_args=spec.env.get(names.OPENMPI_BIND_ARGS),
            x_args=spec.env.get(names.OPENMPI_X_ARGS),
            mca_args=spec.env.get(names.OPENMPI_MCA_ARGS),
            extra_args=spec.env.get(names.OPENMPI_EXTRA_ARGS),
        ),
        mindspore=_mindspore(spec),
    )


def variables(submission: Submission, node: NodeEnv, *, home: str, address: str) -> dict[str, str]:
    """Return the complete environment that ModelArts would give this node on a CPU flavor.

    Args:
        home: The home folder on the node.
        address: Its IP address.
    """
    job = f"ma-job-{submission.job}"
    mount = f"{home}/modelarts"
    platform = {
        "MA_HOME": home,
        "MA_MOUNT_PATH": mount,
        "MA_JOB_DIR": f"{mount}/user-job-dir",
        "MA_LOG_DIR": f"{mount}/log",
        "WORKSPACE": f"{mount}/user-job-dir/code",
        "MA_CURRENT_IP": address,
        "MA_CURRENT_HOST_IP": address,
        "MA_CURRENT_INSTANCE_NAME": node.host.partition(".")[0],
        "MA_NUM_GPUS": "0",
        "MA_TASK_NAME": "worker",
        "MA_VJ_NAME": job,
        "HOME": home,
    }
    # As on the platform, the user's values override the platform's, but not those of the contract.
    spec = submission.spec
    strict = {names.CLOUDJOB_STRICT: "1"} if spec.strict else {}
    return {
        **platform,
        **spec.env,
        **spec.secrets,
        **submission.access,
        **env.write(node),
        **strict,
    }


# For nodes that share one machine: each counts all processors as its own, so ranks that wait would
# take the processors from the ranks they wait for. Yielding costs next to nothing.
ONE_MACHINE = MappingProxyType({"OMPI_MCA_mpi_yield_when_idle": "1"})


def host_names(submission: Submission) -> tuple[str, ...]:
    """Return the network names of the nodes, made as ModelArts makes them."""
    job = f"ma-job-{submission.job}"
    return tuple(f"{job}-worker-{node}.{job}" for node in range(submission.spec.nodes))


def show(submission: Submission, texts: Sequence[str]) -> dict[str, Any]:
    """Return ``submission`` as plain JSON values, with secrets as ``***``.

    Args:
        texts: Those of ``masked_texts``.
    """
    spec = submission.spec
    return {
        "job": submission.job,
        **{key: getattr(spec, key) for key in _SHOWN},
        "args": hide(spec.args, texts),
        "env": secrets_masked(hide(spec.env, texts)),
        "secrets": dict.fromkeys(spec.secrets, MASK),
        "access": dict.fromkeys(submission.access, MASK),
        "inputs": dict(spec.inputs),
        "input_nodes": dict(spec.input_nodes),
        "outputs": dict(submission.outputs),
        "code": {"uri": submission.code.uri, "digest": submission.code.digest},
    }


def masked_texts(submission: Submission) -> list[str]:
    """Return the texts that ``hide`` masks: the secrets of the job, and the keys of its store."""
    keys = (submission.access.get(name, "") for name in names.STORE_KEYS)
    spec = submission.spec
    return secret_texts((*secret_values(spec.secrets, spec.env), *keys))


def _mindspore(spec: JobSpec) -> MindSpore:
    """Return MindSpore's settings; jobs of other frameworks have only those in the job file."""
    is_own = spec.launcher in LAUNCHERS and LAUNCHERS[spec.launcher].module == "mindspore"
    if not is_own and "mindspore" not in spec.sections:
        return MindSpore()
    settings = spec.mindspore
    return MindSpore(
        devices=settings.devices,
        device_target=_chosen(settings.device_target),
        parallel_mode=_chosen(settings.parallel_mode),
        search_mode=_chosen(settings.search_mode),
    )


def _chosen(value: str) -> str:
    return "" if value == mindspore.NONE else value
