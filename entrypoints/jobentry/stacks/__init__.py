"""Stacks of other processes, read from outside: no signal, no stop, and no code in the process.

Start with ``python_stacks``. A rank does not notice that it is read, whatever it does: compute with
the interpreter's lock held, wait in a system call, or stand still.
"""
