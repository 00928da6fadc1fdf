"""What a job is, as one value, and everything that can be wrong with it. No I/O."""

from __future__ import annotations

from cloudjob.spec.job import (
    BACKENDS,
    OPTIONS,
    SECTIONS,
    VARIABLE_FIELDS,
    JobSpec,
    default_name,
    masked,
    section,
)
from cloudjob.spec.sections import ADDRESSINGS, STORE_SECTIONS
from cloudjob.spec.text import MASK, given, nearest, one_line
from cloudjob.spec.types import MAX_WORD_BYTES, NAME_RULE, VARIABLE_RULE, Option, is_map, is_tree
from cloudjob.spec.validation import (
    Location,
    check,
    conflicts,
    dotted,
    valid_part,
    validate,
)

__all__ = [
    "ADDRESSINGS",
    "BACKENDS",
    "MASK",
    "MAX_WORD_BYTES",
    "NAME_RULE",
    "OPTIONS",
    "SECTIONS",
    "STORE_SECTIONS",
    "VARIABLE_FIELDS",
    "VARIABLE_RULE",
    "JobSpec",
    "Location",
    "Option",
    "check",
    "conflicts",
    "default_name",
    "dotted",
    "given",
    "is_map",
    "is_tree",
    "masked",
    "nearest",
    "one_line",
    "section",
    "valid_part",
    "validate",
]
