#!/bin/sh
# The entry point of an image: finds a python3 and starts the entry beside this file.
here=$(dirname "$0")
# Most shells drop variables with names that they cannot use themselves; the entry reports them.
CLOUDJOB_LEFT_OUT=$(tr '\n\0' ' \n' 2>/dev/null </proc/$$/environ \
    | LC_ALL=C sed -n 's/=.*//; /%%$/d; /^[A-Za-z_][A-Za-z0-9_]*$/d; p' 2>/dev/null | tr '\n' ' ')
export CLOUDJOB_LEFT_OUT
for python in python3 /usr/bin/python3 /usr/local/bin/python3 /opt/conda/bin/python3 python; do
    if command -v "$python" >/dev/null 2>&1; then
        # Unpacked files start faster, unless they are of another version than the archive.
        entry=$here/jobentry
        cmp -s "$entry/jobentry.pyz" "$here/jobentry.pyz" 2>/dev/null || entry=$here/jobentry.pyz
        # -I -S: nothing of the image's own Python set-up can break the entry.
        exec "$python" -I -S "$entry" "$@"
    fi
done
echo "jobentry: looking for python3: not found in this image" >&2
echo "jobentry: hint: install Python 3.8 or later (cloudjob docs images)" >&2
exit 127
