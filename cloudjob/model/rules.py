"""The rules for names and texts of a job."""

from __future__ import annotations

BACKENDS = ("process", "docker", "modelarts", "kubernetes", "slurm")
# The backends whose jobs run on other machines.
REMOTE_BACKENDS = ("modelarts", "kubernetes", "slurm")
# The number of ranks per node until the node's devices are counted.
AUTO_RANKS = 0
# The schemes of stores that have a section in the job file, and how their buckets are addressed.
STORE_SECTIONS = ("s3", "obs")
STORE_SCHEMES = ("file", *STORE_SECTIONS)
ADDRESSINGS = ("auto", "path", "virtual")
# The keys whose names become variables of every rank.
VARIABLE_FIELDS = ("env", "secrets", "inputs", "outputs")

# Linux refuses a word of argv or of the environment above MAX_ARG_STRLEN = 131072 bytes, which
# includes the terminating NUL (execve(2)); without this check, the job would fail on its node.
MAX_WORD_BYTES = 131_071
NAME_RULE = r"[A-Za-z0-9_-]{1,64}"
VARIABLE_RULE = r"[A-Za-z_][A-Za-z0-9_]*"
# ModelArts refuses user variables that begin with MA_; cloudjob uses CLOUDJOB_ to configure nodes.
RESERVED_PREFIXES = ("MA_", "CLOUDJOB_")
