"""cloudjob takes a training script to the cloud."""

__version__ = "0.1.0"
