"""The way out: from a described job to one that runs on its platform.

Start with ``pipeline.py``, which stores and sends. Before that, ``preparation.py`` packs the source
and decides what the user left open, with ``launcher_choice.py`` for the launcher and ``ranks.py``
for the number of ranks; ``checks.py`` finds what would go wrong. ``preview.py`` is the dry run,
``sweep.py`` submits the jobs of a sweep, ``new_job_file.py`` writes the file of ``cloudjob init``.
"""
