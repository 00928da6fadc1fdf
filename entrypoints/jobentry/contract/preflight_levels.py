"""How much the nodes check before the ranks start, as the key ``preflight`` of a job file says."""

from __future__ import annotations

QUICK, FULL, OFF = "quick", "full", "off"
LEVELS = (QUICK, FULL, OFF)
