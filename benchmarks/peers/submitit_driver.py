"""Run a script in N local tasks of one submitit job and wait for all: FOLDER N PYTHON SCRIPT."""

import sys

import submitit


def main() -> None:
    """Submit, wait, and print the output of each task."""
    folder, count, *command = sys.argv[1:]
    executor = submitit.AutoExecutor(folder=folder, cluster="local")
    executor.update_parameters(tasks_per_node=int(count), timeout_min=5)
    run = submitit.helpers.CommandFunction(command, verbose=False)
    print("".join(executor.submit(run).results()))


if __name__ == "__main__":
    main()
