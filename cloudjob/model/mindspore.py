"""The values of the keys of MindSpore, as its documents name them."""

from __future__ import annotations

# Left to the script.
NONE = "none"
DEVICE_TARGETS = (NONE, "CPU", "GPU", "Ascend")
PARALLEL_MODES = (
    NONE, "stand_alone", "data_parallel", "semi_auto_parallel", "auto_parallel", "hybrid_parallel",
)  # fmt: skip
SEARCH_MODES = (NONE, "dynamic_programming", "recursive_programming", "sharding_propagation")
