"""The web console: every job this machine submitted, in a browser on the same machine.

Start at ``server.serve``. ``access`` decides which browsers may connect, ``job_list`` and
``log_table`` prepare the data in ``threads``, ``pages`` shows it with NiceGUI, and ``static``
contains the script that keeps large tables fast.
"""
