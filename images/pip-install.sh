#!/bin/sh
# Creates /opt/venv and installs the requirements in a file; run by a stage of the build. Uses the pip
# configuration and CA bundle of the build, if any; neither stays in the image.
set -eu
cd "$(dirname "$0")"
[ ! -f pip.conf ] || export PIP_CONFIG_FILE="$PWD/pip.conf"
[ ! -f ca.pem ] || export PIP_CERT="$PWD/ca.pem"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
python3 -m venv /opt/venv
# A line `# then` separates the requirements that must be installed before the rest is built.
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
