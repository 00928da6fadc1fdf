# The base with what examples/ needs, from Debian: numpy, scikit-learn, and mpi4py for its Open MPI.
ARG BASE=cloudjob/base:latest
# hadolint ignore=DL3006
FROM ${BASE}

USER 0
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        python3-mpi4py python3-sklearn \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb /var/cache/debconf/*-old \
        /var/log/apt /var/log/dpkg.log
USER 1000:100
