"""The doors of the zipapp: the entry of a node, of a rank and its script, of what serves ranks.

``--compile TARGET.pyc`` writes the bytecode, which starts faster; an image does it once.
"""

import sys

if sys.argv[1:2] == ["--rank"]:
    from jobentry import rank

    sys.exit(rank.main(sys.argv[2:]))
elif sys.argv[1:2] == ["--script"]:
    from jobentry import script

    script.main(sys.argv[2:])
elif sys.argv[1:2] == ["--rendezvous"]:
    from jobentry import rendezvous

    sys.exit(rendezvous.main(sys.argv[2:]))
elif sys.argv[1:2] == ["--scheduler"]:
    from jobentry import cluster

    cluster.schedule()
elif sys.argv[1:2] == ["--elastic"]:
    from jobentry import elastic

    sys.exit(elastic.main(sys.argv[2]))
elif sys.argv[1:2] == ["--compile"]:
    from jobentry import bytecode

    try:
        bytecode.write(sys.argv[2])
    except OSError as error:
        sys.exit(f"jobentry: writing {sys.argv[2]}: {error.strerror}")
else:
    from jobentry import main

    sys.exit(main.main(sys.argv[1:]))
