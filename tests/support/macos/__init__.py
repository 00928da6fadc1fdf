"""macOS, as far as Linux can show it."""
