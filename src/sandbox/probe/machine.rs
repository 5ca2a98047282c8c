//! The probe of this machine, which changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

use rustix::process::{Resource, getrlimit};

use super::{
    CgroupSupport, EngineProbe, HostFacts, MIN_USER_LIMITS, NPROC_LIMIT_NAME, landlock,
    podman_socket_paths,
};
use crate::base::disk::measure_space;
use crate::sandbox::{InitBinary, embedded};

/// Collects the facts that need no engine.
pub fn probe_machine(run_dir: &Path, init: InitBinary, runtime_dir: Option<&Path>) -> HostFacts {
    let read = |path: &str| fs::read_to_string(path).map(|text| text.trim().to_owned());
    let mounts = read("/proc/self/mounts").unwrap_or_default();
    let actions = read("/proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
    let namespaces = read("/proc/sys/user/max_user_namespaces").unwrap_or_default();
    // Debian's and Ubuntu's own switches, which other kernels do not have.
    let is_forbidden = read("/proc/sys/kernel/unprivileged_userns_clone").is_ok_and(|on| on == "0")
        || read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns").is_ok_and(|on| on == "1");
    HostFacts {
        kernel: read("/proc/sys/kernel/osrelease").unwrap_or_default(),
        is_root: rustix::process::geteuid().is_root(),
        cgroups: probe_cgroups(&mounts, |mount| {
            fs::read_to_string(mount.join("cgroup.controllers")).unwrap_or_default()
        }),
        user_namespaces: if is_forbidden { 0 } else { namespaces.parse().unwrap_or(0) },
        has_seccomp: actions.split(' ').any(|action| action == "errno"),
        landlock: landlock::landlock_version(),
        docker: EngineProbe::Absent,
        podman: podman_socket_paths(runtime_dir).into_iter().find(|socket| socket.exists()),
        git: git_version(),
        init,
        run_dir: run_dir.to_owned(),
        inotify_instances: read("/proc/sys/fs/inotify/max_user_instances")
            .ok()
            .and_then(|count| count.parse().ok()),
        user_limits: read_user_limits(read),
        limits_sockets: embedded::has_socket_limits(),
        core_pattern: read("/proc/sys/kernel/core_pattern").ok(),
        free: free_space(run_dir),
    }
}

/// Finds the cgroups among the mounts. Version 2 lists its controllers in a file; if both versions are mounted,
/// version 1 has the controllers that version 2 has not.
pub fn probe_cgroups(mounts: &str, controllers_of: impl Fn(&Path) -> String) -> CgroupSupport {
    let mut found = CgroupSupport::default();
    for line in mounts.lines() {
        let fields: Vec<_> = line.split(' ').collect();
        let [_, target, kind, options, ..] = fields[..] else { continue };
        let controllers: BTreeSet<String> = match kind {
            "cgroup" => options
                .split(',')
                .filter(|name| is_controller_name(name))
                .map(str::to_owned)
                .collect(),
            "cgroup2" => {
                controllers_of(Path::new(target)).split_whitespace().map(str::to_owned).collect()
            }
            _ => continue,
        };
        // With both versions mounted, version 1 counts if it has controllers: the limits are then set there.
        let version = if kind == "cgroup" { 1 } else { 2 };
        if found.version == 0 || version == 1 && !controllers.is_empty() {
            found.version = version;
        }
        found.controllers.extend(controllers);
    }
    found
}

/// Reads the limits of a user. A limit of 0 pages means no limit, so zeros are left out.
fn read_user_limits(read: impl Fn(&str) -> io::Result<String>) -> BTreeMap<&'static str, u64> {
    let limit = |name: &'static str| match name {
        NPROC_LIMIT_NAME => Some(getrlimit(Resource::Nproc).current.unwrap_or(u64::MAX)),
        name => read(&format!("/proc/sys/{}", name.replace('.', "/"))).ok()?.parse().ok(),
    };
    let limits = MIN_USER_LIMITS.iter().filter_map(|(name, _)| Some((*name, limit(name)?)));
    limits.filter(|(_, limit)| *limit > 0).collect()
}

fn is_controller_name(option: &str) -> bool {
    ["blkio", "cpu", "cpuacct", "cpuset", "devices", "freezer", "hugetlb", "memory", "pids"]
        .contains(&option)
}

fn git_version() -> Option<String> {
    let output = Command::new("git").arg("version").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().strip_prefix("git version ")?.to_owned())
}

/// Returns the free bytes at the path, or at its nearest parent that exists.
fn free_space(path: &Path) -> Option<u64> {
    path.ancestors().find_map(|path| Some(measure_space(path).ok()?.free_bytes))
}
