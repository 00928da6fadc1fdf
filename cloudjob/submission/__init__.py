"""Submits a job: from its description to a job that runs on its platform.

Start with ``pipeline.py``, which stores the package and sends the job. Before that,
``script_check.py`` reads the script, once for all that depends on it, and ``preparation.py`` packs
the source and chooses the values that the user left open, with ``launcher_choice.py`` for the
launcher and ``ranks.py`` for the number of ranks; ``checks.py`` finds problems that would make the
job fail. ``preview.py`` is the dry run, ``sweep.py`` submits the jobs of a sweep,
``new_job_file.py`` writes the file of ``cloudjob init``.
"""
