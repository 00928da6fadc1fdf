"""Nodes as containers of one engine.

``backend.DockerBackend`` follows, ends and removes jobs; ``request`` describes their containers and
``start`` creates them; ``logs`` and ``state`` read what the engine knows. Start with
``request.build``.
"""
