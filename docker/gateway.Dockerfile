# The gateway's image: one static binary and the certificate authorities. No shell, no libc, no root.
#
#   docker build -f docker/gateway.Dockerfile -t cogni-gateway:dev .
#
# Where no base image can be pulled, docker/build makes the same image with the host's own cargo: it takes this
# file from `FROM scratch` down, so what the image is stands here and nowhere else.

FROM rust:1-bookworm AS build
WORKDIR /source
COPY . .
RUN docker/rootfs /rootfs

FROM scratch
COPY --from=build /rootfs/ /

# A fresh named volume takes owner and content of the directory it is mounted on, and takes them again from every
# further container while it is empty. So the socket's directory belongs to the sandbox's uid, which lets the proxy
# bind there without being root and makes the socket the agent's own at mode 0600; and it holds a file, so that an
# agent's image with a root-owned /llm-sock does not take the volume away again before the socket is bound.
COPY --chown=1001:1001 docker/llm-sock/ /llm-sock/
COPY --chown=1001:1001 docker/llm-sock/ /var/log/cogni/
USER 1001:1001
# As a drop-in it has no audit log unless AUDIT_LOG_PATH names one, such as /var/log/cogni/audit.jsonl in a volume; then
# its budgets outlast a restart, too.
ENV ALLOW_BUDGET_RESET=true

ENTRYPOINT ["/cogni-gateway"]
CMD ["proxy"]
# Seldom, as an engine starts a process in the container for each check, and a machine may have fifty of these. It finds the
# socket by SOCKET_PATH. A container that serves no socket is started with --no-healthcheck.
HEALTHCHECK --interval=60s --timeout=6s --start-period=10s CMD ["/cogni-gateway", "health"]
