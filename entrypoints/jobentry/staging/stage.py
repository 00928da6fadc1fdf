"""Fetch the code and the inputs of a node, and prepare its outputs."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.node.prepare import code_folder

if TYPE_CHECKING:
    from jobentry.node.journal import Journal
    from jobentry.staging.outputs import Outputs


def stage(
    node: NodeEnv, node_paths: NodePaths, journal: Journal, script: str
) -> tuple[str, Outputs | None]:
    """Fetch code and inputs, prepare the outputs; return the code folder and the outputs.

    Raises:
        EntryError: Code or an input cannot be fetched, or an output cannot be stored.
    """
    folder = code_folder(node, node_paths, script)
    # Imported only when needed: without cached bytecode they take a tenth of a second.
    if node.code_uri:
        from jobentry.staging import code_package

        if not node.code_uri.startswith("file:"):
            time.sleep(code_package.turn_s(node.node, node.nodes))
        with journal.during("package") as transfer:
            code_package.fetch_code(node.code_uri, node.code_digest, folder, progress=transfer.add)
    if node.inputs_here:
        from jobentry.staging import inputs

        inputs.stage(node, node_paths, os.environ, journal)
    if not node.outputs:
        return folder, None
    from jobentry.staging import outputs

    node_outputs = outputs.Outputs(node, node_paths, journal)
    with journal.during("prepare outputs"):
        node_outputs.prepare()
    return folder, node_outputs
