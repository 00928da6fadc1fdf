"""An emulator of ModelArts: API, IAM and OBS, on top of the process and docker backends.

Start in ``server.py``, which creates all parts: ``app`` and ``routes`` serve the API from
``database``; ``obs`` is the object store; ``scheduler`` and ``job_run`` run
jobs on ``nodes``; ``daemon`` starts and stops the process for the command line.
"""
