"""What the standard library lacks: system calls of Linux, processes, removal of deep trees.

The laptop half, too, imports ``trees.py``.
"""
