"""What comes to a node before its ranks start, and what leaves it: code, inputs, cache, outputs.

Start with ``code_package.py`` and ``inputs.py`` on the way in, ``outputs.py`` on the way out.
"""
