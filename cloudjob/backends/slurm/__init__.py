"""Nodes as an allocation of Slurm, from a login node or over ssh.

``request`` decides what a job needs, ``script`` writes the two shell scripts that run it, and
``state`` reads what they and Slurm's commands report. ``cluster.SlurmHost`` runs those commands.
Start with ``backend.SlurmBackend``.
"""
