"""The commands of the command line, each with its options; ``cloudjob.cli.parser`` lists them."""
