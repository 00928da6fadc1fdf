"""Compare cloudjob with its peers and plain Open MPI; start with ``benchmarks/run``."""
