"""Measures cloudjob beside its peers and bare Open MPI; ``benchmarks/run`` is the door."""
