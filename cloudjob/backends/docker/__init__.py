"""Nodes as containers of one engine, Docker's or Podman's, in a network of their own.

``request`` describes the containers, ``start`` creates them, ``delivery`` is what is put into them,
``logs`` reads what they write, and ``state`` is what their end means for the job. Start with
``backend.DockerBackend``.
"""
