"""Nodes as groups of processes on this machine."""
