#!/usr/bin/env bash
# Keeps a container of the benchmark running: gate.sh NODE. It runs each line of a FIFO as a command,
# so that all nodes start at the same time and no result includes the start of a container.
set -u
cd "$HOME" || exit
while read -r command <"/bench/in-$1"; do
    {
        bash -c "$command" </dev/null
        echo "bench: exit $?"
    } >"/bench/out-$1" 2>&1
done
