//! The memory of this machine and of this process.

use std::fs;
use std::path::Path;

/// Returns the bytes of memory that this process may use: the machine's memory, or the limit of its control group
/// (version 2) if that is smaller. Returns `None` if the kernel reports neither.
pub fn available_memory() -> Option<u64> {
    let machine =
        fs::read_to_string("/proc/meminfo").ok().and_then(|text| parse_total_memory(&text));
    let group = fs::read_to_string("/proc/self/cgroup").ok();
    let group = group.as_deref().and_then(|text| text.strip_prefix("0::/")).map(str::trim_end);
    let group = group.and_then(|path| min_cgroup_limit(Path::new("/sys/fs/cgroup"), path));
    machine.into_iter().chain(group).min()
}

/// Returns free memory of this process to the kernel.
///
/// glibc keeps free pages that lie below pages in use. After many large bodies most of the free pages lie there.
#[cfg(target_env = "gnu")]
#[expect(
    unsafe_code,
    reason = "there is no safe call that has the allocator give back its free pages"
)]
pub fn give_back() {
    // SAFETY: the call only returns pages that hold no allocation, and it locks the memory that it inspects.
    unsafe { libc::malloc_trim(0) };
}

/// Does nothing: other allocators return free memory to the kernel by themselves.
#[cfg(not(target_env = "gnu"))]
pub fn give_back() {}

/// Returns the machine's memory from the text of `/proc/meminfo`, in bytes.
fn parse_total_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    kib.checked_mul(1024)
}

/// Returns the smallest limit of a control group and its parents, in bytes.
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
