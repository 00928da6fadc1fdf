"""The two scripts of a job on Slurm, as text: the batch script, and the one that every node runs.

They are in the job's folder, and write files there that show the job's status: ``state`` (one line
per event), ``node-I.log``, ``end-I`` (the exit code of the entry of node I).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from cloudjob.model import grid
from jobentry.contract import names, paths

JOB_SCRIPT, NODE_SCRIPT = "job.sh", "node.sh"
# The beginning of a job's name on Slurm; its id follows.
JOB_NAME = "cloudjob-"
STATE, ID, SLURM_LOG = "state", "id", "slurm.log"
# Slurm may warn a minute earlier than requested (sbatch(1), --signal); an even earlier warning
# announces a preemption, not the end of the job's time.
EARLY_S = 65
# mpirun and some frameworks would act on Slurm's variables about its own steps.
_KEPT_VARIABLES = "SLURM_JOB_ID | SLURM_CONF | SLURM_GRES"

# In Slurm's log: a node that does not see the job's folder, and so has no other way to report it.
_UNSEEN = "cloudjob-unseen:"
# In Slurm's log: what follows belongs to this attempt.
_BEGIN = "cloudjob: an attempt begins"


@dataclass(frozen=True, slots=True)
class NodeText:
    """The parameters of the nodes' script.

    Args:
        python: The interpreter of the entry; empty to look for one on each node.
        entry: The name of the entry's file, for that interpreter.
        args: The script and its arguments.
        paths: PATH and the like, which the nodes share with the submitter.
        keeps_record: Whether the record stays in the job's folder.
        cpus_per_rank: For an srun that starts the ranks; 0 if none does.
    """

    job: str
    scratch: str
    setup: tuple[str, ...]
    python: str
    entry: str
    args: tuple[str, ...]
    paths: Mapping[str, str]
    keeps_record: bool
    cpus_per_rank: int = 0


@dataclass(frozen=True, slots=True)
class JobText:
    """The parameters of the script for sbatch.

    Args:
        options: The text after each ``#SBATCH``.
        requeues: Whether a preempted job starts again.
        warn_s: How long before the end of the job's time Slurm warns.
        needs_shell: Whether the nodes use ssh between them; else the key can be any secret.
    """

    options: tuple[str, ...]
    title: str
    nodes: int
    retries: int
    requeues: bool
    warn_s: int
    needs_shell: bool


def job_script(job: JobText) -> str:
    """Return the script for sbatch."""
    return _JOB.format(
        head="".join(f"#SBATCH {option}\n" for option in job.options),
        title=job.title,
        nodes=job.nodes,
        retries=job.retries,
        requeue=int(job.requeues),
        warn_s=job.warn_s,
        due_s=job.warn_s + EARLY_S,
        key=paths.DELIVERED_SSH_KEY,
        fresh=paths.DELIVERED_KEYS,
        unseen=_UNSEEN,
        begin=_BEGIN,
        make_key=(_SSH_KEY if job.needs_shell else _KEY).format(key=paths.DELIVERED_SSH_KEY),
    )


def node_script(node: NodeText) -> str:
    """Return the script that every node runs."""
    # `module` is a function of login shells.
    shell = "/bin/bash -l" if node.setup or not node.paths else "/bin/sh"
    exports = "".join(f"export {name}={shlex.quote(v)}\n" for name, v in node.paths.items())
    setup = "".join(f"{line}\n" for line in node.setup)
    if node.python:
        entry = f'{shlex.quote(node.python)} -I -S "$here/{node.entry}"'
    else:
        entry = 'sh "$here/boot.sh"'
    return _NODE.format(
        shell=shell,
        scratch=shlex.quote(node.scratch),
        # Scripts create sockets below it, whose paths must be short, so the job's name is left out.
        suffix=grid.unique_part(node.job),
        paths=exports,
        setup=setup,
        kept=_KEPT_VARIABLES,
        record=f'export {names.CLOUDJOB_RECORD_DIR}="$here/record"\n' if node.keeps_record else "",
        cpus=_CPUS.format(cpus=node.cpus_per_rank) if node.cpus_per_rank else "",
        entry=entry,
        args=" ".join(shlex.quote(arg) for arg in node.args),
    )


_JOB = """\
#!/bin/sh
{head}
# {title}
# It runs one entry on each node (node.sh). The file env beside this script, readable only by its
# owner, holds the variables and secrets of the entries; none of them passes through --export.
umask 077
nodes={nodes} retries={retries} requeue={requeue}
why=

# Starting a program costs a hundred times as much as a shell builtin, so avoid it.
forget() {{
    for left in "$@"; do
        [ ! -e "$left" ] || rm -f "$left"
    done
}}
note() {{
    echo "$* $(date +%s)" >>state
}}

# left: print the seconds until the job's time limit; -1 without a limit.
left() {{
    squeue -h -j "$SLURM_JOB_ID" -o %L | awk -F '[-:]' '
        /^[0-9:-]+$/ {{ for (i = 0; i < NF; i++) s += $(NF - i) * (i < 3 ? 60 ^ i : 86400) }}
        END {{ print s == "" ? -1 : s }}'
}}

# ask WHY...: let the head end the job, which gives the ranks their grace and writes a record.
ask() {{
    # A preemption ends with SIGTERM, which is not a separate reason.
    if [ -z "$why" ] || [ "$1" = cancel ]; then
        [ "$why" = "$1" ] || note "asked $*"
        why=$1
    fi
    : >asked
    [ -e end-0 ] || [ ! -s entry.pid ] || kill -TERM "$(cat entry.pid)" 2>/dev/null
    [ ! -e now ] || hurry &
}}

# hurry: end the job without its grace period: SIGINT to the head, then SIGKILL by Slurm.
hurry() {{
    sleep 1
    [ -e end-0 ] || [ ! -s entry.pid ] || kill -INT "$(cat entry.pid)"
    sleep 10
    scancel --signal=KILL "$SLURM_JOB_ID"
}}

trap 'ask cancel' USR2
trap 'ask warned "$(left)" {warn_s}' USR1
trap 'ask slurm' TERM
forget asked hung entry.pid end-*

# The key with which the nodes authenticate each other is created here, so it is not transferred.
[ "$nodes" = 1 ] || [ -s {key} ] || {make_key} &

# This node comes first: the head runs where Slurm sends the signals of the job.
hosts=$SLURMD_NODENAME
for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    [ "$host" = "$SLURMD_NODENAME" ] || hosts=$hosts,$host
done
wait

# watch STEP: end a step that outlives the head by 10 s, as the workers end soon after the head. End
# the head if a worker fails before it answers, as the head would wait for it.
watch() {{
    trap - TERM
    trap '' USR1 USR2
    until [ -e end-0 ]; do
        sleep 1
        while read -r mark host rest; do
            [ "$mark" = {unseen} ] && [ ! -e asked ] || continue
            note "unseen $host"
            : >asked
            [ ! -s entry.pid ] || kill -TERM "$(cat entry.pid)"
        done <slurm.log
        for end in end-*; do
            [ -s "$end" ] && [ "$end" != end-0 ] && [ "$(cat "$end")" != 0 ] || continue
            sleep 10
            [ -e end-0 ] || [ -e asked ] || {{
                note "lost ${{end#end-}} $(cat "$end")"
                : >asked
                kill -TERM "$(cat entry.pid)"
            }}
            until [ -e end-0 ]; do sleep 1; done
        done
    done
    sleep 10
    : >hung
    kill -TERM "$1"
}}

# The step has one task on each node, which must get every GPU that the job has there. Without
# SLURM_GRES, srun gives it the share of one rank if an option of sbatch divides the GPUs among the
# ranks (tried on 22.05).
devices() {{
    scontrol show job --details "$SLURM_JOB_ID" | sed -n '/^ *Nodes=/s/.* GRES=//p' |
        sed 's/(IDX:[^)]*)//g; s/(CNT:\\([0-9]*\\))/:\\1/g' | sort -u
}}
if [ -n "${{SLURM_GPUS:-}}${{SLURM_GPUS_PER_TASK:-}}${{SLURM_GPUS_PER_SOCKET:-}}\\
${{SLURM_TRES_PER_TASK:-}}${{SLURM_NTASKS_PER_GPU:-}}" ]; then
    SLURM_GRES=$(devices)
    case $SLURM_GRES in
        "") unset SLURM_GRES ;;
        *"
"*)
            echo "cloudjob: the nodes have different devices, and each uses what srun gives it:" \\
                "$(echo "$SLURM_GRES" | tr '\\n' ' ')" >>node-0.log
            unset SLURM_GRES
            ;;
        *) export SLURM_GRES ;;
    esac
fi
unset SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK SLURM_GPU_BIND \\
    SLURM_TRES_PER_TASK SLURM_CPUS_PER_GPU SLURM_MEM_PER_GPU SLURM_NTASKS_PER_GPU \\
    SLURM_NTASKS_PER_TRES SLURM_NTASKS_PER_SOCKET SLURM_NTASKS_PER_CORE SRUN_CPUS_PER_TASK

# note_causes: note what only Slurm's log shows about this attempt: nodes that failed, and nodes on
# which the kernel has killed a process at the job's memory limit.
note_causes() {{
    short= down=
    while read -r line; do
        case $line in
            "{begin}") short= down= ;;
            "srun: error: "*": Out Of Memory") short=${{line#srun: error: }} ;;
            "srun: error: Node failure on "*) down=${{line##* }} ;;
        esac
    done <slurm.log
    limit=${{SLURM_MEM_PER_NODE:+"${{SLURM_MEM_PER_NODE}}M a node"}}
    limit=${{SLURM_MEM_PER_CPU:+"${{SLURM_MEM_PER_CPU}}M a processor"}}$limit
    [ -z "$short" ] || note "memory ${{short%%: *}} $limit"
    [ -z "$down" ] || note "down $down"
}}

run() {{
    echo "{begin}"
    forget hung entry.pid end-*
    srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --overlap --cpu-bind=none \\
        --mpi=none --export=ALL --input=none --quiet \\
        sh -c 'cd "$0" && exec ./node.sh "$1"; echo "{unseen} $SLURMD_NODENAME" >&2; exit 1' \\
        "$PWD" "$hosts" &
    step=$!
    watch "$step" &
    watcher=$!
    code=0
    # A signal ends `wait`, but not the process that it waits for.
    wait "$step" || code=$?
    while kill -0 "$step" 2>/dev/null; do
        code=0
        wait "$step" || code=$?
    done
    kill "$watcher" 2>/dev/null
    lost=$code
    [ ! -e hung ] || lost=1
    [ ! -s end-0 ] || read -r code <end-0
    [ "$code" = 0 ] || note_causes
}}

if [ ! -e env ]; then
    note "begin $SLURM_JOB_ID ${{SLURM_RESTART_COUNT:-0}} $hosts"
    echo "cloudjob: this job has ended before, and its variables were deleted: submit it again" \\
        >>node-0.log
    note "end 125"
    exit 125
fi

attempt=0
while :; do
    note "begin $SLURM_JOB_ID ${{SLURM_RESTART_COUNT:-0}} $hosts"
    # Cancelled before this script could receive a signal.
    [ ! -e cancelled ] || {{
        ask cancel
        code=143
        break
    }}
    run
    [ "$code" != 0 ] && [ -z "$why" ] && [ "$attempt" -lt "$retries" ] || break
    attempt=$((attempt + 1))
    echo "cloudjob: the job failed; attempt $((attempt + 1)) of $((retries + 1)) begins" \\
        >>node-0.log
done
# again: succeed if the job itself is not to blame. As node.sh exits with 0, the step fails or hangs
# only if a node is lost; an early warning announces a preemption.
again() {{
    [ -n "$why" ] || return "$((lost == 0))"
    [ "$why" = warned ] || return 1
    time=$(left)
    [ "$time" -lt 0 ] || [ "$time" -gt {due_s} ]
}}
restart=
if [ "$requeue" = 1 ] && [ "$code" != 0 ] && again; then
    restart=again
    scontrol requeue "$SLURM_JOB_ID" && sleep 600
fi
# Keep the secrets only if Slurm may start the job again.
case $requeue$why$restart in
    1slurm* | 1warned* | *again) ;;
    *) forget env {fresh} {key} {key}.pub ;;
esac
note "end $code"
# Make Slurm's own records show a cancelled job as cancelled, not as failed.
[ "$why" != cancel ] || [ "$code" = 0 ] || scancel "$SLURM_JOB_ID"
exit "$code"
"""

_SSH_KEY = "ssh-keygen -q -t ed25519 -N '' -C cloudjob -f {key}"
# Not a key of ssh. Each line has 122 random bits from the kernel.
_KEY = "cat /proc/sys/kernel/random/uuid /proc/sys/kernel/random/uuid >{key}"

# Older versions than 22.05 of srun take the first variable from the job.
_CPUS = """\
export SLURM_CPUS_PER_TASK={cpus} SRUN_CPUS_PER_TASK={cpus}
"""

_NODE = """\
#!{shell}
# node.sh HOST,HOST...: run this node's part of a job on these hosts, the head first.
mask=$(umask)
umask 077
here=$PWD hosts=$1
index=0
IFS=,
for host in $hosts; do
    [ "$host" != "$SLURMD_NODENAME" ] || break
    index=$((index + 1))
done
unset IFS
exec >>"node-$index.log" 2>&1 </dev/null

# leave CODE: note how this node ended. It exits with 0, as the head decides how the job ends.
leave() {{
    echo "$1" >"end-$index.new"
    mv "end-$index.new" "end-$index"
    exit 0
}}

# mpirun needs the same path on every node, each on its own disk. After a restart it may contain
# what a killed node left.
work={scratch}/cloudjob-{suffix}
owner() {{
    owner=
    [ ! -s "$work/host" ] || read -r owner <"$work/host"
}}
owner
[ "$owner" != "$SLURMD_NODENAME" ] || rm -rf "$work"
if ! mkdir "$work" || ! mkdir "$work/home" "$work/tmp"; then
    echo "cloudjob: making $work on $SLURMD_NODENAME failed"
    owner
    [ -z "$owner" ] || echo "cloudjob: it belongs to $owner: the nodes share this disk"
    echo "cloudjob: hint: set slurm.scratch to a folder on each node's own disk"
    leave 125
fi
echo "$SLURMD_NODENAME" >"$work/host"
# How many GPUs the job has on this node; before 21.08 Slurm only lists them.
if [ -z "${{SLURM_GPUS_ON_NODE:-}}" ]; then
    IFS=,
    # shellcheck disable=SC2086
    set -- ${{SLURM_STEP_GPUS:-}}
    SLURM_GPUS_ON_NODE=$#
    unset IFS
fi
export MA_NUM_GPUS="$SLURM_GPUS_ON_NODE"
{paths}{setup}set -f
for word in $(export -p); do
    name=${{word%%=*}}
    case $name in
        {kept} | *[!A-Z0-9_]*) ;;
        SLURM* | SBATCH* | SRUN*) unset "$name" ;;
    esac
done
set +f
# HOME stays the user's, with caches and keys; the job's own files are below $work.
if [ ! -d "${{HOME:-}}" ]; then
    echo "cloudjob: $SLURMD_NODENAME has no home folder ${{HOME:-}}: HOME is an empty folder"
    export HOME="$work/home"
fi
export MA_HOME="$work/home" MA_MOUNT_PATH="$work/home/modelarts" TMPDIR="$work/tmp"
export MA_JOB_DIR="$MA_MOUNT_PATH/user-job-dir" MA_LOG_DIR="$MA_MOUNT_PATH/log"
export WORKSPACE="$MA_JOB_DIR/code" MA_CURRENT_INSTANCE_NAME="$host"
# The entry sets the node's address: the one that leads to the others, not that of its own name.
unset MA_CURRENT_IP MA_CURRENT_HOST_IP
export VC_WORKER_HOSTS="$hosts" VC_TASK_INDEX="$index" VK_TASK_INDEX="$index"
# Jobs on one node often have close ids, and need different ports.
export SSHD_PORT=$((10000 + SLURM_JOB_ID % 10000))
export CLOUDJOB_NODE_DIR="$work/node" CLOUDJOB_DELIVERY="$here"
{record}{cpus}umask "$mask"
{entry} \\
    {args} &
entry=$!
if [ "$index" = 0 ]; then
    (umask 077 && echo "$entry" >entry.pid)
    [ ! -e asked ] || kill -TERM "$entry"
fi
# Slurm signals every process of a node, including the entry, which ends when it is done.
trap : TERM INT HUP USR1 USR2
code=0
wait "$entry" || code=$?
while kill -0 "$entry" 2>/dev/null; do
    code=0
    wait "$entry" || code=$?
done
umask 077
rm -rf "$work"
leave "$code"
"""
