"""What one node has: its tools, its network interfaces, its sshd, the platform's rank table.

Start with ``prepare.py``, which makes a node ready for its ranks.
"""
