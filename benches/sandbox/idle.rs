//! Measures the memory of a waiting sandbox: its first process, and the process that supports it on this machine.

use std::fs;

use super::{StartMethod, StartSubject};

pub(super) fn print_idle(subjects: &[StartSubject]) {
    println!("\nKiB of one that waits: resident, and its share of what others have too");
    for StartSubject { name, way, .. } in subjects {
        let Ok(StartMethod::OwnDriver(ours)) = way else { continue };
        if !ours.is_warm() {
            continue;
        }
        ours.until_ready();
        let pattern = if name.contains("docker") { "containerd-shim" } else { "cogni-sandbox" };
        let Some((init, maker)) = waiting_processes(pattern) else {
            println!("{name:18} not found");
            continue;
        };
        let [own, other] = [init, maker].map(|pid| process_memory(&pid));
        println!(
            "{name:18} first process {:>6} {:>6}   {pattern} {:>6} {:>6}",
            own.0, own.1, other.0, other.1
        );
    }
}

/// Returns the pids of a slot's first process and of its parent, whose name is given.
fn waiting_processes(parent_is: &str) -> Option<(String, String)> {
    let pids = fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().into_string().ok());
    pids.filter(|pid| read_command_line(pid).starts_with("/cogni-init\0--slot\0")).find_map(|pid| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:\t"))?.to_owned();
        read_command_line(&parent).contains(parent_is).then_some((pid, parent))
    })
}

fn read_command_line(pid: &str) -> String {
    fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default()
}

/// Returns resident and proportional memory.
fn process_memory(pid: &str) -> (u64, u64) {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.map_or(0, |line| line.trim().trim_end_matches(" kB").parse().unwrap())
    };
    (field("Rss:"), field("Pss:"))
}
