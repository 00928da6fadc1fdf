#!/bin/sh
# Runs a rank of Open MPI as a worker of MindSpore's dynamic cluster.
MS_ROLE=MS_WORKER MS_NODE_ID=$OMPI_COMM_WORLD_RANK exec "$@"
