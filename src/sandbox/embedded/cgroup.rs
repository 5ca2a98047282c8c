//! The groups of processes that limits are for: where they are, what they say of their end, and theirs.
//!
//! The runtime makes them, one in each hierarchy of cgroup v1, or a single one with v2, by the same name everywhere.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::sandbox::Owner;

/// A group that a container of ours had, or has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leftover {
    /// As it is given to [`remove`].
    pub name: PathBuf,
    /// Who made it; `None` where its name does not say.
    pub owner: Option<Owner>,
}

/// Whether this process may set limits at all.
pub(super) fn may_be_set() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("only root may".to_owned());
    }
    let hierarchies = hierarchies().map_err(|error| error.to_string())?;
    if hierarchies.is_empty() { Err("no cgroups are mounted".to_owned()) } else { Ok(()) }
}

/// Whether the kernel has killed one of its processes for want of memory.
pub(super) fn was_oom_killed(name: &Path) -> bool {
    let Ok(hierarchies) = hierarchies() else { return false };
    let files = ["memory.events", "memory.oom_control"];
    let mut candidates = hierarchies
        .iter()
        .flat_map(|hierarchy| files.map(|file| group(hierarchy, name).join(file)));
    candidates.any(|file| fs::read_to_string(file).is_ok_and(|text| counts_a_kill(&text)))
}

/// In both versions a line of its own; of a kernel that is older than 4.13, none.
fn counts_a_kill(text: &str) -> bool {
    let mut counts = text.lines().filter_map(|line| line.strip_prefix("oom_kill "));
    counts.any(|count| count.trim() != "0")
}

/// Kills what is in the group, and removes it; one that is not there is as good as removed.
///
/// # Errors
/// It is still there.
pub fn remove(name: &Path) -> io::Result<()> {
    for hierarchy in hierarchies()? {
        remove_one(&group(&hierarchy, name))?;
    }
    Ok(())
}

fn remove_one(group: &Path) -> io::Result<()> {
    let begun = Instant::now();
    loop {
        match fs::remove_dir(group) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if begun.elapsed() > PATIENCE => return Err(error),
            Err(_) => (),
        }
        let pids = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
        for pid in pids.lines().filter_map(|pid| pid.parse().ok()).filter_map(Pid::from_raw) {
            let _ = kill_process(pid, Signal::KILL);
        }
        pause();
    }
}

/// All groups that are named as ours are.
///
/// # Errors
/// The hierarchies cannot be read.
pub fn leftovers() -> io::Result<Vec<Leftover>> {
    let mut names = vec![];
    for hierarchy in hierarchies()? {
        for entry in fs::read_dir(hierarchy)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if let Some((_, owner)) =
                name.strip_prefix("cogni-").and_then(|rest| rest.split_once('-'))
            {
                names.push((Path::new("/").join(&name), Owner::parse(owner)));
            }
        }
    }
    names.sort_by(|one, other| one.0.cmp(&other.0));
    names.dedup();
    Ok(names.into_iter().map(|(name, owner)| Leftover { name, owner }).collect())
}

/// Where cgroups are mounted, of either version.
fn hierarchies() -> io::Result<Vec<PathBuf>> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let cgroups = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (target, kind) = (fields.next()?, fields.next()?);
        matches!(kind, "cgroup" | "cgroup2").then(|| PathBuf::from(target))
    });
    Ok(cgroups.collect())
}

fn group(hierarchy: &Path, name: &Path) -> PathBuf {
    hierarchy.join(name.strip_prefix("/").unwrap_or(name))
}

#[expect(clippy::disallowed_methods, reason = "whoever calls this has no runtime to block")]
fn pause() {
    thread::sleep(Duration::from_millis(1));
}

/// From SIGKILL to the end of a process that the kernel holds.
const PATIENCE: Duration = Duration::from_secs(3);
