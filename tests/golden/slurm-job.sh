#!/bin/sh
#SBATCH --job-name=cloudjob-train-2k83xnf2
#SBATCH --output=slurm.log
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=1
#SBATCH --signal=B:USR1@40
#SBATCH --no-requeue

# cloudjob's job train-2k83xnf2: 2 nodes of 4
# It runs one entry on each node (node.sh). The variables and secrets of the entries lie in the
# file env beside this script, for its owner alone: nothing of it passes through --export.
umask 077
nodes=2 retries=0 requeue=0
why=

# A program costs a hundred times what a word of the shell costs: none is started without need.
forget() {
    for left in "$@"; do
        [ ! -e "$left" ] || rm -f "$left"
    done
}
note() {
    echo "$* $(date +%s)" >>state
}

# How many seconds of the job's time are left, -1 where it has no limit.
left() {
    squeue -h -j "$SLURM_JOB_ID" -o %L | awk -F '[-:]' '
        /^[0-9:-]+$/ { for (i = 0; i < NF; i++) s += $(NF - i) * (i < 3 ? 60 ^ i : 86400) }
        END { print s == "" ? -1 : s }'
}

# ask WHY...: have the head end the job, which gives the ranks their grace and leaves a record.
ask() {
    # A preemption ends with SIGTERM, which is not a separate reason.
    if [ -z "$why" ] || [ "$1" = cancel ]; then
        [ "$why" = "$1" ] || note "asked $*"
        why=$1
    fi
    : >asked
    [ -e end-0 ] || [ ! -s entry.pid ] || kill -TERM "$(cat entry.pid)" 2>/dev/null
    [ ! -e now ] || hurry &
}

# hurry: end the job without its grace; the head by a second Ctrl-C, or Slurm by SIGKILL.
hurry() {
    sleep 1
    [ -e end-0 ] || [ ! -s entry.pid ] || kill -INT "$(cat entry.pid)"
    sleep 10
    scancel --signal=KILL "$SLURM_JOB_ID"
}

trap 'ask cancel' USR2
trap 'ask warned "$(left)" 40' USR1
trap 'ask slurm' TERM
forget asked hung entry.pid end-*

# The key that the nodes know each other by is made where it is used: nobody sends it anywhere.
[ "$nodes" = 1 ] || [ -s ssh-key ] || ssh-keygen -q -t ed25519 -N '' -C cloudjob -f ssh-key &

# This node comes first: the head runs where Slurm sends the signals of the job.
hosts=$SLURMD_NODENAME
for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    [ "$host" = "$SLURMD_NODENAME" ] || hosts=$hosts,$host
done
wait

# A head that has ended is followed by its workers; one that stays longer hangs. A worker that has
# failed before it answered the head is one that the head would wait for.
watch() {
    trap - TERM
    trap '' USR1 USR2
    until [ -e end-0 ]; do
        sleep 1
        while read -r mark host rest; do
            [ "$mark" = cloudjob-unseen: ] && [ ! -e asked ] || continue
            note "unseen $host"
            : >asked
            [ ! -s entry.pid ] || kill -TERM "$(cat entry.pid)"
        done <slurm.log
        for end in end-*; do
            [ -s "$end" ] && [ "$end" != end-0 ] && [ "$(cat "$end")" != 0 ] || continue
            sleep 10
            [ -e end-0 ] || [ -e asked ] || {
                note "lost ${end#end-} $(cat "$end")"
                : >asked
                kill -TERM "$(cat entry.pid)"
            }
            until [ -e end-0 ]; do sleep 1; done
        done
    done
    sleep 10
    : >hung
    kill -TERM "$1"
}

# Each node has one task of the step, which is to have all that the job has there. By itself srun
# gives it the share of one rank where an option of sbatch parts GPUs among ranks (tried on 22.05).
devices() {
    scontrol show job --details "$SLURM_JOB_ID" | sed -n '/^ *Nodes=/s/.* GRES=//p' |
        sed 's/(IDX:[^)]*)//g; s/(CNT:\([0-9]*\))/:\1/g' | sort -u
}
if [ -n "${SLURM_GPUS:-}${SLURM_GPUS_PER_TASK:-}${SLURM_GPUS_PER_SOCKET:-}\
${SLURM_TRES_PER_TASK:-}${SLURM_NTASKS_PER_GPU:-}" ]; then
    SLURM_GRES=$(devices)
    case $SLURM_GRES in
        "") unset SLURM_GRES ;;
        *"
"*)
            echo "cloudjob: the nodes have different devices, and each uses what srun gives it:" \
                "$(echo "$SLURM_GRES" | tr '\n' ' ')" >>node-0.log
            unset SLURM_GRES
            ;;
        *) export SLURM_GRES ;;
    esac
fi
unset SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK SLURM_GPU_BIND \
    SLURM_TRES_PER_TASK SLURM_CPUS_PER_GPU SLURM_MEM_PER_GPU SLURM_NTASKS_PER_GPU \
    SLURM_NTASKS_PER_TRES SLURM_NTASKS_PER_SOCKET SLURM_NTASKS_PER_CORE SRUN_CPUS_PER_TASK

# note_causes: note what only Slurm's log knows of this attempt: nodes that failed, and nodes on
# which the kernel has killed a process for the job's memory.
note_causes() {
    short= down=
    while read -r line; do
        case $line in
            "cloudjob: an attempt begins") short= down= ;;
            "srun: error: "*": Out Of Memory") short=${line#srun: error: } ;;
            "srun: error: Node failure on "*) down=${line##* } ;;
        esac
    done <slurm.log
    limit=${SLURM_MEM_PER_NODE:+"${SLURM_MEM_PER_NODE}M a node"}
    limit=${SLURM_MEM_PER_CPU:+"${SLURM_MEM_PER_CPU}M a processor"}$limit
    [ -z "$short" ] || note "memory ${short%%: *} $limit"
    [ -z "$down" ] || note "down $down"
}

run() {
    echo "cloudjob: an attempt begins"
    forget hung entry.pid end-*
    srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --overlap --cpu-bind=none \
        --mpi=none --export=ALL --input=none --quiet \
        sh -c 'cd "$0" && exec ./node.sh "$1"; echo "cloudjob-unseen: $SLURMD_NODENAME" >&2; exit 1' \
        "$PWD" "$hosts" &
    step=$!
    watch "$step" &
    watcher=$!
    code=0
    # A signal ends a wait, and not what is waited for.
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
}

if [ ! -e env ]; then
    note "begin $SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0} $hosts"
    echo "cloudjob: this job has ended before, and its variables were deleted: submit it again" \
        >>node-0.log
    note "end 125"
    exit 125
fi

attempt=0
while :; do
    note "begin $SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0} $hosts"
    # Cancelled before this script could receive a signal.
    [ ! -e cancelled ] || {
        ask cancel
        code=143
        break
    }
    run
    [ "$code" != 0 ] && [ -z "$why" ] && [ "$attempt" -lt "$retries" ] || break
    attempt=$((attempt + 1))
    echo "cloudjob: the job failed; attempt $((attempt + 1)) of $((retries + 1)) begins" \
        >>node-0.log
done
# again: whether it was not the job's own fault. A node that is lost has the step fail or hang, as
# no task does by itself; a warning that comes early is of a preemption.
again() {
    [ -n "$why" ] || return "$((lost == 0))"
    [ "$why" = warned ] || return 1
    time=$(left)
    [ "$time" -lt 0 ] || [ "$time" -gt 105 ]
}
restart=
if [ "$requeue" = 1 ] && [ "$code" != 0 ] && again; then
    restart=again
    scontrol requeue "$SLURM_JOB_ID" && sleep 600
fi
# A job that Slurm starts again needs its secrets, any other does not.
case $requeue$why$restart in
    1slurm* | 1warned* | *again) ;;
    *) forget env store-keys ssh-key ssh-key.pub ;;
esac
note "end $code"
# Slurm's own records name a job that was cancelled so, and not failed.
[ "$why" != cancel ] || [ "$code" = 0 ] || scancel "$SLURM_JOB_ID"
exit "$code"
