"""One node: its tools, network interfaces, sshd and ranks, its journal, log and record.

Start with ``prepare.py``, which prepares a node for its ranks.
"""
