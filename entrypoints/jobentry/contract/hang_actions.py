"""What to do with a job that hangs, as the key ``hang.action`` of its job file says."""

from __future__ import annotations

# Report it; also end the job, if it is certain that it hangs; or do not look for hangs at all.
WARN, STOP, OFF = "warn", "stop", "off"
ACTIONS = (WARN, STOP, OFF)
