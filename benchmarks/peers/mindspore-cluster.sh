#!/bin/sh
# MindSpore's dynamic cluster by hand, as in its documentation: a scheduler, and RANKS ranks beside
# it; with 0 the COMMAND starts them.
#
#   mindspore-cluster.sh RANKS PYTHON SCRIPT [COMMAND...]
ranks=$1 python=$2 script=$3
shift 3
GLOG_v=3 MS_ROLE=MS_SCHED "$python" "$script" >/dev/null 2>&1 &
rank=0
while [ "$rank" -lt "$ranks" ]; do
    MS_ROLE=MS_WORKER MS_NODE_ID=$rank "$python" "$script" &
    rank=$((rank + 1))
done
if [ "$#" -gt 0 ]; then
    "$@" &
fi
wait
