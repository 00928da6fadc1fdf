"""Prints that it ran and does nothing else, so that only the cost of the launcher is measured."""

print("noop ran")
