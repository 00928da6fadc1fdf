"""Prints that it ran, once an elastic job of Horovod has started."""

from typing import Any

import horovod.torch as hvd


@hvd.elastic.run  # type: ignore[untyped-decorator]
def train(state: Any) -> None:
    """Print that it ran."""
    state.commit()
    print("noop ran")


hvd.init()
train(hvd.elastic.TorchState(step=0))
