"""Transfers between the store and a node: code and inputs before the ranks start, outputs after.

Start with ``code_package.py`` and ``inputs.py`` for what is fetched, ``outputs.py`` for uploads.
"""
