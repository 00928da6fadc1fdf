"""The pages of the console, one module each; ``frame`` contains their common parts."""
