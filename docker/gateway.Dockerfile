# The gateway's image: one static binary and the CA certificates. It has no shell, no libc and no root user.
#
#   docker build -f docker/gateway.Dockerfile -t cogni-gateway:dev .
#
# On machines that cannot pull a base image, docker/build makes the same image with the host's own cargo. It uses this file from
# `FROM scratch` on, so the image is described only here.

FROM rust:1-bookworm AS build
WORKDIR /source
COPY . .
RUN docker/rootfs /rootfs

FROM scratch
COPY --from=build /rootfs/ /

# A new named volume gets the owner and content of the directory that it is mounted on, and gets them again from every further
# container while it is empty. Therefore the socket's directory belongs to the sandbox's uid: the proxy can bind there without
# root, and the socket belongs to the agent with mode 0600. The directory also holds a file, so that an agent's image with a
# root-owned /llm-sock does not change the volume's owner before the socket is bound.
COPY --chown=1001:1001 docker/llm-sock/ /llm-sock/
COPY --chown=1001:1001 docker/llm-sock/ /var/log/cogni/
USER 1001:1001
# As a replacement for nginx the gateway has no audit log unless AUDIT_LOG_PATH names one, such as /var/log/cogni/audit.jsonl in a
# volume. With an audit log, budgets also survive a restart.
ENV ALLOW_BUDGET_RESET=true

ENTRYPOINT ["/cogni-gateway"]
CMD ["proxy"]
# The interval is long because an engine starts a process in the container for each check, and a machine may have fifty
# containers. The check finds the socket by SOCKET_PATH. Start a container that serves no socket with --no-healthcheck.
HEALTHCHECK --interval=60s --timeout=6s --start-period=10s CMD ["/cogni-gateway", "health"]
