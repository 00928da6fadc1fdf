"""Head and workers: they connect, start the ranks, watch them, and agree on how the job ended.

Start with ``head.py`` and ``worker.py``, the two roles of a node. The head's work has three parts,
``bring_up.py``, ``run.py`` and ``stop.py``; ``verdict.py`` decides which rank is to blame. Both
roles run in one ``loop.py`` and communicate over ``transport.py``; ``peers.py`` is the head's view
of its workers, and ``commands.py`` starts what starts the ranks. (ADR 68)
"""
