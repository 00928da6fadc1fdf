#!/bin/sh
# The door of an image: finds a python3 and hands over to the entry beside this file.
here=$(dirname "$0")
for python in python3 /usr/bin/python3 /usr/local/bin/python3 /opt/conda/bin/python3 python; do
    if command -v "$python" >/dev/null 2>&1; then
        # Bytecode starts faster, and is for one Python.
        program=$(readlink -f "$(command -v "$python")" 2>/dev/null)
        entry=$here/jobentry-${program##*/}.pyc
        [ -r "$entry" ] || entry=$here/jobentry.pyz
        # -I -S: nothing of the image's own Python set-up can break the entry.
        exec "$python" -I -S "$entry" "$@"
    fi
done
echo "jobentry: looking for python3: there is none in this image" >&2
echo "jobentry: hint: install Python 3.8 or later (images/README.md)" >&2
exit 127
