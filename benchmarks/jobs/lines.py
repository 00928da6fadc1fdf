"""Write the given number of lines of 100 bytes to standard output, the same ones each time."""

import os
import sys

BLOCK = 1000
PLAIN = b"%09d loss=0.693147 accuracy=0.5 " + b"." * 62 + b"\n"
# Ten lines at a time: one is indented and one is not ASCII, to detect stripping and decoding.
TEN = b"    %09d" + PLAIN[4:-5] + b"\n" + PLAIN.replace(b"..", "é".encode(), 1) + PLAIN * 8


def block(start: int) -> bytes:
    """Return the lines from number ``start`` on."""
    return (TEN * (BLOCK // 10)) % tuple(range(start, start + BLOCK))


def main() -> None:
    """Write whole blocks, so that the writer is never the slow part."""
    for start in range(0, int(sys.argv[1]), BLOCK):
        view = memoryview(block(start))
        while view:
            view = view[os.write(1, view) :]


if __name__ == "__main__":
    main()
