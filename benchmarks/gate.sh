#!/usr/bin/env bash
# Keeps a container of the benchmark: gate.sh NODE. It runs each command that comes through a FIFO,
# one a line, so that all nodes begin at one moment and no figure holds the start of a container.
set -u
cd "$HOME" || exit
while read -r command <"/bench/in-$1"; do
    {
        bash -c "$command" </dev/null
        echo "bench: exit $?"
    } >"/bench/out-$1" 2>&1
done
