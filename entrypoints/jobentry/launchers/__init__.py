"""How ranks start: pure functions that return commands, one module for each family of launchers.

Start with ``plan.py``, which picks the launcher of a job. ``common.py`` has what a launcher takes,
a ``Site``, and what it returns, a ``Launch``.
"""
