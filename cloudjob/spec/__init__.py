"""What a job is, as one value, and everything that can be wrong with it. No I/O."""

from __future__ import annotations

from cloudjob.spec.faults import (
    check,
    faults,
    problems,
)
from cloudjob.spec.fields import (
    ADDRESSINGS,
    BACKENDS,
    FIELDS,
    FRAMEWORK_SECTIONS,
    LAUNCHER_NAMES,
    MASK,
    MAX_WORD_BYTES,
    NAME_RULE,
    NETWORK,
    RESERVED_PREFIXES,
    SECTIONS,
    SOURCE_LIMIT_MB,
    STORE_SECTIONS,
    VARIABLE_FIELDS,
    VARIABLE_RULE,
    Field,
)
from cloudjob.spec.job import (
    JobSpec,
    default_name,
    masked,
    section,
)
from cloudjob.spec.words import (
    given,
    nearest,
    number_range,
    one_line,
)

__all__ = [
    "ADDRESSINGS",
    "BACKENDS",
    "FIELDS",
    "FRAMEWORK_SECTIONS",
    "LAUNCHER_NAMES",
    "MASK",
    "MAX_WORD_BYTES",
    "NAME_RULE",
    "NETWORK",
    "RESERVED_PREFIXES",
    "SECTIONS",
    "SOURCE_LIMIT_MB",
    "STORE_SECTIONS",
    "VARIABLE_FIELDS",
    "VARIABLE_RULE",
    "Field",
    "JobSpec",
    "check",
    "default_name",
    "faults",
    "given",
    "masked",
    "nearest",
    "number_range",
    "one_line",
    "problems",
    "section",
]
