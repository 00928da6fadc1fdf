export PATH=/opt/venv/bin:/usr/bin
export LANG=C.UTF-8
export cloudjob_tools="$(command -v python; command -v mpirun)" cloudjob_libmpi="${MPI4PY_LIBMPI:-}"
trap 'printf "%s\n" "$BASH_COMMAND" >|"$cloudjob_work/setup"' DEBUG
module load openmpi/4.1
export UCX_TLS=rc
trap - DEBUG
exec /bin/sh "$cloudjob_here/start.sh" </dev/null >>"$cloudjob_here/node-$cloudjob_index.log" 2>&1
