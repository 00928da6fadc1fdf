"""Head and workers: how they meet, start the ranks, watch them, and agree on how the job ended.

Start with ``head.py`` and ``worker.py``, the two roles of a node. Both run in one ``event_loop.py``
and speak over ``connection.py``; ``verdict.py`` decides which rank is to blame.
"""
