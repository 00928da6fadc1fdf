# ask.sh REQUEST: ask the head, which runs on this node, and print its answer.
# The lines above come from cloudjob/backends/slurm/script.py; they assign these, and the arguments,
# which are the command that asks.
# shellcheck shell=sh
: "${scratch:?}" "${suffix:?}"
export CLOUDJOB_NODE_DIR="$scratch/cloudjob-$suffix/node"
exec "$@"
