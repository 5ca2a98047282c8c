# OpenClaw from npm, for `cogni-gateway run`: Debian with a shell, the tools that coding agents use, and Node. Nothing in it
# listens or reports to a server. As for any image, `cogni-init` is mounted and connects it to a model.
#
#   docker build -f docker/openclaw.Dockerfile -t cogni-openclaw:dev docker/openclaw
#
# On machines that cannot pull a base image, docker/openclaw/build makes the same image from packages of Debian, PyPI and npm. It
# reads versions, packages and settings from this file and from package-lock.json.

FROM node:24.19.0-bookworm-slim AS openclaw
COPY package.json package-lock.json /opt/openclaw/
# Only OpenClaw's own install script runs; without it, OpenClaw does not start. No script of another package runs.
RUN cd /opt/openclaw && npm ci --ignore-scripts --no-audit --no-fund && npm rebuild openclaw

FROM debian:bookworm-slim
ARG PACKAGES="bash ca-certificates git jq patch procps python3-minimal ripgrep"
RUN apt-get update \
    && apt-get install -y --no-install-recommends $PACKAGES \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1001 sandboxer \
    && useradd --uid 1001 --gid 1001 --create-home --home-dir /workspace sandboxer \
    && ln -s /opt/openclaw/node_modules/openclaw/openclaw.mjs /usr/local/bin/openclaw
COPY --from=openclaw /usr/local/bin/node /usr/local/bin/node
COPY --from=openclaw /opt/openclaw/node_modules/ /opt/openclaw/node_modules/

USER 1001:1001
WORKDIR /workspace
ENV PATH=/usr/local/bin:/usr/bin:/bin HOME=/workspace
# The files are in the workspace, the only place that outlives a run. The shell's own startup files are not read.
ENV OPENCLAW_CONFIG_PATH=/workspace/.openclaw/openclaw.json OPENCLAW_STATE_DIR=/workspace/.openclaw-state OPENCLAW_LOAD_SHELL_ENV=0
CMD ["openclaw", "--help"]
