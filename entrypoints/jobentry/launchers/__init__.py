"""How ranks start: pure functions that return commands, one module for each family of launchers.

Start with ``plan.py``, which picks the launcher of a job. ``common.py`` defines a launcher's input,
``Site``, and its result, ``Launch``.
"""
