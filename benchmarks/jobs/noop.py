"""Says that it ran, and nothing else: what is left is the cost of what starts it."""

print("noop ran")
