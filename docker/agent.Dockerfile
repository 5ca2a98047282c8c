# The example agent of compose.yaml: a shell, curl, and the socat that makes the run's socket a local port.
FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates curl socat \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1001 sandboxer \
    && useradd --uid 1001 --gid 1001 --create-home --home-dir /workspace sandboxer
USER 1001:1001
WORKDIR /workspace
