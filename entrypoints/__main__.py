"""The programs in the zipapp: the entry of a node, the rank wrapper, and helpers of ranks.

``--unpack FOLDER`` unpacks and compiles the zipapp so that it starts faster; images do this once.
"""

import os
import sys

if sys.argv[1:2] == ["--rank"]:
    from jobentry.rank import wrapper

    sys.exit(wrapper.main(sys.argv[2:]))
elif sys.argv[1:2] == ["--script"]:
    from jobentry.rank import script_runner

    script_runner.main(sys.argv[2:])
elif sys.argv[1:2] == ["--rendezvous"]:
    from jobentry.rank import horovod_store

    sys.exit(horovod_store.main(sys.argv[2:]))
elif sys.argv[1:2] == ["--scheduler"]:
    from jobentry.rank import mindspore_scheduler

    mindspore_scheduler.schedule()
elif sys.argv[1:2] == ["--parameter-server"]:
    from jobentry.rank import mindspore_scheduler

    sys.exit(mindspore_scheduler.run_server(sys.argv[2:]))
elif sys.argv[1:2] == ["--ask"]:
    from jobentry.node import question

    sys.exit(question.main(sys.argv[2]))
elif sys.argv[1:2] == ["--enter"]:
    from jobentry.node import enter

    sys.exit(enter.main(sys.argv[2:]))
elif sys.argv[1:2] == ["--connect"]:
    from jobentry.node import tunnel

    sys.exit(tunnel.main(sys.argv[2:]))
elif sys.argv[1:2] == ["--unpack"]:
    import compileall

    from jobentry.node import archive

    try:
        archive.unpack(sys.argv[2])
    except OSError as error:
        sys.exit(f"jobentry: unpacking to {sys.argv[2]}: {error.strerror}")
    compileall.compile_dir(sys.argv[2], quiet=2)
else:
    import contextlib

    from jobentry import main

    code = main.main(sys.argv[1:])
    # For example, nothing can be done if the disk of the log is full.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # Exit at once. An interpreter that shuts down has no signal handlers left, so a SIGTERM would
    # change the exit code of a node that has ended successfully with its head.
    os._exit(code)
