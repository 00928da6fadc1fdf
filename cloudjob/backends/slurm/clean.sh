# This script removes what the job has on this node: processes that outlive the entry because it was
# killed, and its folder. node.sh runs it; Slurm runs it again after node.sh (srun --task-epilog), as
# both may have been killed. A folder of another node, which shares the disk, stays, unless the caller
# knows that it is its own (`clean.sh mine`).
# The lines above come from cloudjob/backends/slurm/script.py; they assign these:
# shellcheck shell=sh
: "${scratch:?}" "${suffix:?}"
# Slurm ends a step that is cancelled with SIGTERM, this script included.
trap '' TERM INT HUP
work=$scratch/cloudjob-$suffix
if [ "${1:-}" != mine ]; then
    [ -d "$work" ] || exit 0
    # node.sh writes the name at once, unless it was killed before.
    [ -s "$work/host" ] || sleep 1
    owner=$SLURMD_NODENAME
    [ ! -s "$work/host" ] || read -r owner <"$work/host"
    [ "$owner" = "$SLURMD_NODENAME" ] || exit 0
fi
# The entry starts every process with these variables; the second tells nodes on one machine apart.
grep -lzxF "CLOUDJOB_NODE_DIR=$work/node" /proc/[0-9]*/environ 2>/dev/null |
    xargs -r grep -lzxF "MA_CURRENT_INSTANCE_NAME=$SLURMD_NODENAME" 2>/dev/null |
    while IFS=/ read -r _ _ process _; do
        kill -KILL "$process" 2>/dev/null
    done
rm -rf "$work"
