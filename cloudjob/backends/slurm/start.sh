# This script becomes the entry of a node, at the end of setup.sh, whose environment it gets.
# The lines above come from cloudjob/backends/slurm/script.py. They assign the first line of these,
# and the arguments, which are the entry's command; node.sh exports the other variables.
# shellcheck shell=sh
: "${keeps_record:?}" "${cpus_per_rank:?}" "${interpreter=}"
: "${cloudjob_here:?}" "${cloudjob_work:?}" "${cloudjob_hosts:?}" "${cloudjob_index:?}"
here=$cloudjob_here work=$cloudjob_work hosts=$cloudjob_hosts index=$cloudjob_index
unset cloudjob_here cloudjob_work cloudjob_hosts cloudjob_index
host=$SLURMD_NODENAME
# Without a program, which a PATH of slurm.setup may hide, and although bash may inherit noclobber.
true >|"$work/setup"

# slurm.setup may select another environment, by conda or a module: then its Python runs the script.
if [ -n "$interpreter" ]; then
    tools=$(command -v python; command -v mpirun)
    if [ "$tools" != "${cloudjob_tools:-}" ]; then
        # It belongs to the MPI and the Python of submit time.
        [ "${MPI4PY_LIBMPI:-}" != "${cloudjob_libmpi:-}" ] || unset MPI4PY_LIBMPI
    fi
    python=$(command -v python) || python=
    if [ -n "$python" ] && [ "$python" != "${cloudjob_tools%%
*}" ]; then
        [ "$index" != 0 ] || echo "cloudjob: slurm.setup selects $python, which runs the script" \
            "instead of $interpreter (slurm.python chooses another one)"
        interpreter=$python
    fi
    export MA_SCRIPT_INTERPRETER="$interpreter"
fi
unset cloudjob_tools cloudjob_libmpi

# mpirun and some frameworks would act on Slurm's variables about its own steps.
set -f
for word in $(export -p); do
    name=${word%%=*}
    case $name in
        SLURM_JOB_ID | SLURM_CONF | SLURM_GRES | *[!A-Z0-9_]*) ;;
        SLURM* | SBATCH* | SRUN*) unset "$name" ;;
    esac
done
set +f
[ -z "${cloudjob_gres:-}" ] || export SLURM_GRES="$cloudjob_gres"
unset cloudjob_gres
# HOME stays the user's, with caches and keys; the job's own files are below $work.
if [ ! -d "${HOME:-}" ]; then
    echo "cloudjob: $host has no home folder ${HOME:-}: HOME is an empty folder"
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
if [ "$keeps_record" = 1 ]; then
    export CLOUDJOB_RECORD_DIR="$here/record"
fi
if [ "$cpus_per_rank" != 0 ]; then
    # Older versions than 22.05 of srun take the first variable from the job.
    export SLURM_CPUS_PER_TASK="$cpus_per_rank" SRUN_CPUS_PER_TASK="$cpus_per_rank"
fi
exec "$@"
