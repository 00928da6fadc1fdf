"""Nodes as groups of processes on this machine: no root, no containers, no daemon.

``backend.ProcessBackend`` writes a job's request and starts ``controller``, a process that outlives
the submit and runs one ``node`` process for each node. ``running`` finds jobs whose processes were
killed. Start with ``backend.build``.
"""
