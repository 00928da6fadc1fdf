# The image of a node: python3, Open MPI, ssh, an init, an ordinary user, cloudjob's entry, and the
# tools that public training scripts use to fetch data and to look at the network.
#
#   cloudjob image build base                        on Debian, Open MPI 4.1
#   cloudjob image build base --base REF             on another Debian or Ubuntu, say one with CUDA
#   docker build -f images/base.Dockerfile .         by hand, in the folder of the project
#
# images/README.md says what any other image must have.
ARG BASE=debian:bookworm-slim
# hadolint ignore=DL3006
FROM ${BASE}

# hadolint ignore=DL3002
USER 0

# Host keys that the package creates would be the same for all users; each job has its own key.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates curl git iproute2 net-tools openmpi-bin openssh-client openssh-server \
        python3 python3-pip python-is-python3 tini unzip wget \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb /var/cache/debconf/*-old \
        /var/log/apt /var/log/dpkg.log /etc/ssh/ssh_host_*

# The user of ModelArts: uid 1000, gid 100. Debian's group 100 has another name, which does not matter.
RUN getent group 100 >/dev/null || groupadd --gid 100 ma-group; \
    getent passwd 1000 >/dev/null \
    || useradd --uid 1000 --gid 100 --home-dir /home/ma-user --create-home --shell /bin/bash ma-user; \
    mkdir -p /home/ma-user /home/work /cache && chown 1000:100 /home/ma-user /home/work /cache

# Where images of other generations of the platform have the code.
RUN ln -sfn modelarts/user-job-dir /home/ma-user/user-job-dir \
    && ln -sfn -t /home/work ../ma-user/modelarts ../ma-user/user-job-dir

COPY cloudjob/jobentry.pyz entrypoints/boot.sh /opt/cloudjob/
# Unpacked and compiled, so that nodes do not compile the entry when they start.
RUN rm -rf /opt/cloudjob/jobentry \
    && python3 -I -S /opt/cloudjob/jobentry.pyz --unpack /opt/cloudjob/jobentry \
    && chmod 755 /opt/cloudjob/boot.sh /opt/cloudjob/jobentry.pyz

USER 1000:100
WORKDIR /home/ma-user
# Debian's pip refuses to change the system, which here is the job's own.
ENV HOME=/home/ma-user LANG=C.UTF-8 PYTHONUNBUFFERED=1 PIP_BREAK_SYSTEM_PACKAGES=1 \
    PATH=$PATH:/home/ma-user/.local/bin

# PID 1 reaps orphans. It must send signals only to the entry, which passes them on (so no `tini -g`).
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/cloudjob/boot.sh"]
