"""The values that cloudjob works with: a job as described, as submitted, and its status. No I/O.

Start with ``job``, which defines a job with all its keys. Importing ``job``, ``sections``,
``types`` or ``validation`` imports pydantic; commands that read no job file avoid that.
"""
