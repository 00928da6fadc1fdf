"""Transfers between the store and a node: code and inputs before the ranks start, outputs after.

Start with ``stage.py``; ``code_package.py`` and ``inputs.py`` fetch, ``outputs.py`` uploads.
"""
