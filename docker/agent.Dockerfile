# The example agent of compose.yaml: a shell and curl. As for any image, `cogni-init` is mounted and connects it to the run's
# socket.
FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates curl \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1001 sandboxer \
    && useradd --uid 1001 --gid 1001 --create-home --home-dir /workspace sandboxer
USER 1001:1001
WORKDIR /workspace
