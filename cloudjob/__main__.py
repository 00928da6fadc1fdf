"""The command line as a module: ``python -m cloudjob``."""

import sys

from cloudjob.cli import main

sys.exit(main())
