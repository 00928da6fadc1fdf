"""Head and workers: they connect, start the ranks, watch them, and agree on how the job ended.

Start with ``head.py`` and ``worker.py``, the two roles of a node. The head's work has three parts,
``bring_up.py``, ``run.py`` and ``stop.py``; ``verdict.py`` decides which rank is to blame. Both
roles run in one ``event_loop.py`` and communicate over ``connection.py``: the head keeps a
``worker_pool.py`` of ``remote_worker.py``.
"""
