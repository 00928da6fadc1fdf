#!/bin/sh
#SBATCH --job-name=cloudjob-train-2k83xnf2
#SBATCH --output=slurm.log
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=1
#SBATCH --signal=B:USR1@40
#SBATCH --no-requeue

# cloudjob's job train-2k83xnf2: 2 nodes x 4 ranks
# It runs one entry on each node (node.sh). The file env beside this script, readable only by its
# owner, holds the variables and secrets of the entries; none of them passes through --export.
umask 077
nodes=2 retries=0 requeue=0
why=

# Starting a program costs a hundred times as much as a shell builtin, so avoid it.
forget() {
    for left in "$@"; do
        [ ! -e "$left" ] || rm -f "$left"
    done
}
note() {
    echo "$* $(date +%s)" >>state
}

# left: print the seconds until the job's time limit; -1 without a limit.
left() {
    squeue -h -j "$SLURM_JOB_ID" -o %L | awk -F '[-:]' '
        /^[0-9:-]+$/ { for (i = 0; i < NF; i++) s += $(NF - i) * (i < 3 ? 60 ^ i : 86400) }
        END { print s == "" ? -1 : s }'
}

# ask WHY...: let the head end the job, which gives the ranks their grace and writes a record.
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

# hurry: end the job without its grace period: SIGINT to the head, then SIGKILL by Slurm.
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

# The key with which the nodes authenticate each other is created here, so it is not transferred.
[ "$nodes" = 1 ] || [ -s ssh-key ] || ssh-keygen -q -t ed25519 -N '' -C cloudjob -f ssh-key &

# This node comes first: the head runs where Slurm sends the signals of the job.
hosts=$SLURMD_NODENAME
for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    [ "$host" = "$SLURMD_NODENAME" ] || hosts=$hosts,$host
done
wait

# watch STEP: end a step that outlives the head by 10 s, as the workers end soon after the head. End
# the head if a worker fails before it answers, as the head would wait for it.
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

# The step has one task on each node, which must get every GPU that the job has there. Without
# SLURM_GRES, srun gives it the share of one rank if an option of sbatch divides the GPUs among the
# ranks (tried on 22.05).
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

# note_causes: note what only Slurm's log shows about this attempt: nodes that failed, and nodes on
# which the kernel has killed a process at the job's memory limit.
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
# again: succeed if the job itself is not to blame. As node.sh exits with 0, the step fails or hangs
# only if a node is lost; an early warning announces a preemption.
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
# Keep the secrets only if Slurm may start the job again.
case $requeue$why$restart in
    1slurm* | 1warned* | *again) ;;
    *) forget env store-keys ssh-key ssh-key.pub ;;
esac
note "end $code"
# Make Slurm's own records show a cancelled job as cancelled, not as failed.
[ "$why" != cancel ] || [ "$code" = 0 ] || scancel "$SLURM_JOB_ID"
exit "$code"
