#!/bin/sh
scratch=/local
suffix=2k83xnf2
set -- /opt/venv/bin/python -I -S "$PWD/jobentry.pyz" "$@"
