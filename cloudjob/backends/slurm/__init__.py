"""Nodes as an allocation of Slurm, joined by the job's own sshd or by Slurm's PMIx."""
