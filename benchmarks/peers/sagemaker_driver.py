"""Run the toolkit's own entry (`train`), without its SSH daemon.

One host needs no SSH, the toolkit never ends the daemon that it starts on port 22, and a benchmark
must not open a login to the machine it runs on. Leaving it out favours the toolkit.
"""

from sagemaker_training import mpi, trainer


def main() -> None:
    """Do what the toolkit's console script does."""
    mpi._start_sshd_daemon = lambda: None
    trainer.train()


if __name__ == "__main__":
    main()
