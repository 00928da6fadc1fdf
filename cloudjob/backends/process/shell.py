"""The remote shell of emulated nodes: ``remote-shell HOST COMMAND…`` runs COMMAND on that node.

mpirun calls it as it would call ssh. It hands its own input and outputs to the keeper of the node,
which starts the command there, and ends with the command's exit code. Standard library only.
"""

from __future__ import annotations

import array
import os
import socket
import sys

DENIED = 255


def main(argv: list[str]) -> int:
    """Run a command on a node: the folder of the sockets, the node's name, and the words."""
    folder, host, *words = argv
    name = host.partition(".")[0]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The path of a socket has at most 107 bytes, so it is the bare name.
        os.chdir(folder)
        connection.connect(f"{name}.sock")
    except OSError as error:
        sys.stderr.write(f"remote-shell: connecting to {host}: {error.strerror}\n")
        return DENIED
    # As ssh does: the words are joined, and the shell of the far side reads them.
    command = os.fsencode(" ".join(words))
    descriptors = array.array("i", [0, 1, 2])
    header = len(command).to_bytes(8, "big")
    connection.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    connection.sendall(command)
    answer = connection.recv(1)
    return answer[0] if answer else DENIED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
