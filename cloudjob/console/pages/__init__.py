"""The pages of the console, one module each; ``frame`` is what they share."""
