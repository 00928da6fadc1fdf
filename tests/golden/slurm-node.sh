#!/bin/sh
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
leave() {
    echo "$1" >"end-$index.new"
    mv "end-$index.new" "end-$index"
    exit 0
}

# mpirun needs the same path on every node, each on its own disk. After a restart it may contain
# what a killed node left.
work=/tmp/cloudjob-2k83xnf2
owner() {
    owner=
    [ ! -s "$work/host" ] || read -r owner <"$work/host"
}
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
if [ -z "${SLURM_GPUS_ON_NODE:-}" ]; then
    IFS=,
    # shellcheck disable=SC2086
    set -- ${SLURM_STEP_GPUS:-}
    SLURM_GPUS_ON_NODE=$#
    unset IFS
fi
export MA_NUM_GPUS="$SLURM_GPUS_ON_NODE"
export PATH=/opt/venv/bin:/usr/bin
export LANG=C.UTF-8
set -f
for word in $(export -p); do
    name=${word%%=*}
    case $name in
        SLURM_JOB_ID | SLURM_CONF | SLURM_GRES | *[!A-Z0-9_]*) ;;
        SLURM* | SBATCH* | SRUN*) unset "$name" ;;
    esac
done
set +f
# HOME stays the user's, with caches and keys; the job's own files are below $work.
if [ ! -d "${HOME:-}" ]; then
    echo "cloudjob: $SLURMD_NODENAME has no home folder ${HOME:-}: HOME is an empty folder"
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
umask "$mask"
/opt/venv/bin/python -I -S "$here/jobentry.pyz" \
    train.py --name 'it'"'"'s $HOME' &
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
