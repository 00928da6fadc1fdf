"""The node half of cloudjob: reads its environment, makes a plan, runs it and writes a record.

It uses only the standard library and runs on Python 3.8, as it must run in any image. Start with
``main.py``.
"""
