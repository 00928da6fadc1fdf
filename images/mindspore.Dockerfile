# The base with MindSpore, and mpi4py for the Open MPI of the base.
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
COPY images/pip-install.sh images/mindspore.txt images/pip.conf* images/ca.pem* /build/
RUN sh /build/pip-install.sh /build/mindspore.txt

# hadolint ignore=DL3006
FROM ${BASE}
# MindSpore does not start without libgomp1, and pip does not bring it.
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb /var/cache/debconf/*-old \
        /var/log/apt /var/log/dpkg.log
USER 1000:100
# Jobs install packages of their own.
COPY --from=packages --chown=1000:100 /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH VIRTUAL_ENV=/opt/venv
