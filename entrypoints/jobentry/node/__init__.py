"""The resources of one node: tools, network interfaces, sshd, the platform's rank table.

Start with ``prepare.py``, which prepares a node for its ranks.
"""
