# The base with Horovod for PyTorch, built for the Open MPI of the base.
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
        build-essential cmake git libopenmpi-dev python3-dev python3-venv
COPY images/pip-install.sh images/horovod.txt images/pip.conf* images/ca.pem* /build/
RUN HOROVOD_WITH_MPI=1 HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_GLOO=1 HOROVOD_WITHOUT_TENSORFLOW=1 \
    HOROVOD_WITHOUT_MXNET=1 sh /build/pip-install.sh /build/horovod.txt

# hadolint ignore=DL3006
FROM ${BASE}
# Jobs install packages of their own.
COPY --from=packages --chown=1000:100 /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH VIRTUAL_ENV=/opt/venv
