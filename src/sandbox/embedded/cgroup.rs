//! The cgroups that carry the limits of containers: their paths, their OOM counters and their removal.
//!
//! The runtime makes the cgroups: one in each hierarchy of cgroup v1, or a single one with v2, by the same name
//! everywhere.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::base::digest::sha256_hex;
use crate::sandbox::OwnerProcess;

/// A cgroup that carries the name of a container of the gateway. The container may have ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftoverCgroup {
    /// The name, as [`remove_cgroup`] takes it.
    pub name: PathBuf,
    /// The process that made the cgroup; `None` if the name does not state a valid owner.
    pub owner: Option<OwnerProcess>,
    /// The mark of the installation, as [`cgroup_name`] writes it.
    installation: String,
}

impl LeftoverCgroup {
    /// Returns true if the cgroup belongs to the installation with this run directory.
    pub fn belongs_to(&self, run_dir: &Path) -> bool {
        self.installation == installation_mark(run_dir)
    }
}

/// Returns the cgroup's name for a run's directory name, in the installation with this run directory.
pub fn cgroup_name(directory: &str, run_dir: &Path) -> PathBuf {
    Path::new("/").join(format!("{directory}-{}", installation_mark(run_dir)))
}

/// Returns the mark of an installation. All installations share the machine's cgroups, and each removes only its own.
fn installation_mark(run_dir: &Path) -> String {
    sha256_hex(run_dir.as_os_str().as_bytes())[..MARK_DIGITS].to_owned()
}

/// Checks that this process may set limits.
pub(super) fn check_can_set_limits() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("only root may".to_owned());
    }
    let hierarchies = cgroup_hierarchies().map_err(|error| error.to_string())?;
    if hierarchies.is_empty() { Err("no cgroups are mounted".to_owned()) } else { Ok(()) }
}

/// Returns true if cgroups have a separate limit for the buffers of their sockets. Cgroup v1 has one, which is the
/// only limit for these buffers: its name says TCP, but UDP counts too. With v2 the buffers count as memory.
pub(in crate::sandbox) fn has_socket_limits() -> bool {
    let hierarchies = cgroup_hierarchies().unwrap_or_default();
    hierarchies.iter().any(|hierarchy| hierarchy.join("memory.kmem.tcp.limit_in_bytes").exists())
}

/// Returns true if the kernel has killed a process of the cgroup because its memory was used up.
pub(super) fn was_oom_killed(name: &Path) -> bool {
    let Ok(hierarchies) = cgroup_hierarchies() else { return false };
    let texts = memory_event_files(&hierarchies, name).into_iter().map(fs::read_to_string);
    texts.flatten().any(|text| parse_oom_kills(&text).is_some_and(|count| count > 0))
}

/// Returns the number of processes that the kernel has killed for lack of memory in the cgroups of process `pid`,
/// including cgroups made by an engine. The number is 0 if the cgroups cannot be seen from here.
pub(in crate::sandbox) fn oom_kill_count(pid: i32) -> u64 {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    // A line holds the hierarchy's number, its controllers and the cgroup's path.
    let mut groups: Vec<_> = groups.lines().filter_map(|line| line.splitn(3, ':').nth(2)).collect();
    // With cgroup v1 most hierarchies name the same path; a path must count once.
    groups.sort_unstable();
    groups.dedup();
    let hierarchies = cgroup_hierarchies().unwrap_or_default();
    let files = groups.iter().flat_map(|name| memory_event_files(&hierarchies, Path::new(name)));
    files.filter_map(|file| parse_oom_kills(&fs::read_to_string(file).ok()?)).sum()
}

fn memory_event_files(hierarchies: &[PathBuf], name: &Path) -> Vec<PathBuf> {
    // The first file belongs to version 2, the second file to version 1. A cgroup has at most one of the two.
    let files = ["memory.events", "memory.oom_control"];
    let groups = hierarchies.iter().map(|hierarchy| cgroup_path(hierarchy, name));
    groups.flat_map(|group| files.map(|file| group.join(file))).collect()
}

/// Parses the number of OOM kills, a line in the files of both versions. A kernel older than 4.13 has no such line.
fn parse_oom_kills(text: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix("oom_kill "))
        .and_then(|count| count.trim().parse().ok())
}

/// Kills all processes in the cgroup, and removes the cgroup. A cgroup that does not exist counts as removed.
///
/// # Errors
/// Returns an error if the cgroup still exists.
pub fn remove_cgroup(name: &Path) -> io::Result<()> {
    for hierarchy in cgroup_hierarchies()? {
        remove_in_hierarchy(&cgroup_path(&hierarchy, name))?;
    }
    Ok(())
}

fn remove_in_hierarchy(group: &Path) -> io::Result<()> {
    let start = Instant::now();
    loop {
        match fs::remove_dir(group) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if start.elapsed() > KILL_TIMEOUT => return Err(error),
            Err(_) => (),
        }
        // A cgroup with processes cannot be removed. A killed process may take a moment to end, so the removal is tried
        // again until the timeout.
        kill_all(group);
        sleep_briefly();
    }
}

/// Kills all processes in the cgroup, as far as possible; the next removal shows the result.
fn kill_all(group: &Path) {
    // Version 2 since Linux 5.14: the kernel kills all processes in one step, including those that are being forked.
    if fs::write(group.join("cgroup.kill"), "1").is_ok() {
        return;
    }
    for pid in list_pids(group) {
        kill_process(group, pid);
    }
}

/// Kills a process of the cgroup, and never another process that has reused the pid. While the pidfd is open, the pid
/// cannot be reused. So a pid that is still listed belongs to the pidfd's process.
fn kill_process(group: &Path, pid: Pid) {
    let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return };
    // The order matters: the pidfd is opened first, and the list is read after that.
    if list_pids(group).contains(&pid) {
        let _ = pidfd_send_signal(&process, Signal::KILL);
    }
}

fn list_pids(group: &Path) -> Vec<Pid> {
    let listed = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    listed.lines().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
}

/// Lists all cgroups with a name in the gateway's format.
///
/// # Errors
/// Returns an error if the hierarchies cannot be read.
pub fn list_leftovers() -> io::Result<Vec<LeftoverCgroup>> {
    let mut names = vec![];
    for hierarchy in cgroup_hierarchies()? {
        for entry in fs::read_dir(hierarchy)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            names.extend(parse_leftover(&name));
        }
    }
    // Version 1 lists a name once for each hierarchy.
    names.sort_by(|a, b| a.name.cmp(&b.name));
    names.dedup();
    Ok(names)
}

fn parse_leftover(name: &str) -> Option<LeftoverCgroup> {
    // The name is `cogni-<run>-<owner>-<mark>`, and the owner itself contains dashes.
    let (_, rest) = name.strip_prefix("cogni-")?.split_once('-')?;
    let (owner, installation) = rest.rsplit_once('-')?;
    let (name, owner, installation) =
        (Path::new("/").join(name), OwnerProcess::parse(owner), installation.to_owned());
    Some(LeftoverCgroup { name, owner, installation })
}

/// Lists the mount points of all cgroup hierarchies, of either version.
fn cgroup_hierarchies() -> io::Result<Vec<PathBuf>> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let cgroups = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (target, kind) = (fields.next()?, fields.next()?);
        matches!(kind, "cgroup" | "cgroup2").then(|| PathBuf::from(target))
    });
    Ok(cgroups.collect())
}

fn cgroup_path(hierarchy: &Path, name: &Path) -> PathBuf {
    // A leading slash would make `join` drop the hierarchy.
    hierarchy.join(name.strip_prefix("/").unwrap_or(name))
}

#[expect(
    clippy::disallowed_methods,
    reason = "the callers run on threads without an async runtime to block"
)]
fn sleep_briefly() {
    thread::sleep(Duration::from_millis(1));
}

/// The hexadecimal digits of an installation's mark: enough to tell the installations of one machine apart.
const MARK_DIGITS: usize = 8;

/// The time from SIGKILL to the end of a process that the kernel delays.
const KILL_TIMEOUT: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;

    /// R5: a pid that is not in the cgroup any more belongs to another process, and is not killed.
    #[test]
    fn what_is_in_a_group_is_killed_and_nothing_else() {
        let name = format!("/cogni-test-{}", std::process::id());
        let sleep = || Command::new("sleep").arg("600").spawn().expect("it is there");
        let (mut inside, mut outside) = (sleep(), sleep());
        let groups = cgroup_hierarchies().expect("some are mounted");
        let groups: Vec<_> =
            groups.iter().map(|hierarchy| cgroup_path(hierarchy, Path::new(&name))).collect();
        let mut is_in = false;
        for group in &groups {
            // Not every hierarchy takes processes without more settings.
            let _ = fs::create_dir(group);
            is_in |= fs::write(group.join("cgroup.procs"), inside.id().to_string()).is_ok();
        }
        assert!(is_in, "no group takes a process");
        let pid = i32::try_from(outside.id()).ok().and_then(Pid::from_raw).expect("a pid");
        for group in &groups {
            kill_process(group, pid);
        }
        remove_cgroup(Path::new(&name)).expect("it is gone");
        let ended = inside.wait().expect("it has ended");
        assert_eq!(ended.signal(), Some(9));
        assert!(groups.iter().all(|group| !group.exists()));
        assert!(outside.try_wait().expect("it is ours").is_none(), "another was killed");
        outside.kill().and_then(|()| outside.wait()).expect("it ends");
    }
}
