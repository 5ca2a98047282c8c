//! The environment and settings of every git call, so that nothing else can configure git.

/// The environment of every call. A call starts with an empty environment and adds these variables.
pub(super) const SAFE_ENVIRONMENT: &[(&str, &str)] = &[
    // Git finds its own helper programs through this path, and no program of a user's.
    ("PATH", "/usr/local/bin:/usr/bin:/bin"),
    ("GIT_CONFIG_NOSYSTEM", "1"),
    ("GIT_CONFIG_GLOBAL", "/dev/null"),
    ("GIT_ATTR_NOSYSTEM", "1"),
    // A replaced object would show one commit and push another.
    ("GIT_NO_REPLACE_OBJECTS", "1"),
    // A path that cannot exist. If the file exists, each git and each of its helpers prints a long hint about it.
    ("GIT_GRAFT_FILE", "/dev/null/none"),
    ("GIT_TERMINAL_PROMPT", "0"),
    ("GIT_ASKPASS", "/bin/false"),
    ("GIT_SSH_COMMAND", "/bin/false"),
    ("GIT_PROTOCOL_FROM_USER", "0"),
    ("GIT_OPTIONAL_LOCKS", "0"),
    ("GIT_LITERAL_PATHSPECS", "1"),
    ("GIT_PAGER", "cat"),
    ("GIT_ADVICE", "0"),
    // What git says is parsed.
    ("LC_ALL", "C"),
    ("TZ", "UTC"),
];

pub(super) const SAFE_SETTINGS: &[&str] = &[
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.untrackedCache=false",
    "core.attributesFile=/dev/null",
    "core.excludesFile=/dev/null",
    "core.askPass=",
    "core.pager=cat",
    "core.commitGraph=false",
    "core.multiPackIndex=false",
    // Commits are read for what they lead to. No file beside them tells it.
    "pack.useBitmaps=false",
    "pack.useBitmapBoundaryTraversal=false",
    "pack.readReverseIndex=false",
    "pack.writeReverseIndex=false",
    "repack.writeBitmaps=false",
    "gc.writeCommitGraph=false",
    "core.symlinks=false",
    "core.protectHFS=true",
    "core.protectNTFS=true",
    "credential.helper=",
    "commit.gpgSign=false",
    "tag.gpgSign=false",
    "push.gpgSign=false",
    "gc.auto=0",
    "maintenance.auto=false",
    "submodule.recurse=false",
    "fetch.recurseSubmodules=false",
    "protocol.allow=never",
    "protocol.https.allow=always",
    "protocol.http.allow=always",
    "protocol.file.allow=always",
    // A server that moves must be named anew: the token goes where it was meant for.
    "http.followRedirects=false",
    // Nor does a server name further addresses to fetch from.
    "transfer.bundleURI=false",
    "fetch.uriProtocols=",
    "promisor.acceptFromServer=None",
    "http.lowSpeedLimit=1",
    "http.lowSpeedTime=60",
    // What is large is streamed, not held; packs are looked at through small windows.
    "core.bigFileThreshold=8m",
    "core.packedGitWindowSize=32m",
    "core.packedGitLimit=256m",
    "core.deltaBaseCacheLimit=64m",
    "pack.windowMemory=64m",
    "pack.threads=1",
];
