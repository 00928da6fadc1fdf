"""Nodes as containers of one engine, Docker's or Podman's, in a network of their own.

``request`` describes the containers, ``delivery`` what is put into them, ``state`` what their end
means for the job, and ``logs`` reads what they write. Start with ``backend.DockerBackend``.
"""
