"""The way out: from a described job to one that runs on its platform.

Start with ``pipeline.py``, which packs, stores and sends; ``launcher_choice.py`` finds the launcher
for a script, ``ranks.py`` the number of ranks, and ``nested_launchers.py`` the scripts that start
ranks themselves. ``new_job_file.py`` writes the file of ``cloudjob init``.
"""
