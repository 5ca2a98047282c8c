//! The probe of this machine: the restrictions that the machine can enforce, those that are missing, and the remedies.
//!
//! [`machine`] and [`engine`] collect [`HostFacts`]. [`DoctorReport::from_facts`] evaluates the facts, and reads
//! nothing itself.

pub mod engine;
mod landlock;
pub mod machine;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::InitBinary;

/// The facts about this machine. A fact that could not be determined is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFacts {
    pub kernel: String,
    pub is_root: bool,
    pub cgroups: CgroupSupport,
    /// The number of user namespaces that a user may have.
    pub user_namespaces: u64,
    /// True if the kernel supports filters of system calls.
    pub has_seccomp: bool,
    /// The version of Landlock; `None` if the kernel has no Landlock.
    pub landlock: Option<u32>,
    pub docker: EngineProbe,
    /// The path of a Podman socket, if there is one.
    pub podman: Option<PathBuf>,
    pub git: Option<String>,
    /// The first process of sandboxes.
    pub init: InitBinary,
    pub run_dir: PathBuf,
    /// The number of inotify instances that a user may have; each sandbox has its own user.
    pub inotify_instances: Option<u64>,
    /// The kernel's other limits for a user, by name. A limit that the kernel does not have is left out.
    pub user_limits: BTreeMap<&'static str, u64>,
    /// The kernel's pattern for core dumps, which states where the memory of a crashed program goes (core(5)).
    pub core_pattern: Option<String>,
    /// True if cgroups have a separate limit for the buffers of sockets.
    pub limits_sockets: bool,
    /// The free bytes at the directory of runs.
    pub free: Option<u64>,
}

/// The cgroups of this machine, which limit processes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CgroupSupport {
    /// The version, 1 or 2; 0 if no cgroups are mounted.
    pub version: u8,
    pub controllers: BTreeSet<String>,
}

/// The state of a container engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum EngineProbe {
    #[default]
    Absent,
    /// The engine's socket exists, but the engine does not answer; the text is the error.
    Unresponsive(String),
    Answers(EngineInfo),
}

/// The facts that an engine reports about itself.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineInfo {
    pub version: String,
    pub api: String,
    /// The name and the version of the engine's runtime.
    pub runtime: Option<(String, String)>,
    pub has_runsc: bool,
    pub has_seccomp: bool,
    pub has_userns_remap: bool,
    /// True if the engine itself runs in a user namespace, without root.
    pub is_rootless: bool,
    /// True if sandboxes share the machine's cgroup namespace, whatever is requested.
    pub shares_cgroup_namespace: bool,
    /// The limits that the engine cannot set, from `memory`, `swap`, `pids` and `cpu`.
    pub no_limits: Vec<&'static str>,
}

/// The evaluated facts, as `cogni-gateway doctor` prints them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DoctorReport {
    /// True if at least one driver can enforce everything, and no finding that was added later is missing.
    pub ok: bool,
    pub drivers: DriverSupport,
    pub findings: Vec<DoctorFinding>,
}

/// The drivers that can enforce everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DriverSupport {
    pub docker: bool,
    pub embedded: bool,
}

/// One examined feature and its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DoctorFinding {
    pub name: &'static str,
    pub level: FindingLevel,
    pub found: String,
    /// The remedy, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<&'static str>,
}

/// The level of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingLevel {
    Ok,
    /// The feature works, and could be safer.
    Warn,
    /// The feature is missing.
    Missing,
}

impl DoctorReport {
    /// Evaluates the facts.
    pub fn from_facts(facts: &HostFacts) -> Self {
        let mut findings = machine_findings(facts);
        let embedded = embedded_finding(facts);
        let docker = docker_finding(facts);
        // A driver that works without limits has a warning, and does not enforce everything.
        let is_ok = |finding: &DoctorFinding| finding.level == FindingLevel::Ok;
        let drivers = DriverSupport { docker: is_ok(&docker), embedded: is_ok(&embedded) };
        findings.extend([embedded, docker]);
        if let EngineProbe::Answers(answers) = &facts.docker {
            findings.extend(engine_findings(answers));
        }
        findings.extend(tool_findings(facts));
        Self { ok: drivers.docker || drivers.embedded, drivers, findings }
    }
}

impl DoctorReport {
    /// Adds findings from elsewhere; a missing feature among them makes the report fail.
    pub fn add(&mut self, findings: Vec<DoctorFinding>) {
        self.ok &= findings.iter().all(|finding| finding.level != FindingLevel::Missing);
        self.findings.extend(findings);
    }
}

fn machine_findings(facts: &HostFacts) -> Vec<DoctorFinding> {
    let CgroupSupport { version, controllers } = &facts.cgroups;
    let cgroups = match version {
        0 => missing_finding(
            "cgroups",
            "none are mounted",
            "mount them: an init system does, or cgroupfs-mount",
        ),
        _ => ok_finding("cgroups", format!("version {version}: {}", join_names(controllers))),
    };
    // Root makes its sandboxes without user namespaces, so their absence is only a warning.
    let namespaces = match facts.user_namespaces {
        0 => warn_finding(
            "user namespaces",
            "no user may have any",
            "only root can use the driver `embedded` here; `sysctl user.max_user_namespaces=10000` lets other users",
        ),
        count => ok_finding("user namespaces", format!("{count} for a user")),
    };
    let seccomp = if facts.has_seccomp {
        ok_finding("seccomp", "the kernel takes filters of system calls")
    } else {
        missing_finding(
            "seccomp",
            "the kernel takes no filters",
            "use a kernel with CONFIG_SECCOMP_FILTER",
        )
    };
    // Version 6 added the scope of signals, and version 2 the right to move files between directories (landlock(7)).
    let landlock = match facts.landlock {
        Some(version @ 6..) => ok_finding(
            "landlock",
            format!("version {version}: keeps agents to their files and signals"),
        ),
        Some(version @ 2..) => {
            ok_finding("landlock", format!("version {version}: keeps agents to their files"))
        }
        Some(version) => warn_finding(
            "landlock",
            format!("version {version}, which is not used: it would keep agents from moving files"),
            "a kernel of 5.19 or newer keeps agents to their files twice; without it, mounts and modes do",
        ),
        None => warn_finding(
            "landlock",
            "the kernel has none",
            "a kernel of 5.19 or newer with `lsm=landlock,…` keeps agents to their files twice; without it, mounts and modes do",
        ),
    };
    let all =
        vec![ok_finding("kernel", facts.kernel.as_str()), cgroups, namespaces, seccomp, landlock];
    let all = all.into_iter().chain(socket_memory_finding(facts));
    let of_a_user =
        facts.inotify_instances.map(inotify_finding).into_iter().chain(user_limits_finding(facts));
    let core = facts.core_pattern.as_deref().map(core_dump_finding);
    all.chain(of_a_user).chain(core).collect()
}

/// Returns a finding for cgroup v1 only; with version 2 the buffers of sockets count as memory.
fn socket_memory_finding(facts: &HostFacts) -> Option<DoctorFinding> {
    let found = match (facts.cgroups.version, facts.limits_sockets) {
        (1, true) => {
            "the driver `embedded` sets a second limit of the same size for them, the driver `docker` sets none"
        }
        (1, false) => {
            "a sandbox has no limit for them except the machine's, `net.ipv4.tcp_mem` and `net.ipv4.udp_mem`"
        }
        _ => return None,
    };
    Some(warn_finding("buffers of sockets", found, "use cgroup v2, where they count as memory"))
}

fn inotify_finding(instances: u64) -> DoctorFinding {
    let found = format!("{instances} instances for a sandbox");
    if instances < MIN_INOTIFY_INSTANCES {
        warn_finding(
            "inotify",
            found,
            "`sysctl fs.inotify.max_user_instances=8192`: agents that watch files need some; with one user for all sandboxes, one of them may take all",
        )
    } else {
        ok_finding("inotify", found)
    }
}

/// Returns the finding on the limits of a user; `None` if the kernel states no limits.
fn user_limits_finding(facts: &HostFacts) -> Option<DoctorFinding> {
    const NAME: &str = "limits of a user";
    // A limit is low if it is below the minimum of its name.
    let least = |name: &str| {
        MIN_USER_LIMITS.iter().find(|(known, _)| *known == name).map(|(_, least)| *least)
    };
    let limits = facts.user_limits.iter();
    let low = limits.filter_map(|(name, found)| {
        least(name).filter(|least| found < least).map(|least| (name, found, least))
    });
    let low: Vec<_> =
        low.map(|(name, found, least)| format!("{name} is {found}, below {least}")).collect();
    if facts.user_limits.is_empty() {
        None
    } else if low.is_empty() {
        Some(ok_finding(NAME, "enough for a sandbox"))
    } else {
        Some(warn_finding(
            NAME,
            join_names(low),
            "raise them with `sysctl`, and processes with `ulimit -u` or `LimitNPROC=`: a sandbox may not start, or its programs fail",
        ))
    }
}

/// Returns the finding on core dumps. A limit of zero bytes does not keep the kernel from piping the memory to a
/// program.
fn core_dump_finding(pattern: &str) -> DoctorFinding {
    const NAME: &str = "core dumps";
    match pattern.strip_prefix('|') {
        None => ok_finding(NAME, "files, of which a sandbox writes none"),
        Some(program) => warn_finding(
            NAME,
            format!("are piped to `{}`", program.trim()),
            "`sysctl kernel.core_pattern=core`: the kernel starts that program as root for each crash in a sandbox, outside of its limits, and it reads what the sandbox chose",
        ),
    }
}

/// Returns the finding on the embedded driver, which needs no other software.
fn embedded_finding(facts: &HostFacts) -> DoctorFinding {
    const NAME: &str = "driver embedded";
    let lacking: Vec<_> = REQUIRED_CONTROLLERS
        .into_iter()
        .filter(|name| !facts.cgroups.controllers.contains(*name))
        .collect();
    // The finding names only the first condition that is not met.
    if !facts.has_seccomp {
        missing_finding(
            NAME,
            "there is no filter of system calls",
            "use a kernel with CONFIG_SECCOMP_FILTER",
        )
    } else if !facts.is_root && facts.user_namespaces == 0 {
        missing_finding(
            NAME,
            "this process does not run as root, and no user may have a user namespace",
            "run it as root, or use Docker",
        )
    } else if !facts.is_root {
        warn_finding(
            NAME,
            "works without limits only: this process does not run as root",
            "run it as root, or use Docker, or run without limits with `--allow-unlimited`",
        )
    } else if !lacking.is_empty() {
        warn_finding(
            NAME,
            format!("works without limits only: there are none on {}", join_names(&lacking)),
            "mount the cgroup controllers, or run without limits with `--allow-unlimited`",
        )
    } else {
        ok_finding(NAME, "enforces everything")
    }
}

fn docker_finding(facts: &HostFacts) -> DoctorFinding {
    const NAME: &str = "driver docker";
    match &facts.docker {
        EngineProbe::Absent => missing_finding(
            NAME,
            "there is no engine",
            "install Docker Engine, or name its socket with `--docker-socket`",
        ),
        EngineProbe::Unresponsive(error) => missing_finding(
            NAME,
            format!("the engine does not answer: {error}"),
            "start it, or look into its log",
        ),
        EngineProbe::Answers(answers) if !answers.has_seccomp => missing_finding(
            NAME,
            "the engine sets no filter of system calls",
            "use a kernel with CONFIG_SECCOMP_FILTER",
        ),
        // Without one of its limits, the driver cannot enforce what a run's limits promise.
        EngineProbe::Answers(EngineInfo { no_limits, .. }) if !no_limits.is_empty() => {
            missing_finding(
                NAME,
                format!("the engine sets no limits on {}", join_names(no_limits)),
                "let the kernel have the cgroup controllers; for swap, boot with `swapaccount=1`",
            )
        }
        EngineProbe::Answers(answers) if answers.shares_cgroup_namespace => missing_finding(
            NAME,
            "the engine is Podman without cgroup v2, and gives sandboxes the machine's cgroup namespace",
            "boot this machine with cgroup v2, or use Docker Engine",
        ),
        EngineProbe::Answers(EngineInfo { version, api, .. }) => {
            ok_finding(NAME, format!("enforces everything, with engine {version}, API {api}"))
        }
    }
}

fn engine_findings(answers: &EngineInfo) -> Vec<DoctorFinding> {
    let runtime = answers.runtime.as_ref().map(|(name, version)| {
        let found = format!("{name} {version}");
        if name == "runc" && is_old_runc(version) {
            warn_finding("container runtime", found, "CVE-2025-31133, CVE-2025-52565 and CVE-2025-52881 lead out of it: use runc 1.2.8, 1.3.3 or newer, or a version that your distribution has fixed")
        } else {
            ok_finding("container runtime", found)
        }
    });
    let userns = answers.has_userns_remap.then(|| {
        warn_finding(
            "userns-remap",
            "on",
            "a sandbox's user has another number outside of the engine's user namespace, and cannot open the run's socket; use an engine without it",
        )
    });
    let rootless = answers.is_rootless.then(|| {
        warn_finding(
            "rootless engine",
            "the engine runs without root",
            "a sandbox's user has another number outside of the engine's user namespace, and cannot open the run's socket; use an engine that runs as root",
        )
    });
    let runsc = if answers.has_runsc {
        ok_finding("runsc", "installed; used if it is the engine's default runtime")
    } else {
        warn_finding("runsc", "not there", "optional: gVisor keeps agents away from the kernel")
    };
    runtime.into_iter().chain(userns).chain(rootless).chain([runsc]).collect()
}

fn tool_findings(facts: &HostFacts) -> Vec<DoctorFinding> {
    let podman = facts.podman.as_deref().map(|socket| match facts.cgroups.version {
        2 => ok_finding(
            "podman",
            format!("answers at {}; name it with `--docker-socket`", socket.display()),
        ),
        _ => warn_finding(
            "podman",
            format!("answers at {}, and is not used without cgroup v2", socket.display()),
            "boot this machine with cgroup v2: without it, Podman gives sandboxes the machine's cgroup namespace",
        ),
    });
    let init = match &facts.init {
        InitBinary::Configured(path) => ok_finding("cogni-init", path.display().to_string()),
        InitBinary::BuiltIn { directory } => ok_finding(
            "cogni-init",
            format!("built in; sandboxes get it from {}", directory.display()),
        ),
        InitBinary::None => warn_finding("cogni-init", "none", "images need a bridge of their own"),
    };
    let git = match facts.git.as_deref() {
        None => missing_finding("git", "not there", "the relay needs 2.39 or newer; install it"),
        Some(version) if parse_version(version) < Some(MIN_GIT_VERSION) => {
            missing_finding("git", version, "the relay needs 2.39 or newer; install it")
        }
        Some(version) => ok_finding("git", version),
    };
    let space = facts.free.map(|free| {
        let found = format!("{} MiB free at {}", free >> 20, facts.run_dir.display());
        if free < MIN_FREE_BYTES {
            warn_finding(
                "space",
                found,
                "workspaces of agents are there; make room, or choose another with `--run-dir`",
            )
        } else {
            ok_finding("space", found)
        }
    });
    podman.into_iter().chain([init, git]).chain(space).collect()
}

/// Returns true if this version of runc has the known escapes, which 1.2.8 and 1.3.3 fix.
fn is_old_runc(version: &str) -> bool {
    // 1.3 has its own fixed version; every other version is compared with 1.2.8, so 1.4 and newer count as fixed.
    match parse_version(version) {
        Some([1, 3, patch]) => patch < 3,
        Some(version) => version < [1, 2, 8],
        None => false,
    }
}

/// Parses the leading version number: `1.1.5+ds1` is 1.1.5.
fn parse_version(version: &str) -> Option<[u32; 3]> {
    let end = version.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(version.len());
    let mut parts = version[..end].split('.').map(|part| part.parse().ok());
    Some([parts.next()??, parts.next()??, parts.next().flatten().unwrap_or(0)])
}

fn join_names(names: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    let names: Vec<_> = names.into_iter().map(|name| name.as_ref().to_owned()).collect();
    names.join(", ")
}

pub fn ok_finding(name: &'static str, found: impl Into<String>) -> DoctorFinding {
    DoctorFinding { name, level: FindingLevel::Ok, found: found.into(), remedy: None }
}

pub fn warn_finding(
    name: &'static str,
    found: impl Into<String>,
    remedy: &'static str,
) -> DoctorFinding {
    DoctorFinding { name, level: FindingLevel::Warn, found: found.into(), remedy: Some(remedy) }
}

pub fn missing_finding(
    name: &'static str,
    found: impl Into<String>,
    remedy: &'static str,
) -> DoctorFinding {
    DoctorFinding { name, level: FindingLevel::Missing, found: found.into(), remedy: Some(remedy) }
}

impl fmt::Display for FindingLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Missing => "missing",
        })
    }
}

/// The cgroup controllers that a sandbox's limits need.
const REQUIRED_CONTROLLERS: [&str; 3] = ["cpu", "memory", "pids"];

/// The minimum version of git. Older versions have security holes whose fixes the relay relies on.
const MIN_GIT_VERSION: [u32; 3] = [2, 39, 0];

/// The minimum of inotify instances: the kernel's default.
const MIN_INOTIFY_INSTANCES: u64 = 128;

/// The minimum of a user's other limits, for one sandbox: the kernel's defaults, or a fraction of the defaults that
/// grow with the machine's memory. The number of processes covers the sandbox's own limit and its first processes.
pub(crate) const MIN_USER_LIMITS: [(&str, u64); 6] = [
    ("fs.epoll.max_user_watches", 16_384),
    ("fs.inotify.max_user_watches", 8192),
    ("fs.mqueue.queues_max", 16),
    ("fs.pipe-user-pages-soft", 1024),
    ("kernel.keys.maxkeys", 200),
    (NPROC_LIMIT_NAME, 512),
];

/// The name of the limit on processes, which a process hands on to its children.
pub(crate) const NPROC_LIMIT_NAME: &str = "RLIMIT_NPROC";

/// The minimum of free bytes for workspaces: our choice.
const MIN_FREE_BYTES: u64 = 1 << 30;

/// Returns the paths of Podman's sockets: root's, and the user's below `XDG_RUNTIME_DIR`.
pub(crate) fn podman_socket_paths(runtime_dir: Option<&Path>) -> Vec<PathBuf> {
    let own = runtime_dir.map(|dir| dir.join("podman/podman.sock"));
    [PathBuf::from("/run/podman/podman.sock")].into_iter().chain(own).collect()
}
