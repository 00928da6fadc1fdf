"""What names and texts of a job may be."""

from __future__ import annotations

BACKENDS = ("process", "docker", "modelarts", "kubernetes", "slurm")
# Those whose jobs do not run on this machine.
REMOTE_BACKENDS = ("modelarts", "kubernetes", "slurm")
# How many ranks a node has while nobody has counted its devices.
AUTO_RANKS = 0
# The schemes of stores that have a section in the job file, and how their buckets are addressed.
STORE_SECTIONS = ("s3", "obs")
STORE_SCHEMES = ("file", *STORE_SECTIONS)
ADDRESSINGS = ("auto", "path", "virtual")
# The keys whose names become variables of every rank.
VARIABLE_FIELDS = ("env", "secrets", "inputs", "outputs")

# Linux refuses a word of argv or of the environment above MAX_ARG_STRLEN = 131072 bytes, which
# includes the terminating NUL (execve(2)); the job would only find out on its node.
MAX_WORD_BYTES = 131_071
NAME_RULE = r"[A-Za-z0-9_-]{1,64}"
VARIABLE_RULE = r"[A-Za-z_][A-Za-z0-9_]*"
# ModelArts refuses user variables that begin with MA_; CLOUDJOB_ is how our two halves speak.
RESERVED_PREFIXES = ("MA_", "CLOUDJOB_")
