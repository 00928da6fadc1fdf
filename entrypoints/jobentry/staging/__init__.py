"""Transfers between the store and a node: code and inputs before the ranks start, outputs after.

Start with ``stage.py``; ``code_package.py`` and ``inputs.py`` fetch, ``outputs.py`` uploads, with
``output_folder.py`` (what is on this node) and ``output_store.py`` (what is in the store).
"""
