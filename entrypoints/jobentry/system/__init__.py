"""Functions that the standard library lacks: Linux system calls, processes, removing deep trees.

The laptop half also imports ``trees.py``.
"""
