//! Our sandboxes beside others of this machine, in one run: how soon a program says its first word, how soon all is
//! over, how many there are in a second, and what one that waits takes of memory.
//!
//! `cargo bench --bench sandbox -- [--quick | --test] [--rounds COUNT] [--only NAME] [--run-dir DIR]`. What is not on
//! this machine is said to be `not here`. It needs root.
//!
//! How it is kept honest:
//! - Every subject runs `sh -c 'echo up'`; the first byte is timed where it arrives, which is here.
//! - In a round each subject has one run, and every round begins with another one; ratios are taken round by round.
//! - Ours are what a server would have: no process is started for them but their own, and each has its gateway, which
//!   the others do not have. The others are started as their command lines, which is how they are used.
//! - Runs have their directories in memory, which is where `/run` is on most machines; on a disk, taking one away takes
//!   longer than the run.
//! - `docker run` has the flags of our own containers, runc our own `config.json` but for the filter of system calls,
//!   which it knows in another form. bwrap has no limits on memory, processes and processors: it knows none.
#![expect(
    clippy::cast_precision_loss,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a bench is not production code"
)]

mod idle;
mod others;
mod ours;

use std::env;
use std::time::{Duration, Instant};

use ours::Ours;

/// What one run took.
#[derive(Clone, Copy)]
struct Took {
    first: Duration,
    whole: Duration,
}

/// A way to run the program, or why there is none here.
struct Subject {
    name: &'static str,
    way: Result<Way, String>,
    took: Vec<Took>,
}

enum Way {
    Ours(Box<Ours>),
    Other(others::Bundle),
}

struct Scale {
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
        (true, _) => Scale { rounds: 1, parallel: &[1], runs: 1 },
        (_, true) => Scale { rounds: 5, parallel: &[1, 8], runs: 8 },
        _ => Scale { rounds: 100, parallel: &[1, 8, 32], runs: 64 },
    };
    if let Some(rounds) = value("--rounds") {
        scale.rounds = rounds.parse().expect("`--rounds` is a number");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let guard = runtime.enter();
    let folder = tempfile::tempdir_in(value("--run-dir").unwrap_or("/dev/shm".to_owned())).unwrap();
    let path = folder.path().canonicalize().unwrap();
    let mut subjects = subjects(&path);
    if let Some(only) = value("--only") {
        subjects.retain(|subject| subject.name.contains(&only));
    }
    for round in 0..scale.rounds {
        for place in 0..subjects.len() {
            let place = (place + round) % subjects.len();
            let Subject { way, took, .. } = &mut subjects[place];
            if let Ok(way) = way {
                took.push(way.once());
            }
        }
    }
    print_times(&subjects);
    print_rates(&subjects, &scale);
    idle::print(&subjects);
    for subject in subjects {
        if let Ok(Way::Ours(ours)) = subject.way {
            ours.end();
        }
    }
    drop(guard);
    runtime.shutdown_timeout(Duration::from_secs(5));
}

fn subjects(path: &std::path::Path) -> Vec<Subject> {
    let subject = |name, way| Subject { name, way, took: vec![] };
    let ours = |name, driver: &Result<_, String>, is_warm| {
        let made =
            driver.clone().map(|driver| Way::Ours(Box::new(Ours::new(driver, path, is_warm))));
        subject(name, made)
    };
    let other = |name, way: Result<_, String>| subject(name, way.map(Way::Other));
    let (embedded, docker) = (Ok(ours::embedded()), ours::docker());
    vec![
        ours("embedded", &embedded, false),
        ours("slot of embedded", &embedded, true),
        ours("docker", &docker, false),
        ours("slot of docker", &docker, true),
        other("docker run", others::docker_run()),
        other("runc", others::runc(path)),
        other("bwrap", others::bwrap()),
    ]
}

impl Way {
    fn once(&self) -> Took {
        match self {
            Self::Ours(ours) => ours.once(),
            Self::Other(bundle) => bundle.once(),
        }
    }

    /// Runs in a second; none where a run needs something to be there before.
    fn rate(&self, parallel: usize, runs: usize) -> Option<f64> {
        let begun = Instant::now();
        match self {
            Self::Ours(ours) if ours.is_warm() => return None,
            Self::Ours(ours) => ours.many(parallel, runs),
            Self::Other(bundle) => bundle.many(parallel, runs),
        }
        Some(runs as f64 / begun.elapsed().as_secs_f64())
    }
}

fn print_times(subjects: &[Subject]) {
    println!(
        "{:18} {:>10} {:>10} {:>10} {:>10} {:>13}",
        "milliseconds", "first p50", "p99", "whole p50", "p99", "of docker run"
    );
    let base = subjects.iter().find(|subject| subject.name == "docker run");
    for Subject { name, way, took } in subjects {
        if let Err(why) = way {
            println!("{name:18} not here: {why}");
            continue;
        }
        let of = |what: fn(&Took) -> Duration| took.iter().map(|took| millis(what(took))).collect();
        let (first, whole): (Vec<_>, Vec<_>) = (of(|took| took.first), of(|took| took.whole));
        let pairs = base.map_or(&[][..], |base| &base.took).iter().zip(took);
        let ratios: Vec<_> =
            pairs.map(|(base, took)| took.whole.as_secs_f64() / base.whole.as_secs_f64()).collect();
        let ratio =
            if ratios.is_empty() { "-".to_owned() } else { format!("{:.2}", part(ratios, 50)) };
        println!(
            "{name:18} {:>10.1} {:>10.1} {:>10.1} {:>10.1} {ratio:>13}",
            part(first.clone(), 50),
            part(first, 99),
            part(whole.clone(), 50),
            part(whole, 99),
        );
    }
}

fn print_rates(subjects: &[Subject], scale: &Scale) {
    println!("\nruns in a second, so many at a time");
    for Subject { name, way, .. } in subjects {
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

/// Of a hundred, the value that so many do not exceed.
fn part(mut values: Vec<f64>, hundredths: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(values.len() * hundredths / 100).min(values.len() - 1)]
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
