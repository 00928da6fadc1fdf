"""Nodes as containers of one engine, Docker's or Podman's, joined by a network and by real ssh."""
