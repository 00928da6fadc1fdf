"""How ranks start: one module a launcher, each a pure function from values to a command."""
