//! The translation of a sandbox into the runtime specification of the Open Container Initiative. The translation is
//! pure: the enforced settings can be read and tested without a container.

use std::path::{Path, PathBuf};

use libcontainer::oci_spec::runtime::Spec;
use serde_json::{Value, json};

use super::layout::{HOSTNAME, MASKED_PATHS, OOM_SCORE_ADJ, READ_ONLY_PATHS, TmpfsMount, ULIMITS};
use super::{BindMount, MountAccess, SandboxSpec};

/// The settings of this machine for a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OciHostSettings {
    /// The directory that becomes the root. Its content is removed with the sandbox.
    pub root: PathBuf,
    /// The mounts of programs into the root.
    pub programs: Vec<BindMount>,
    /// The number of files that this process may allow its children to open.
    pub max_files: u64,
    /// The cgroup for the limits; without a cgroup, only the limits of a process hold.
    pub cgroup: Option<PathBuf>,
    /// True if cgroups have a separate limit for the buffers of sockets, as with cgroup v1, where no other limit
    /// covers them.
    pub limits_sockets: bool,
    /// True if a user other than root makes the sandbox. The runtime then runs in a namespace with one user, which
    /// the runtime knows as root. The switch to the sandbox's user comes last, when no step needs root any more.
    pub is_rootless: bool,
}

/// Builds the runtime's specification. The filters of system calls are not a part of it: the process that becomes the
/// sandbox's first process applies [`super::seccomp`] itself.
pub fn build_oci_spec(spec: &SandboxSpec, settings: &OciHostSettings) -> Spec {
    let uid = container_uid(spec, settings);
    // In a rootless container, the last step maps the namespace's root user to another number, for which the kernel
    // demands this capability. `switch_to_user` in `embedded/privilege.rs` is that step, and drops the capability.
    let last = if settings.is_rootless { vec!["CAP_SETFCAP"] } else { vec![] };
    let environment = spec.environment().into_iter();
    // An image would set the path of its programs; here no image does.
    let path = (!spec.env.contains_key("PATH")).then(|| format!("PATH={DEFAULT_PATH}"));
    let variables = environment.map(|(name, value)| format!("{name}={value}")).chain(path);
    let config = json!({
        "ociVersion": "1.0.2",
        "hostname": HOSTNAME,
        "root": { "path": settings.root, "readonly": true },
        "process": {
            "args": spec.init_command(),
            "env": variables.collect::<Vec<_>>(),
            "cwd": spec.working_dir(),
            "user": { "uid": uid, "gid": uid, "umask": 0o022 },
            "capabilities": {
                "bounding": last, "effective": last, "permitted": last, "inheritable": [], "ambient": [],
            },
            "noNewPrivileges": true,
            "oomScoreAdj": OOM_SCORE_ADJ,
            "rlimits": ULIMITS.map(|limit| rlimit_json(limit, settings)),
        },
        "mounts": mounts_json(spec, settings),
        "linux": {
            "namespaces": [
                { "type": "pid" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" }, { "type": "cgroup" },
                // The helper makes this namespace before, for this sandbox alone, with nothing but its loopback.
                { "type": "network", "path": OWN_NETWORK_NAMESPACE },
            ],
            "maskedPaths": MASKED_PATHS,
            "readonlyPaths": READ_ONLY_PATHS,
            "rootfsPropagation": "private",
        },
    });
    let mut config: Spec = serde_json::from_value(config).expect("what is written here is a spec");
    let linux = config.linux_mut().as_mut().expect("the configuration has a Linux part");
    // An empty path stands for the cgroup that the process is in.
    linux.set_cgroups_path(Some(settings.cgroup.clone().unwrap_or_default()));
    if settings.cgroup.is_some() {
        let resources = serde_json::from_value(resources_json(spec, settings.limits_sockets));
        linux.set_resources(Some(resources.expect("what is written here are limits")));
    }
    config
}

/// Returns the sandbox's user, as the runtime sees it.
fn container_uid(spec: &SandboxSpec, settings: &OciHostSettings) -> u32 {
    if settings.is_rootless { 0 } else { spec.uid }
}

/// Returns one limit, which is at most the helper's own: only a privileged process may raise a limit.
fn rlimit_json((name, limit): (&str, u64), settings: &OciHostSettings) -> Value {
    let limit = if name == "nofile" { limit.min(settings.max_files) } else { limit };
    json!({ "type": format!("RLIMIT_{}", name.to_uppercase()), "soft": limit, "hard": limit })
}

fn resources_json(spec: &SandboxSpec, limits_sockets: bool) -> Value {
    let limits = &spec.limits;
    // The swap limit includes the memory, so equal limits mean no swap.
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

/// Returns the mounts in their order of creation: a mount below another comes after it.
fn mounts_json(spec: &SandboxSpec, settings: &OciHostSettings) -> Vec<Value> {
    let kernel =
        KERNEL_MOUNTS.iter().map(|(target, kind, options)| mount_json(target, kind, options));
    let memory = spec.tmpfs_mounts(container_uid(spec, settings));
    let memory = memory
        .iter()
        .map(|TmpfsMount { target, options }| mount_json(target, "tmpfs", options))
        .collect();
    let programs = settings.programs.iter().map(bind_mount_json).collect();
    let own = spec.bind_mounts().iter().map(bind_mount_json).collect();
    [programs, kernel.collect(), memory, own].into_iter().flat_map(Vec::into_iter).collect()
}

fn mount_json(target: &str, kind: &str, options: &str) -> Value {
    let options: Vec<_> = options.split(',').collect();
    json!({ "destination": target, "type": kind, "source": kind, "options": options })
}

/// Returns a bind mount without the mounts below its source: they were not requested, and would be writable even if the
/// bind mount is not.
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

/// Returns true if every sandbox has a mount of its own at this path.
pub fn is_reserved_target(path: &Path) -> bool {
    RESERVED_TARGETS.iter().any(|own| path == Path::new(own))
}

/// The network namespace of the process that reads this path.
const OWN_NETWORK_NAMESPACE: &str = "/proc/self/ns/net";

/// The period of the CPU quota, in microseconds: the default of the kernel and of Docker.
const CPU_PERIOD_MICROS: u32 = 100_000;

/// The default `PATH`: Docker's.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The paths that the gateway mounts in every root.
const RESERVED_TARGETS: &[&str] =
    &["/cogni-init", "/dev", "/llm-sock", "/proc", "/run", "/sys", "/tmp", "/workspace"];

/// The kernel's file systems, as Docker mounts them, but without the cgroups.
const KERNEL_MOUNTS: &[(&str, &str, &str)] = &[
    ("/proc", "proc", "nosuid,noexec,nodev"),
    ("/dev", "tmpfs", "nosuid,noexec,strictatime,mode=755,size=64k"),
    ("/dev/pts", "devpts", "nosuid,noexec,newinstance,ptmxmode=0666,mode=0620,max=64"),
    ("/dev/shm", "tmpfs", "nosuid,noexec,nodev,mode=1777,size=64m"),
    ("/dev/mqueue", "mqueue", "nosuid,noexec,nodev"),
    ("/sys", "sysfs", "nosuid,noexec,nodev,ro"),
];
