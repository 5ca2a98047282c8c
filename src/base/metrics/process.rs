//! The resources that the process uses, under the metric names of all Prometheus clients.
//!
//! Each scrape reads `/proc/self`: four small reads, about 20 µs.

use std::collections::HashMap;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus::core::{Collector, Desc};
use prometheus::proto::{Counter, Gauge, Metric, MetricFamily, MetricType};

use super::count_as_f64;

/// Collects the metrics `process_*`. A value that cannot be read is left out.
#[derive(Debug)]
pub struct ProcessCollector {
    descs: Vec<Desc>,
    started: SystemTime,
}

impl ProcessCollector {
    /// Creates the collector. The time of this call counts as the start of the process, so the process creates the
    /// collector before its first listener.
    pub fn new() -> prometheus::Result<Self> {
        let desc = |(name, help): (&str, &str)| {
            Desc::new(name.into(), help.into(), vec![], HashMap::new())
        };
        let descs = PROCESS_FAMILIES.into_iter().map(desc).collect::<Result<_, _>>()?;
        Ok(Self { descs, started: SystemTime::now() })
    }

    fn read_values(&self) -> [Option<f64>; PROCESS_FAMILIES.len()] {
        let stat = fs::read_to_string("/proc/self/stat").ok();
        let status = fs::read_to_string("/proc/self/status").ok();
        let limits = fs::read_to_string("/proc/self/limits").ok();
        [
            stat.as_deref().and_then(parse_cpu_seconds),
            limits.as_deref().and_then(parse_max_fds),
            count_open_fds(),
            status.as_deref().and_then(|status| parse_bytes(status, "VmRSS:")),
            self.started.duration_since(UNIX_EPOCH).ok().map(|since| since.as_secs_f64()),
            status.as_deref().and_then(|status| parse_bytes(status, "VmSize:")),
        ]
    }
}

impl Collector for ProcessCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let figures = PROCESS_FAMILIES.into_iter().zip(self.read_values());
        figures.filter_map(|((name, help), value)| Some(gauge_family(name, help, value?))).collect()
    }
}

fn gauge_family(name: &str, help: &str, value: f64) -> MetricFamily {
    let mut metric = Metric::default();
    let mut family = MetricFamily::default();
    if name.ends_with("_total") {
        let mut counter = Counter::default();
        counter.set_value(value);
        metric.set_counter(counter);
        family.set_field_type(MetricType::COUNTER);
    } else {
        let mut gauge = Gauge::default();
        gauge.set_value(value);
        metric.set_gauge(gauge);
        family.set_field_type(MetricType::GAUGE);
    }
    family.set_name(name.to_owned());
    family.set_help(help.to_owned());
    family.set_metric(vec![metric]);
    family
}

/// Returns the sum of the fields 14 and 15 of `/proc/self/stat` in seconds (`proc_pid_stat(5)`). The command, field 2,
/// may contain spaces and brackets, so the fields are counted after its last bracket.
fn parse_cpu_seconds(stat: &str) -> Option<f64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut ticks = fields.split_ascii_whitespace().skip(11).map(str::parse::<f64>);
    let (user, system) = (ticks.next()?.ok()?, ticks.next()?.ok()?);
    Some((user + system) / TICKS_PER_SECOND)
}

/// Returns the value of a line of `/proc/self/status` in bytes. The file counts in KiB.
fn parse_bytes(status: &str, key: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    let kibibytes: f64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kibibytes * 1024.0)
}

fn parse_max_fds(limits: &str) -> Option<f64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    let soft = line.split_ascii_whitespace().next()?;
    if soft == "unlimited" { Some(f64::INFINITY) } else { soft.parse().ok() }
}

/// Counts the open file descriptors. Linux 6.2 and later report the number as the size of the directory. On earlier
/// kernels the entries are counted, without the descriptor that reads them.
fn count_open_fds() -> Option<f64> {
    let size = fs::metadata("/proc/self/fd").ok()?.len();
    let open = if size > 0 { size } else { fs::read_dir("/proc/self/fd").ok()?.count() as u64 - 1 };
    Some(count_as_f64(open))
}

/// The name and the help text of each metric, in the order of `ProcessCollector::read_values`.
const PROCESS_FAMILIES: [(&str, &str); 6] = [
    (
        "process_cpu_seconds_total",
        "Counts the seconds of user and system CPU time that the process has spent.",
    ),
    ("process_max_fds", "Shows the limit on open file descriptors."),
    ("process_open_fds", "Shows the open file descriptors."),
    ("process_resident_memory_bytes", "Shows the resident memory in bytes."),
    ("process_start_time_seconds", "Shows the start of the process in seconds since the epoch."),
    ("process_virtual_memory_bytes", "Shows the virtual memory in bytes."),
];

/// The unit of CPU times in `/proc` (`USER_HZ`). It is 100 on every architecture that we build for.
const TICKS_PER_SECOND: f64 = 100.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_with_brackets_does_not_shift_the_fields() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 500 0 0 0 150 50 0 0 20 0 4 0 99 1000 20 1";
        assert_eq!(parse_cpu_seconds(stat), Some(2.0));
    }

    #[test]
    fn status_and_limits_are_read_by_name() {
        assert_eq!(parse_bytes("Name:\tx\nVmRSS:\t    2984 kB\n", "VmRSS:"), Some(2984.0 * 1024.0));
        assert_eq!(parse_bytes("Name:\tx\n", "VmRSS:"), None);
        let limits = "Limit  Soft  Hard  Units\nMax open files            1024                 4096                 files\n";
        assert_eq!(parse_max_fds(limits), Some(1024.0));
    }

    #[test]
    fn every_figure_is_there_on_linux() {
        let read = ProcessCollector::new().unwrap().read_values();
        assert!(read.iter().all(Option::is_some), "{read:?}");
    }
}
