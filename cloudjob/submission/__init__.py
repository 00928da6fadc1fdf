"""Submits a job: checks, packs, uploads, and creates the job on its platform.

Start with ``pipeline.py``, which has these steps in order. ``checks.py`` reads the script, once for
all that depends on it, and finds problems that would make the job fail. ``preparation.py`` packs
the source, decides what the user left open (``launcher_choice.py`` the launcher), and makes of it
one value, ``Prepared``, with everything that is sent. ``preview.py`` is the dry run, ``sweep.py``
submits the jobs of a sweep, ``new_job_file.py`` writes the file of ``cloudjob init``.
"""
