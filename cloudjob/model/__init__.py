"""The values that cloudjob works with: a job as described, as submitted, and its status. No I/O.

Start with ``job``, which declares all keys of a job; ``keys`` says what a declaration has, and
``kinds`` how values are read.
"""
