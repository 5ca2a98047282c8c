//! Measures the processor time and memory of a subject's processes, and the use of the processors by others.

use std::fs;

use anyhow::{Context as _, Result};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::time::ClockId;
use nix::unistd::Pid;

use crate::clock;

/// A process with all its descendants at the time when it was ready.
#[derive(Default)]
pub(crate) struct ProcessTree {
    pids: Vec<Pid>,
}

/// The memory of a tree, in KiB.
#[derive(Clone, Copy)]
pub(crate) struct TreeMemory {
    /// Resident pages, counted once per process.
    pub(crate) resident: f64,
    /// Resident pages, with shared pages divided among the processes that share them.
    pub(crate) proportional: f64,
}

impl ProcessTree {
    pub(crate) fn of(root: u32) -> Result<Self> {
        let mut pids = vec![root];
        let parents = process_parents()?;
        let mut next = 0;
        while let Some(parent) = pids.get(next).copied() {
            pids.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(pid, _)| *pid));
            next += 1;
        }
        let pids = pids.into_iter().map(|pid| Ok(Pid::from_raw(i32::try_from(pid)?)));
        Ok(Self { pids: pids.collect::<Result<_>>()? })
    }

    pub(crate) fn pids(&self) -> &[Pid] {
        &self.pids
    }

    /// Returns the nanoseconds of processor time of all threads, including ended ones.
    pub(crate) fn cpu(&self) -> Result<u64> {
        let clocks = self.pids.iter().map(|pid| Ok(ClockId::pid_cpu_clock_id(*pid)?.now()?));
        clocks.map(|reading| reading.map(clock::as_nanos)).sum()
    }

    pub(crate) fn memory(&self) -> Result<TreeMemory> {
        let mut sum = TreeMemory { resident: 0.0, proportional: 0.0 };
        for pid in &self.pids {
            let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
            let field = |name: &str| -> Result<f64> {
                let line = rollup.lines().find(|line| line.starts_with(name));
                let value = line.and_then(|line| line.split_whitespace().nth(1));
                Ok(value.context("smaps_rollup lacks a field")?.parse()?)
            };
            sum.resident += field("Rss:")?;
            sum.proportional += field("Pss:")?;
        }
        Ok(sum)
    }
}

/// Returns every process with its parent.
fn process_parents() -> Result<Vec<(u32, u32)>> {
    let mut found = vec![];
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        // A process may end during the listing.
        let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
        let after_name = stat.rsplit_once(") ").map(|(_, rest)| rest);
        let parent = after_name.and_then(|rest| rest.split(' ').nth(1));
        found.push((pid, parent.context("a stat line without a parent")?.parse()?));
    }
    Ok(found)
}

/// Ticks since boot of the processors that this process may use.
#[derive(Clone, Copy)]
pub(crate) struct CpuTicks {
    all: u64,
    idle: u64,
    /// Ticks that the hypervisor gave to other guests.
    stolen: u64,
}

impl CpuTicks {
    pub(crate) fn now(cpus: &[usize]) -> Result<Self> {
        let mut sum = Self { all: 0, idle: 0, stolen: 0 };
        for line in fs::read_to_string("/proc/stat")?.lines() {
            let mut words = line.split_whitespace();
            let name = words.next().unwrap_or_default();
            if !cpus.iter().any(|cpu| name == format!("cpu{cpu}")) {
                continue;
            }
            let ticks: Vec<u64> = words.map(str::parse).collect::<Result<_, _>>()?;
            // user nice system idle iowait irq softirq steal; guests are included in user.
            sum.all += ticks.iter().take(8).sum::<u64>();
            sum.idle += ticks[3] + ticks[4];
            sum.stolen += ticks[7];
        }
        Ok(sum)
    }

    /// Returns the shares of the time since `earlier` in which these processors worked, and were stolen.
    pub(crate) fn since(self, earlier: Self) -> (f64, f64) {
        let all = (self.all - earlier.all).max(1) as f64;
        let idle = (self.idle - earlier.idle) as f64;
        let stolen = (self.stolen - earlier.stolen) as f64;
        ((all - idle - stolen) / all, stolen / all)
    }
}

/// Confines this process, and all processes that it starts, to the last `count` processors it may use.
pub(crate) fn confine_to_cpus(count: usize) -> Result<Vec<usize>> {
    let allowed = sched_getaffinity(Pid::this())?;
    let usable = (0..CpuSet::count()).rev().filter(|cpu| allowed.is_set(*cpu).unwrap_or(false));
    let cpus: Vec<usize> = usable.take(count).collect();
    anyhow::ensure!(cpus.len() == count, "this machine offers only {} processors", cpus.len());
    let mut set = CpuSet::new();
    for cpu in &cpus {
        set.set(*cpu)?;
    }
    sched_setaffinity(Pid::from_raw(0), &set)?;
    Ok(cpus)
}

/// Returns how many files this process may open.
pub(crate) fn allowed_files() -> Result<usize> {
    Ok(usize::try_from(getrlimit(Resource::RLIMIT_NOFILE)?.0)?)
}

/// Lets this process, and all processes that it starts, open as many files as the machine allows.
pub(crate) fn raise_file_limit() -> Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?)
}
