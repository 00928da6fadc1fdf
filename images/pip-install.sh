#!/bin/sh
# Makes /opt/venv and installs the requirements of a file into it; a stage of the build runs it.
# A pip configuration and a CA bundle are used where the build brought them; nothing of them stays.
set -eu
cd "$(dirname "$0")"
[ ! -f pip.conf ] || export PIP_CONFIG_FILE="$PWD/pip.conf"
[ ! -f ca.pem ] || export PIP_CERT="$PWD/ca.pem"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
python3 -m venv /opt/venv
# A line `# then` parts what must be there before the rest is built.
rest=$1
if grep -qx '# then' "$1"; then
    sed '/^# then$/,$d' "$1" >first.txt
    sed '1,/^# then$/d' "$1" >second.txt
    /opt/venv/bin/pip install -r first.txt
    set -- "$@" --no-build-isolation
    rest=second.txt
fi
shift
/opt/venv/bin/pip install "$@" -r "$rest"
