"""Nodes as groups of processes on this machine, joined by a remote shell of our own."""
