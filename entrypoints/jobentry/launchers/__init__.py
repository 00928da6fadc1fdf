"""How ranks start: one module for each family of launchers, of pure functions that return commands.

Start with ``common.py``: ``Site`` is what they take, ``Launch`` what they return.
"""
