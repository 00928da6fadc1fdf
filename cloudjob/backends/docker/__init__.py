"""Nodes as containers of one engine, Docker's or Podman's, in a network of their own.

``request`` describes the containers, ``start`` creates them, ``delivery`` makes the files that are
put into them, ``logs`` reads their output, and ``state`` derives the job's status from them. Start
with ``backend.DockerBackend``.
"""
