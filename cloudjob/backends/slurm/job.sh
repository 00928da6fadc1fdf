# This script runs one entry on each node (node.sh). The file env beside it, readable only by its
# owner, holds the variables and secrets of the entries; none of them passes through --export.
# The lines above come from cloudjob/backends/slurm/script.py; they assign these:
# shellcheck shell=sh
: "${nodes:?}" "${retries:?}" "${final?}" "${requeue:?}" "${warn_s:?}" "${due_s:?}" "${uses_ssh:?}" "${uses_pmix:?}"
: "${key:?}" "${fresh:?}" "${unseen:?}" "${begin:?}"
umask 077
why=

# Starting a program costs a hundred times as much as a shell builtin, so avoid it. But a redirection
# of `:` that fails, because the disk is full, ends the shell; one of `echo` does not.
forget() {
    for left in "$@"; do
        [ ! -e "$left" ] || rm -f "$left"
    done
}
mark() {
    echo >"$1"
}
note() {
    printf '%s\n' "$* $(date +%s)" >>state
}

# signal_head SIGNAL: send a signal to the head's entry, unless it has ended.
signal_head() {
    [ -e end-0 ] || ! read -r entry _ 2>/dev/null <entry.pid || kill -"$1" "$entry" 2>/dev/null
}

# head_has_ended: succeed also if the head could not note its end, because the disk is full.
head_has_ended() {
    [ -e end-0 ] || { read -r _ node 2>/dev/null <entry.pid && ! kill -0 "$node" 2>/dev/null; }
}

# left: print the seconds until the job's time limit; -1 without a limit.
left() {
    squeue -h -j "$SLURM_JOB_ID" -o %L | awk -F '[-:]' '
        /^[0-9:-]+$/ { for (i = 0; i < NF; i++) s += $(NF - i) * (i < 3 ? 60 ^ i : 86400) }
        END { print s == "" ? -1 : s }'
}

# warned: Slurm sends the same signal before the end of the job's time and before a preemption.
# shellcheck disable=SC2329
warned() {
    case "$(scontrol show job "$SLURM_JOB_ID") " in
        *" PreemptTime="[0-9]*) ask preempted ;;
        *) ask warned "$(left)" "$warn_s" ;;
    esac
}

# ask WHY...: let the head end the job, which gives the ranks their grace and writes a record.
ask() {
    # A preemption ends with SIGTERM, which is not a separate reason.
    if [ -z "$why" ] || [ "$1" = cancel ]; then
        [ "$why" = "$1" ] || note "asked $*"
        why=$1
    fi
    mark asked
    signal_head TERM
    [ ! -e now ] || hurry &
}

# hurry: end the job without its grace period: SIGINT to the head, then SIGKILL by Slurm.
hurry() {
    sleep 1
    signal_head INT
    sleep 10
    scancel --signal=KILL "$SLURM_JOB_ID"
}

trap 'ask cancel' USR2
trap warned USR1
trap 'ask slurm' TERM
forget asked hung entry.pid end-*

# The key with which the nodes authenticate each other is created here, so it is not transferred.
make_key() {
    if [ "$uses_ssh" = 1 ]; then
        ssh-keygen -q -t ed25519 -N '' -C cloudjob -f "$key"
    else
        # Not a key of ssh. Each line has 122 random bits from the kernel.
        cat /proc/sys/kernel/random/uuid /proc/sys/kernel/random/uuid >"$key"
    fi
}
[ "$nodes" = 1 ] || [ -s "$key" ] || make_key &

# This node comes first: the head runs where Slurm sends the signals of the job.
hosts=$SLURMD_NODENAME
for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    [ "$host" = "$SLURMD_NODENAME" ] || hosts=$hosts,$host
done
wait

# fail_head LINE...: note why the head must end, and end it, as it would wait for that node.
fail_head() {
    head_has_ended || [ -e asked ] || {
        note "$@"
        mark asked
        signal_head TERM
    }
}

# check_ends: end the head if a worker has failed before it answers.
check_ends() {
    # Not the file end-1.new, which is about to become end-1.
    for end in end-*[0-9]; do
        if [ "$end" = end-0 ] || ! read -r code kind text 2>/dev/null <"$end"; then
            continue
        fi
        [ "$code" != 0 ] || continue
        case $kind in
            setup) fail_head "setup ${end#end-} $text" ;;
            *)
                sleep 10
                fail_head "lost ${end#end-} $code"
                ;;
        esac
        until head_has_ended; do sleep 1; done
    done
}

# watch STEP...: end steps that outlive the head by 10 s, as the workers end soon after the head.
watch() {
    trap - TERM
    trap '' USR1 USR2
    until head_has_ended; do
        sleep 1
        while read -r mark host rest; do
            [ "$mark" != "$unseen" ] || fail_head "unseen $host"
        done <slurm.log
        check_ends
    done
    read -r code kind text 2>/dev/null <end-0
    if [ "$kind" = setup ]; then
        # The workers wait for a head that never started.
        sleep 1
    else
        sleep 10
        mark hung
    fi
    kill -TERM "$@" 2>/dev/null
}

# A step has one task on each node, which must get every GPU that the job has there. Without these
# options, srun gives it the share of one rank if an option of sbatch divides the GPUs among the
# ranks (tried on 22.05).
# devices: print a line for each group of nodes: its name and its devices, as in gpu:a100:4,nvme:1.
devices() {
    scontrol show job --details "$SLURM_JOB_ID" |
        sed -n 's/^ *Nodes=\([^ ]*\) .* GRES=\(.*\)/\1 \2/p' |
        sed 's/(IDX:[^)]*)//g; s/(CNT:\([0-9]*\))/:\1/g'
}
uneven=
if [ -n "${SLURM_GPUS:-}${SLURM_GPUS_PER_TASK:-}${SLURM_GPUS_PER_SOCKET:-}\
${SLURM_TRES_PER_TASK:-}${SLURM_NTASKS_PER_GPU:-}" ]; then
    devices=$(devices)
    SLURM_GRES=$(echo "$devices" | sed 's/^[^ ]* //' | sort -u)
    case $SLURM_GRES in
        "") unset SLURM_GRES ;;
        *"
"*)
            uneven=$devices
            unset SLURM_GRES
            least=$(echo "$uneven" | sed -n 's/.*gpu:\([^,]*\).*/\1/p' | sed 's/.*://' | sort -n)
            # Nodes can also differ in other devices only, and have no GPUs.
            if [ "$uses_pmix" != 0 ] && [ -n "$least" ]; then
                # Else srun asks each node for the same part of all GPUs, which one may not have.
                export cloudjob_gres="gpu:${least%%
*}"
                echo "cloudjob: the nodes have different devices, and srun gives the ranks of each" \
                    "$cloudjob_gres: $(echo "$uneven" | tr '\n' ' ')" >>node-0.log
            fi
            ;;
        *) export SLURM_GRES ;;
    esac
fi
unset SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK SLURM_GPU_BIND \
    SLURM_TRES_PER_TASK SLURM_CPUS_PER_GPU SLURM_MEM_PER_GPU SLURM_NTASKS_PER_GPU \
    SLURM_NTASKS_PER_TRES SLURM_NTASKS_PER_SOCKET SLURM_NTASKS_PER_CORE SRUN_CPUS_PER_TASK

# note_causes: note what only Slurm's log shows about this attempt: nodes that failed or could not be
# started, other errors of srun, and nodes on which the kernel has killed a process at the job's
# memory limit.
note_causes() {
    short='' down='' prolog='' launch='' other=''
    while read -r line; do
        case $line in
            "$begin") short='' down='' prolog='' launch='' other='' ;;
            "srun: error: "*": Out Of Memory") short=${line#srun: error: } ;;
            "srun: error: Node failure on "*) down=${line##* } ;;
            "slurmstepd"*": error: Prolog failure on node "*) prolog=${line##* } ;;
            "srun: error: Task launch for "*" failed on node "*) launch=${line#* on node } ;;
            "srun: error: "*": task"[s\ ]*) ;;
            "srun: error: "* | "srun: fatal: "*) other=${other:-${line#srun: *: }} ;;
        esac
    done <slurm.log
    limit=${SLURM_MEM_PER_NODE:+"${SLURM_MEM_PER_NODE}M a node"}
    limit=${SLURM_MEM_PER_CPU:+"${SLURM_MEM_PER_CPU}M a processor"}$limit
    [ -z "$short" ] || note "memory ${short%%: *} $limit"
    [ -z "$down" ] || note "down $down"
    [ -z "$prolog" ] || note "prolog $prolog"
    [ -z "$launch" ] || note "launch ${launch%%: *} ${launch#*: }"
    [ -z "$other" ] || note "srun $other"
}

# start OPTION...: start a step, which runs node.sh once on each of its nodes.
start() {
    # shellcheck disable=SC2016
    srun --ntasks-per-node=1 --overlap --cpu-bind=none --mpi=none --export=ALL --input=none \
        --quiet --task-epilog="$PWD/clean.sh" "$@" \
        sh -c 'cd "$0" && exec ./node.sh "$1"; echo "$2 $SLURMD_NODENAME" >&2; exit 1' \
        "$PWD" "$hosts" "$unseen" &
    steps="$steps $!"
}

# start_uneven: start one step for each node. (srun --gpus gives 2 nodes with 2 and 1 GPUs one each;
# srun --gres refuses to give a node more than its share. Tried on 22.05.)
start_uneven() {
    for host in $(echo "$hosts" | tr , ' '); do
        gpus='' others=''
        for device in $(devices_of "$host" | tr , ' '); do
            case $device in
                gpu:*) gpus=$gpus,${device#gpu:} ;;
                *) others=$others,$device ;;
            esac
        done
        [ -n "$gpus$others" ] || others=,none
        start --nodes=1 --ntasks=1 --nodelist="$host" ${gpus:+"--gpus=${gpus#,}"} \
            ${others:+"--gres=${others#,}"}
    done
}
devices_of() {
    echo "$uneven" | while read -r group devices; do
        case " $(scontrol show hostnames "$group" | tr '\n' ' ')" in
            *" $1 "*) echo "$devices" ;;
        esac
    done
}

# run: run the job once; set its exit code, and the exit code of srun.
run() {
    echo "$begin"
    forget hung entry.pid end-*
    steps=
    if [ -n "$uneven" ]; then
        start_uneven
    else
        start --nodes="$nodes" --ntasks="$nodes"
    fi
    # shellcheck disable=SC2086
    watch $steps &
    watcher=$!
    lost=0
    for step in $steps; do
        code=0
        # A signal ends `wait`, but not the process that it waits for.
        wait "$step" || code=$?
        while kill -0 "$step" 2>/dev/null; do
            code=0
            wait "$step" || code=$?
        done
        [ "$code" = 0 ] || lost=$code
    done
    kill "$watcher" 2>/dev/null
    code=$lost
    [ ! -e hung ] || lost=1
    if read -r end kind text 2>/dev/null <end-0; then
        code=$end
        # srun was ended by `watch`; no node was lost.
        [ "$kind" != setup ] || {
            lost=0
            note "setup 0 $text"
        }
    else
        # A node that does not note its end has not succeeded, whatever srun reports.
        [ "$code" != 0 ] || code=125
        note silent
    fi
    [ "$code" = 0 ] || note_causes
}

# give_up MESSAGE...: end before anything has started.
give_up() {
    note "begin $SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0} $hosts"
    echo "cloudjob: $*" >>node-0.log
    note "gave-up $*"
    note "end 125"
    exit 125
}
[ -e env ] ||
    give_up "this job has ended before, and its variables were deleted: submit it again"
[ "$nodes" = 1 ] || [ -s "$key" ] ||
    give_up "creating $PWD/$key: is the disk full, and is ssh-keygen there?"

# is_final: whether the attempt that has failed is the last one; set the reason. Only the exit code
# shows what has happened: 1 and 2 are exceptions of a script, 124 is the time limit.
is_final() {
    final_reason="\`retries: {on: ...}\` does not name that"
    case " $final " in
        *" $code "*) return 0 ;;
    esac
    final_reason="it has no retries left"
    [ "$attempt" -gt "$retries" ]
}

attempt=0
while :; do
    note "begin $SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0} $hosts"
    if [ "$retries$requeue" != 00 ]; then
        # Those before a requeue count, too: each attempt has a record of its own.
        CLOUDJOB_ATTEMPT=$(grep -c '^begin ' state)
        export CLOUDJOB_ATTEMPT
    fi
    # Cancelled before this script could receive a signal.
    [ ! -e cancelled ] || {
        ask cancel
        code=143 lost=0
        break
    }
    run
    [ "$code" != 0 ] && [ -z "$why" ] && [ "$retries" != 0 ] || break
    attempt=$((attempt + 1))
    failed="cloudjob: attempt $attempt of $((retries + 1)) failed (exit code $code);"
    if is_final; then
        echo "$failed the job is not tried again: $final_reason" >>node-0.log
        break
    fi
    echo "$failed attempt $((attempt + 1)) of $((retries + 1)) begins" >>node-0.log
done
# again: succeed if the job itself is not to blame. node.sh exits with 0 if it can note its end, so
# the step fails or hangs only if a node is lost, or if the disk is full; then the next attempt would
# fail, too. An early warning announces a preemption.
again() {
    case $why in
        "") [ "$lost" != 0 ] && mark again && rm again ;;
        preempted) ;;
        warned)
            time=$(left)
            [ "$time" -lt 0 ] || [ "$time" -gt "$due_s" ]
            ;;
        *) false ;;
    esac
}
restart=
if [ "$requeue" = 1 ] && [ "$code" != 0 ] && again; then
    restart=again
    scontrol requeue "$SLURM_JOB_ID" && sleep 600
fi
# Keep the secrets only if Slurm may start the job again.
case $requeue$why$restart in
    1slurm* | 1warned* | 1preempted* | *again) ;;
    *) forget env "$fresh" "$key" "$key.pub" ;;
esac
note "end $code"
# Make Slurm's own records show a cancelled job as cancelled, not as failed.
[ "$why" != cancel ] || [ "$code" = 0 ] || scancel "$SLURM_JOB_ID"
exit "$code"
