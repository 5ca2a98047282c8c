//! A sandbox in the words of the Open Container Initiative's runtime specification. Pure: what is enforced can be
//! read, and tested, without making anything.

use std::path::{Path, PathBuf};

use libcontainer::oci_spec::runtime::Spec;
use serde_json::{Value, json};

use super::layout::{HOSTNAME, MASKED_PATHS, OOM_SCORE_ADJ, READ_ONLY_PATHS, TmpfsMount, ULIMITS};
use super::{BindMount, MountAccess, SandboxSpec, WORKSPACE_TARGET};

/// Where on this machine a sandbox is put together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OciHostSettings {
    /// The directory that becomes its root. What is in there is gone with it.
    pub root: PathBuf,
    /// The programs, shown in the root.
    pub programs: Vec<BindMount>,
    /// How many files this process may let others open.
    pub max_files: u64,
    /// The group of processes that its limits are for; without one there are no limits but those of a process.
    pub cgroup: Option<PathBuf>,
    /// Whether the group has a limit of its own for the buffers of sockets, as with cgroup v1: no other limit is for them.
    pub limits_sockets: bool,
    /// Whether its user is the one who makes it, who is not root. To the runtime that one is root, and nobody else is
    /// there; the user that the sandbox has comes last, when nothing needs root any more.
    pub is_rootless: bool,
}

/// What a runtime is to make. The filter of system calls is not in it: [`super::seccomp`] is put on by the process that
/// becomes the sandbox's first.
pub fn build_oci_spec(spec: &SandboxSpec, place: &OciHostSettings) -> Spec {
    let uid = container_uid(spec, place);
    // The kernel asks it of whoever says that root is somebody else now, which is what such a user says at last: with
    // that it is gone.
    let last = if place.is_rootless { vec!["CAP_SETFCAP"] } else { vec![] };
    let environment = spec.environment().into_iter();
    // Any image says where its programs are; here nobody else does.
    let path = (!spec.env.contains_key("PATH")).then(|| format!("PATH={DEFAULT_PATH}"));
    let variables = environment.map(|(name, value)| format!("{name}={value}")).chain(path);
    let config = json!({
        "ociVersion": "1.0.2",
        "hostname": HOSTNAME,
        "root": { "path": place.root, "readonly": true },
        "process": {
            "args": spec.init_command(),
            "env": variables.collect::<Vec<_>>(),
            "cwd": WORKSPACE_TARGET,
            "user": { "uid": uid, "gid": uid, "umask": 0o022 },
            "capabilities": {
                "bounding": last, "effective": last, "permitted": last, "inheritable": [], "ambient": [],
            },
            "noNewPrivileges": true,
            "oomScoreAdj": OOM_SCORE_ADJ,
            "rlimits": ULIMITS.map(|limit| rlimit_json(limit, place)),
        },
        "mounts": mounts_json(spec, place),
        "linux": {
            "namespaces": [
                { "type": "pid" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" }, { "type": "cgroup" },
                // Made by the process that makes the sandbox, for it alone, with nothing but its loopback.
                { "type": "network", "path": OWN_NETWORK_NAMESPACE },
            ],
            "maskedPaths": MASKED_PATHS,
            "readonlyPaths": READ_ONLY_PATHS,
            "rootfsPropagation": "private",
        },
    });
    let mut config: Spec = serde_json::from_value(config).expect("what is written here is a spec");
    let linux = config.linux_mut().as_mut().expect("it has this part");
    // An empty one is where the process is already.
    linux.set_cgroups_path(Some(place.cgroup.clone().unwrap_or_default()));
    if place.cgroup.is_some() {
        let resources = serde_json::from_value(resources_json(spec, place.limits_sockets));
        linux.set_resources(Some(resources.expect("what is written here are limits")));
    }
    config
}

/// Its user, as the runtime knows it.
fn container_uid(spec: &SandboxSpec, place: &OciHostSettings) -> u32 {
    if place.is_rootless { 0 } else { spec.uid }
}

/// No more than whoever makes the sandbox has: only some may raise that.
fn rlimit_json((name, limit): (&str, u64), place: &OciHostSettings) -> Value {
    let limit = if name == "nofile" { limit.min(place.max_files) } else { limit };
    json!({ "type": format!("RLIMIT_{}", name.to_uppercase()), "soft": limit, "hard": limit })
}

fn resources_json(spec: &SandboxSpec, limits_sockets: bool) -> Value {
    let limits = &spec.limits;
    // Memory and swap together: there is no swap.
    let mut memory = json!({ "limit": limits.max_memory, "swap": limits.max_memory });
    if limits_sockets {
        memory["kernelTCP"] = limits.max_memory.into();
    }
    json!({
        "memory": memory,
        "pids": { "limit": limits.pids },
        "cpu": { "quota": cpu_quota(limits.cpus), "period": CPU_PERIOD_MICROS },
        "devices": [{ "allow": false, "access": "rwm" }],
    })
}

/// In the order in which they are made: what is shown below another comes after it.
fn mounts_json(spec: &SandboxSpec, place: &OciHostSettings) -> Vec<Value> {
    let kernel =
        KERNEL_MOUNTS.iter().map(|(target, kind, options)| mount_json(target, kind, options));
    let memory = spec.tmpfs_mounts(container_uid(spec, place));
    let memory = memory
        .iter()
        .map(|TmpfsMount { target, options }| mount_json(target, "tmpfs", options))
        .collect();
    let programs = place.programs.iter().map(bind_mount_json).collect();
    let own = spec.bind_mounts().iter().map(bind_mount_json).collect();
    [programs, kernel.collect(), memory, own].into_iter().flat_map(Vec::into_iter).collect()
}

fn mount_json(target: &str, kind: &str, options: &str) -> Value {
    let options: Vec<_> = options.split(',').collect();
    json!({ "destination": target, "type": kind, "source": kind, "options": options })
}

/// What is mounted below it stays out: it was not asked for, and would be writable where this is not.
fn bind_mount_json(BindMount { source, target, access }: &BindMount) -> Value {
    let access = if *access == MountAccess::ReadOnly { "ro" } else { "rw" };
    json!({
        "destination": target,
        "type": "bind",
        "source": source,
        "options": ["bind", access, "nosuid", "nodev", "private"],
    })
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a checked number of processors is at most 1024"
)]
fn cpu_quota(cpus: f64) -> i64 {
    (cpus * f64::from(CPU_PERIOD_MICROS)).round() as i64
}

/// Whether `path` is one that a sandbox has of its own, whatever programs it is given.
pub fn is_reserved_target(path: &Path) -> bool {
    RESERVED_TARGETS.iter().any(|own| path == Path::new(own))
}

/// As the kernel names it for whoever reads it.
const OWN_NETWORK_NAMESPACE: &str = "/proc/self/ns/net";

/// Microseconds; the kernel's own default, and Docker's.
const CPU_PERIOD_MICROS: u32 = 100_000;

/// Docker's own.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Mounted by us in every root.
const RESERVED_TARGETS: &[&str] =
    &["/cogni-init", "/dev", "/llm-sock", "/proc", "/run", "/sys", "/tmp", "/workspace"];

/// The kernel's own trees, as Docker mounts them; without its cgroups.
const KERNEL_MOUNTS: &[(&str, &str, &str)] = &[
    ("/proc", "proc", "nosuid,noexec,nodev"),
    ("/dev", "tmpfs", "nosuid,noexec,strictatime,mode=755,size=64k"),
    ("/dev/pts", "devpts", "nosuid,noexec,newinstance,ptmxmode=0666,mode=0620,max=64"),
    ("/dev/shm", "tmpfs", "nosuid,noexec,nodev,mode=1777,size=64m"),
    ("/dev/mqueue", "mqueue", "nosuid,noexec,nodev"),
    ("/sys", "sysfs", "nosuid,noexec,nodev,ro"),
];
