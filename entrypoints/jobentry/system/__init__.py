"""What Python's standard library lacks: system calls of Linux, and the processes in ``/proc``."""
