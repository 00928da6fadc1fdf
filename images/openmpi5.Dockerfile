# The base with Open MPI 5.0, its wheel before Debian's 4.1 on PATH, and mpi4py.
ARG BASE=cloudjob/base:latest

# What pip needs (a configuration, a CA bundle, compilers) stays in this stage, which is thrown away.
# hadolint ignore=DL3006
FROM ${BASE} AS packages
ARG STAGE=packages
LABEL cloudjob.stage=${STAGE}
# hadolint ignore=DL3002
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        python3-venv
COPY images/pip-install.sh images/openmpi5.txt images/pip.conf* images/ca.pem* /build/
RUN sh /build/pip-install.sh /build/openmpi5.txt

# hadolint ignore=DL3006
FROM ${BASE}
# Jobs install packages of their own.
COPY --from=packages --chown=1000:100 /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH VIRTUAL_ENV=/opt/venv
