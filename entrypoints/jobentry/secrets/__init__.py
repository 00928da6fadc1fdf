"""The secrets of a job on its node.

``private_environ.py`` hides them from child processes, ``masking.py`` in messages and records.
"""
