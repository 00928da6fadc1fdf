"""ModelArts on this machine: API, IAM and OBS, in front of the process and docker backends.

Start in ``server.py``, which puts the parts together: ``app`` and ``routes`` answer the API over
``database``; ``proxy`` passes requests for OBS to ``seaweedfs``; ``scheduler`` and ``job_run`` run
jobs on ``nodes``; ``daemon`` starts and stops the process for the command line.
"""
