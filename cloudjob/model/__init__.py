"""The values that cloudjob passes on: a job as described, as submitted, and its status. No I/O.

``job`` is where to start: a job with all its keys. Importing ``job``, ``sections``, ``types`` or
``validation`` imports pydantic; commands that read no job file avoid that.
"""
