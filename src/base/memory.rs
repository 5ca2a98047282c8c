//! The memory of this machine and of this process.

use std::fs;
use std::path::Path;

/// Bytes of memory that this process may use: those of the machine or, where they are fewer, those of its
/// control group (version 2). `None` where the kernel does not tell.
pub fn available_memory() -> Option<u64> {
    let machine =
        fs::read_to_string("/proc/meminfo").ok().and_then(|text| parse_total_memory(&text));
    let group = fs::read_to_string("/proc/self/cgroup").ok();
    let group = group.as_deref().and_then(|text| text.strip_prefix("0::/")).map(str::trim_end);
    let group = group.and_then(|path| min_cgroup_limit(Path::new("/sys/fs/cgroup"), path));
    machine.into_iter().chain(group).min()
}

/// Gives memory that is free in this process back to the kernel.
///
/// glibc keeps free pages that lie below pages in use. After a flood of large bodies that is most of them.
#[cfg(target_env = "gnu")]
#[expect(
    unsafe_code,
    reason = "there is no safe call that has the allocator give back its free pages"
)]
pub fn give_back() {
    // SAFETY: the call only gives back pages that hold no allocation, and locks what it looks at.
    unsafe { libc::malloc_trim(0) };
}

/// Other allocators give free memory back by themselves.
#[cfg(not(target_env = "gnu"))]
pub fn give_back() {}

/// The machine's memory in `/proc/meminfo`.
fn parse_total_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    kib.checked_mul(1024)
}

/// The least limit of a control group and of those around it.
fn min_cgroup_limit(root: &Path, path: &str) -> Option<u64> {
    let group = root.join(path);
    let limits = group
        .ancestors()
        .take_while(|group| group.starts_with(root))
        .filter_map(|group| fs::read_to_string(group.join("memory.max")).ok()?.trim().parse().ok());
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_limit_around_a_group_holds() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("a/b");
        fs::create_dir_all(&inner).unwrap();
        fs::write(inner.join("memory.max"), "max\n").unwrap();
        assert_eq!(min_cgroup_limit(root.path(), "a/b"), None);
        fs::write(root.path().join("a/memory.max"), "1048576\n").unwrap();
        assert_eq!(min_cgroup_limit(root.path(), "a/b"), Some(1_048_576));
        assert_eq!(parse_total_memory("MemTotal:        16 kB\nMemFree: 1 kB\n"), Some(16_384));
    }
}
