# OpenClaw as it comes from npm, for runs of `cogni-gateway run`: Debian with a shell and the tools that coding agents reach
# for, Node, and nothing that listens or phones. Its way to a model is mounted into it, as into any image.
#
#   docker build -f docker/openclaw.Dockerfile -t cogni-openclaw:dev docker/openclaw
#
# Where no base image can be pulled, docker/openclaw/build makes the same image of Debian's, PyPI's and npm's packages: it
# takes versions, packages and settings from here and from package-lock.json, so they stand nowhere else.

FROM node:24.19.0-bookworm-slim AS openclaw
COPY package.json package-lock.json /opt/openclaw/
# Of all the packages' scripts only OpenClaw's own is run; without it, it does not start.
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
# Below the workspace, which is all that can be written for longer than a run. What a shell's own files say is not asked.
ENV OPENCLAW_CONFIG_PATH=/workspace/.openclaw/openclaw.json OPENCLAW_STATE_DIR=/workspace/.openclaw-state OPENCLAW_LOAD_SHELL_ENV=0
CMD ["openclaw", "--help"]
