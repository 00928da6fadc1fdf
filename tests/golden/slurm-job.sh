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
nodes=2
retries=0
final='1 2 124'
requeue=0
warn_s=40
due_s=105
uses_ssh=1
uses_pmix=0
key=ssh-key
fresh=store-keys
unseen=cloudjob-unseen:
begin='cloudjob: an attempt begins'
