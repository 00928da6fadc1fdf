# node.sh HOST,HOST...: run this node's part of a job on these hosts, the head first. It starts
# setup.sh, which becomes the entry, and outlives it to clean up and to note how it ended.
# The lines above come from cloudjob/backends/slurm/script.py; they assign these:
# shellcheck shell=sh
: "${scratch:?}" "${suffix:?}" "${setup_shell:?}"
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
log=node-$index.log
# A failed redirection of `exec` would end this shell without a word.
if ! (exec >>"$log"); then
    echo "cloudjob: $SLURMD_NODENAME cannot write $here/$log: is the disk full or read-only?" >&2
    exit 125
fi
exec >>"$log" 2>&1 </dev/null

# leave CODE [KIND TEXT]: note how this node ended, and exit with 0, as the head decides how the job
# ends. If that cannot be noted, the exit code is the only sign left, and it is never 0.
leave() {
    # A program, not a builtin: a disk behind a network may report only at the close that it is full.
    if env printf '%s\n' "$*" >"end-$index.new" && mv "end-$index.new" "end-$index"; then
        exit 0
    fi
    echo "cloudjob: $SLURMD_NODENAME cannot note exit code $1 in $here: is the disk full or read-only?"
    [ "$1" != 0 ] || exit 125
    exit "$1"
}

# mpirun needs the same path on every node, each on its own disk. After a restart it may contain
# what a killed node left.
work=$scratch/cloudjob-$suffix
owner() {
    owner=
    [ ! -s "$work/host" ] || read -r owner <"$work/host"
}
owner
[ "$owner" != "$SLURMD_NODENAME" ] || ./clean.sh
if ! mkdir "$work" || ! mkdir "$work/home" "$work/tmp"; then
    echo "cloudjob: making $work on $SLURMD_NODENAME failed"
    owner
    [ -z "$owner" ] || echo "cloudjob: it belongs to $owner: the nodes share this disk"
    echo "cloudjob: hint: set slurm.scratch to a folder on each node's own disk"
    leave 125
fi
if ! echo "$SLURMD_NODENAME" >"$work/host"; then
    echo "cloudjob: writing to $work on $SLURMD_NODENAME failed: is that disk full?"
    ./clean.sh mine
    leave 125
fi
# It is empty once the entry starts; until then it holds the command of slurm.setup that runs.
echo >"$work/setup"
# How many GPUs the job has on this node; before 21.08 Slurm only lists them.
if [ -z "${SLURM_GPUS_ON_NODE:-}" ]; then
    IFS=,
    # shellcheck disable=SC2086
    set -- ${SLURM_STEP_GPUS:-}
    SLURM_GPUS_ON_NODE=$#
    unset IFS
fi
export MA_NUM_GPUS="$SLURM_GPUS_ON_NODE"
before=$(wc -c <"$log")
export cloudjob_here="$here" cloudjob_work="$work" cloudjob_hosts="$hosts" cloudjob_index="$index"
(
    umask "$mask"
    # shellcheck disable=SC2086
    exec $setup_shell "$here/setup.sh"
) &
entry=$!
if [ "$index" = 0 ]; then
    echo "$entry $$" >entry.pid
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
# how_setup_ended: print the command that ended the shell of setup.sh, and the last line of its output.
how_setup_ended() {
    read -r command <"$work/setup"
    said=$(tail -c "+$((before + 1))" "$log" | grep . | tail -n 1 | cut -c 1-300)
    if [ "$code" = 2 ] && ! ${setup_shell%% *} -n "$here/setup.sh" 2>/dev/null; then
        text="slurm.setup: a syntax error ended the shell with exit code $code"
    elif [ -n "$command" ]; then
        text="slurm.setup: \"$command\" ended the shell with exit code $code"
    else
        text="before slurm.setup, a profile (/etc/profile, ~/.bash_profile) ended the login shell"
        text="$text with exit code $code"
    fi
    printf '%s\n' "$text${said:+: $said}"
}
set -- "$code"
if [ -s "$work/setup" ] && [ ! -e asked ]; then
    set -- 125 setup "$(how_setup_ended)"
    printf '%s\n' "cloudjob: $SLURMD_NODENAME: $3"
fi
./clean.sh mine
leave "$@"
