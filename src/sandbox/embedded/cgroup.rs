//! The groups of processes that limits are for: where they are, what they say of their end, and theirs.
//!
//! The runtime makes them, one in each hierarchy of cgroup v1, or a single one with v2, by the same name everywhere.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::base::hex;
use crate::sandbox::OwnerProcess;

/// A group that a container of ours had, or has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftoverCgroup {
    /// As it is given to [`remove_cgroup`].
    pub name: PathBuf,
    /// Who made it; `None` where its name does not say.
    pub owner: Option<OwnerProcess>,
    /// Its installation's, as [`cgroup_name`] writes it.
    mark: String,
}

impl LeftoverCgroup {
    /// Whether it is of an installation that has its runs in this directory.
    pub fn belongs_to(&self, run_dir: &Path) -> bool {
        self.mark == installation_mark(run_dir)
    }
}

/// The group of what runs for a directory of this name, in an installation that has its runs in `run_dir`.
pub fn cgroup_name(directory: &str, run_dir: &Path) -> PathBuf {
    Path::new("/").join(format!("{directory}-{}", installation_mark(run_dir)))
}

/// Groups are this machine's, and each installation looks after its own.
fn installation_mark(run_dir: &Path) -> String {
    hex::sha256_hex(run_dir.as_os_str().as_bytes())[..MARK_DIGITS].to_owned()
}

/// Whether this process may set limits at all.
pub(super) fn check_can_set_limits() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("only root may".to_owned());
    }
    let hierarchies = cgroup_hierarchies().map_err(|error| error.to_string())?;
    if hierarchies.is_empty() { Err("no cgroups are mounted".to_owned()) } else { Ok(()) }
}

/// Whether groups have a limit of their own for the buffers of their sockets. With cgroup v1 they have, and it is the only
/// one for those: of TCP by its name, and of UDP all the same. With v2 they count as memory.
pub(in crate::sandbox) fn has_socket_limits() -> bool {
    let hierarchies = cgroup_hierarchies().unwrap_or_default();
    hierarchies.iter().any(|hierarchy| hierarchy.join("memory.kmem.tcp.limit_in_bytes").exists())
}

/// Whether the kernel has killed one of its processes for want of memory.
pub(super) fn was_oom_killed(name: &Path) -> bool {
    let Ok(hierarchies) = cgroup_hierarchies() else { return false };
    let texts = memory_event_files(&hierarchies, name).into_iter().map(fs::read_to_string);
    texts.flatten().any(|text| parse_oom_kills(&text).is_some_and(|count| count > 0))
}

/// How many processes the kernel has killed for want of memory in the groups of this one, whoever has made them; none
/// where they cannot be seen from here.
pub(in crate::sandbox) fn oom_kill_count(pid: i32) -> u64 {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    // Its number, its controllers and its path.
    let mut groups: Vec<_> = groups.lines().filter_map(|line| line.splitn(3, ':').nth(2)).collect();
    groups.sort_unstable();
    groups.dedup();
    let hierarchies = cgroup_hierarchies().unwrap_or_default();
    let files = groups.iter().flat_map(|name| memory_event_files(&hierarchies, Path::new(name)));
    files.filter_map(|file| parse_oom_kills(&fs::read_to_string(file).ok()?)).sum()
}

fn memory_event_files(hierarchies: &[PathBuf], name: &Path) -> Vec<PathBuf> {
    let files = ["memory.events", "memory.oom_control"];
    let groups = hierarchies.iter().map(|hierarchy| cgroup_path(hierarchy, name));
    groups.flat_map(|group| files.map(|file| group.join(file))).collect()
}

/// In both versions a line of its own; of a kernel that is older than 4.13, none.
fn parse_oom_kills(text: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix("oom_kill "))
        .and_then(|count| count.trim().parse().ok())
}

/// Kills what is in the group, and removes it; one that is not there is as good as removed.
///
/// # Errors
/// It is still there.
pub fn remove_cgroup(name: &Path) -> io::Result<()> {
    for hierarchy in cgroup_hierarchies()? {
        remove_in_hierarchy(&cgroup_path(&hierarchy, name))?;
    }
    Ok(())
}

fn remove_in_hierarchy(group: &Path) -> io::Result<()> {
    let begun = Instant::now();
    loop {
        match fs::remove_dir(group) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if begun.elapsed() > KILL_TIMEOUT => return Err(error),
            Err(_) => (),
        }
        kill_all(group);
        sleep_briefly();
    }
}

/// Best effort: the next look at the group tells what has become of it.
fn kill_all(group: &Path) {
    // Version 2, Linux 5.14: the kernel ends all of them in one step, those that are being forked, too.
    if fs::write(group.join("cgroup.kill"), "1").is_ok() {
        return;
    }
    for pid in list_pids(group) {
        kill_process(group, pid);
    }
}

/// Kills a process of the group, and no other that has its pid by then: while the handle is open, the pid can only be that
/// of the process that the handle is for, and that one is in the group if the pid is still listed.
fn kill_process(group: &Path, pid: Pid) {
    let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return };
    if list_pids(group).contains(&pid) {
        let _ = pidfd_send_signal(&process, Signal::KILL);
    }
}

fn list_pids(group: &Path) -> Vec<Pid> {
    let listed = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    listed.lines().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
}

/// All groups that are named as ours are.
///
/// # Errors
/// The hierarchies cannot be read.
pub fn list_leftovers() -> io::Result<Vec<LeftoverCgroup>> {
    let mut names = vec![];
    for hierarchy in cgroup_hierarchies()? {
        for entry in fs::read_dir(hierarchy)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            names.extend(parse_leftover(&name));
        }
    }
    names.sort_by(|one, other| one.name.cmp(&other.name));
    names.dedup();
    Ok(names)
}

fn parse_leftover(name: &str) -> Option<LeftoverCgroup> {
    let (_, rest) = name.strip_prefix("cogni-")?.split_once('-')?;
    let (owner, mark) = rest.rsplit_once('-')?;
    let (name, owner, mark) =
        (Path::new("/").join(name), OwnerProcess::parse(owner), mark.to_owned());
    Some(LeftoverCgroup { name, owner, mark })
}

/// Where cgroups are mounted, of either version.
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
    hierarchy.join(name.strip_prefix("/").unwrap_or(name))
}

#[expect(clippy::disallowed_methods, reason = "whoever calls this has no runtime to block")]
fn sleep_briefly() {
    thread::sleep(Duration::from_millis(1));
}

/// Two installations of one machine are told apart.
const MARK_DIGITS: usize = 8;

/// From SIGKILL to the end of a process that the kernel holds.
const KILL_TIMEOUT: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;

    /// R5: a pid that is not in the group any more is another process's, and none of ours to kill.
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
