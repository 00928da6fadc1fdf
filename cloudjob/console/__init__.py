"""The web console: every job this machine submitted, in a browser on the same machine.

Start at ``server.serve``. ``access`` decides who may connect, ``job_list`` and ``log_table``
prepare the data in ``threads``, ``pages`` shows it with NiceGUI, and ``static`` has the script that
keeps large tables fast.
"""
