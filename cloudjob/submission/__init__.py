"""The way out: from a described job to one that runs on its platform.

Start with ``pipeline.py``, which packs, stores and sends; ``launcher_choice.py`` finds the launcher
for a script, and ``nested_launchers.py`` refuses scripts that start ranks themselves.
"""
