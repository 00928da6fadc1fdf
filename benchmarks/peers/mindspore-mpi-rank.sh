#!/bin/sh
# A rank of Open MPI's as one of MindSpore's dynamic cluster.
MS_ROLE=MS_WORKER MS_NODE_ID=$OMPI_COMM_WORLD_RANK exec "$@"
