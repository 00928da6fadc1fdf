"""Code that runs in the processes of ranks, and servers that ranks need.

Start with ``wrapper.py``, which launchers start for each rank.
"""
