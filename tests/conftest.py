"""What all tests share: hypothesis judges what it finds, and not how fast this machine is."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# On two cores that others use, too, drawing a value may take seconds.
settings.register_profile("cloudjob", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("cloudjob")
