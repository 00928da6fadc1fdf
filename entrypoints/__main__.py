"""The programs in the zipapp: the entry of a node, the rank wrapper, and helpers of ranks.

``--unpack FOLDER`` unpacks and compiles the zipapp so that it starts faster; images do this once.
"""

import os
import sys

# The option of a program that seldom runs -> its module, and its function, which gets the words
# that follow.
PROGRAMS = {
    "--rendezvous": ("rank.horovod_store", "main"),
    "--scheduler": ("rank.mindspore_scheduler", "schedule"),
    "--parameter-server": ("rank.mindspore_scheduler", "run_server"),
    "--ask": ("node.question", "main"),
    "--enter": ("node.enter", "main"),
    "--connect": ("node.tunnel", "main"),
}

# Python adds a program that is a folder as it was named. It adds the folder of one that is a file
# by its real path, and with -I or -P not at all.
FOLDER = __file__.rpartition("/")[0]
if FOLDER not in sys.path:
    has_real_path = sys.path[:1] == [os.path.realpath(FOLDER)]
    sys.path[: int(has_real_path)] = [FOLDER]

if sys.argv[1:2] == ["--rank"]:
    from jobentry.rank import wrapper

    # At once: an interpreter that shuts down takes milliseconds, and nothing is left to write.
    os._exit(wrapper.main(sys.argv[2:]))
elif sys.argv[1:2] == ["--script"]:
    from jobentry.rank import script_runner

    script_runner.main(sys.argv[2:])
elif sys.argv[1:2] and sys.argv[1] in PROGRAMS:
    from importlib import import_module

    module, name = PROGRAMS[sys.argv[1]]
    sys.exit(getattr(import_module("jobentry." + module), name)(*sys.argv[2:]))
elif sys.argv[1:2] == ["--unpack"]:
    import compileall

    from jobentry.node import archive

    try:
        archive.unpack(sys.argv[2])
    except OSError as error:
        sys.exit(f"jobentry: unpacking to {sys.argv[2]}: {error.strerror}")
    compileall.compile_dir(sys.argv[2], quiet=2)
else:
    from jobentry import main

    main.run(sys.argv[1:])
