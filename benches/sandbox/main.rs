//! Compares the gateway's sandboxes with others on this machine, in one session: the time until a program's first
//! output, the time until the end, runs per second, and the memory of a waiting sandbox.
//!
//! `cargo bench --bench sandbox -- [--quick | --test] [--rounds COUNT] [--only NAME] [--run-dir DIR]`. A subject that
//! this machine does not have is reported as `not here`. It needs root.
//!
//! How the comparison is kept fair:
//! - Every subject runs `sh -c 'echo up'`; the arrival of the first byte is timed here.
//! - Each subject has one run in a round, and every round begins with another subject; ratios are computed round by
//!   round.
//! - The gateway's sandboxes are made as in a server: only their own processes are started, and each has its gateway,
//!   which the others do not have. The others are started by their command lines, which is how they are used.
//! - Runs have their directories in memory, as `/run` is on most machines; on a disk, the removal of a directory takes
//!   longer than the run.
//! - `docker run` has the flags of the gateway's own containers, and runc has its `config.json`, except for the seccomp
//!   filter, which runc expects in another form. bwrap supports no limits of memory, processes and processors.
#![expect(
    clippy::cast_precision_loss,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a bench is not production code"
)]

mod idle;
mod other_runtimes;
mod own_driver;

use std::env;
use std::time::{Duration, Instant};

use own_driver::OwnDriver;

/// The times of one run.
#[derive(Clone, Copy)]
struct RunTimes {
    first: Duration,
    whole: Duration,
}

/// A way to run the program, or the reason why this machine does not have it.
struct StartSubject {
    name: &'static str,
    way: Result<StartMethod, String>,
    took: Vec<RunTimes>,
}

enum StartMethod {
    OwnDriver(Box<OwnDriver>),
    Other(other_runtimes::RuntimeBundle),
}

struct StartScale {
    rounds: usize,
    parallel: &'static [usize],
    runs: usize,
}

fn main() {
    let arguments: Vec<_> = env::args().collect();
    let value = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        arguments.get(at + 1).cloned()
    };
    let has = |name: &str| arguments.iter().any(|argument| argument == name);
    let mut scale = match (has("--test"), has("--quick")) {
        (true, _) => StartScale { rounds: 1, parallel: &[1], runs: 1 },
        (_, true) => StartScale { rounds: 5, parallel: &[1, 8], runs: 8 },
        _ => StartScale { rounds: 100, parallel: &[1, 8, 32], runs: 64 },
    };
    if let Some(rounds) = value("--rounds") {
        scale.rounds = rounds.parse().expect("`--rounds` is a number");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let guard = runtime.enter();
    let folder = tempfile::tempdir_in(value("--run-dir").unwrap_or("/dev/shm".to_owned())).unwrap();
    let path = folder.path().canonicalize().unwrap();
    let mut subjects = list_subjects(&path);
    if let Some(only) = value("--only") {
        subjects.retain(|subject| subject.name.contains(&only));
    }
    for round in 0..scale.rounds {
        for place in 0..subjects.len() {
            let place = (place + round) % subjects.len();
            let StartSubject { way, took, .. } = &mut subjects[place];
            if let Ok(way) = way {
                took.push(way.run_once());
            }
        }
    }
    print_times(&subjects);
    print_rates(&subjects, &scale);
    idle::print_idle(&subjects);
    for subject in subjects {
        if let Ok(StartMethod::OwnDriver(ours)) = subject.way {
            ours.end_pool();
        }
    }
    drop(guard);
    runtime.shutdown_timeout(Duration::from_secs(5));
}

fn list_subjects(path: &std::path::Path) -> Vec<StartSubject> {
    let subject = |name, way| StartSubject { name, way, took: vec![] };
    let ours = |name, driver: &Result<_, String>, is_warm| {
        let made = driver
            .clone()
            .map(|driver| StartMethod::OwnDriver(Box::new(OwnDriver::new(driver, path, is_warm))));
        subject(name, made)
    };
    let other = |name, way: Result<_, String>| subject(name, way.map(StartMethod::Other));
    let (embedded, docker) = (Ok(own_driver::embedded_driver()), own_driver::docker_driver());
    vec![
        ours("embedded", &embedded, false),
        ours("slot of embedded", &embedded, true),
        ours("docker", &docker, false),
        ours("slot of docker", &docker, true),
        other("docker run", other_runtimes::docker_run()),
        other("runc", other_runtimes::runc_bundle(path)),
        other("bwrap", other_runtimes::bwrap_bundle()),
    ]
}

impl StartMethod {
    fn run_once(&self) -> RunTimes {
        match self {
            Self::OwnDriver(ours) => ours.run_once(),
            Self::Other(bundle) => bundle.run_once(),
        }
    }

    /// Returns the runs per second; `None` if a run needs something that must be made before.
    fn rate(&self, parallel: usize, runs: usize) -> Option<f64> {
        let begun = Instant::now();
        match self {
            Self::OwnDriver(ours) if ours.is_warm() => return None,
            Self::OwnDriver(ours) => ours.run_many(parallel, runs),
            Self::Other(bundle) => bundle.run_many(parallel, runs),
        }
        Some(runs as f64 / begun.elapsed().as_secs_f64())
    }
}

fn print_times(subjects: &[StartSubject]) {
    println!(
        "{:18} {:>10} {:>10} {:>10} {:>10} {:>13}",
        "milliseconds", "first p50", "p99", "whole p50", "p99", "of docker run"
    );
    let base = subjects.iter().find(|subject| subject.name == "docker run");
    for StartSubject { name, way, took } in subjects {
        if let Err(why) = way {
            println!("{name:18} not here: {why}");
            continue;
        }
        let of = |what: fn(&RunTimes) -> Duration| {
            took.iter().map(|took| as_millis(what(took))).collect()
        };
        let (first, whole): (Vec<_>, Vec<_>) = (of(|took| took.first), of(|took| took.whole));
        let pairs = base.map_or(&[][..], |base| &base.took).iter().zip(took);
        let ratios: Vec<_> =
            pairs.map(|(base, took)| took.whole.as_secs_f64() / base.whole.as_secs_f64()).collect();
        let ratio = if ratios.is_empty() {
            "-".to_owned()
        } else {
            format!("{:.2}", percentile_of(ratios, 50))
        };
        println!(
            "{name:18} {:>10.1} {:>10.1} {:>10.1} {:>10.1} {ratio:>13}",
            percentile_of(first.clone(), 50),
            percentile_of(first, 99),
            percentile_of(whole.clone(), 50),
            percentile_of(whole, 99),
        );
    }
}

fn print_rates(subjects: &[StartSubject], scale: &StartScale) {
    println!("\nruns in a second, so many at a time");
    for StartSubject { name, way, .. } in subjects {
        let Ok(way) = way else { continue };
        let rates = scale.parallel.iter().filter_map(|parallel| {
            let rate = way.rate(*parallel, scale.runs.max(*parallel))?;
            Some(format!("{parallel:>4}: {rate:>7.1}"))
        });
        let rates: Vec<_> = rates.collect();
        if !rates.is_empty() {
            println!("{name:18} {}", rates.join("  "));
        }
    }
}

/// Returns the value that this many of a hundred do not exceed.
fn percentile_of(mut values: Vec<f64>, hundredths: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(values.len() * hundredths / 100).min(values.len() - 1)]
}

fn as_millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
