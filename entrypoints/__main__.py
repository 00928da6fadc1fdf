"""The door of the zipapp: the entry of a node, of a rank, or of a rank's Python script."""

import sys

if sys.argv[1:2] == ["--rank"]:
    from jobentry import rank

    sys.exit(rank.main(sys.argv[2:]))
elif sys.argv[1:2] == ["--script"]:
    from jobentry import script

    script.main(sys.argv[2:])
else:
    from jobentry import main

    sys.exit(main.main(sys.argv[1:]))
