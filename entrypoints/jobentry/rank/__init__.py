"""What runs as, or for, a single rank, in processes of its own.

Start with ``wrapper.py``: each rank begins there, with its exact environment.
"""
