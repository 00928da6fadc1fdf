# enter.sh ARGUMENTS: start the node half beside the entry of this node, to ask the head or to run a
# command as a rank would.
# The lines above come from cloudjob/backends/slurm/script.py; they assign these, and the command
# that starts the node half.
# shellcheck shell=sh
: "${scratch:?}" "${suffix:?}"
export CLOUDJOB_NODE_DIR="$scratch/cloudjob-$suffix/node"
exec "$@"
