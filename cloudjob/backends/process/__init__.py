"""Nodes as groups of processes on this machine: no root, no containers, no daemon.

``backend.ProcessBackend`` makes a job's ``request`` and starts ``controller``, a process that
outlives the submit and runs one ``keeper`` for each node. ``state`` reads what the controller
has written; ``running`` finds jobs whose processes were killed. Start with ``request.build``.
"""

# The file in a job's folder to which the controller writes the state of the job and its nodes.
STATE = "state.json"
# The configuration of ssh on the nodes: its name in a job's folder, and its path on them.
SSH_CONFIG = "ssh_config"
SSH_CONFIG_PATH = "/etc/ssh/ssh_config"
