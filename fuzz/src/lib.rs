//! Runs the fuzz targets in two ways, with the same text of each target.
//!
//! - `cargo fuzz run sse` (nightly): libFuzzer, guided by coverage.
//! - `tests/run fuzz` (stable): [`drive_target`] feeds each target mutated samples for some seconds. It is blind to
//!   coverage, so it starts from real material: `fuzz/seeds/NAME`, the recordings in `tests/fixtures`, and what
//!   libFuzzer has found so far, in `fuzz/corpus/NAME`.
//!
//! A target is a file in `fuzz_targets`, named in `Cargo.toml`:
//!
//! ```ignore
//! //! What holds for any input.
//! #![cfg_attr(fuzzing, no_main)]
//!
//! cogni_gateway_fuzz::fuzz_target!(|data: &[u8]| { … });
//! ```
//!
//! An input that breaks a target is kept in `fuzz/artifacts/NAME`. Give its path to the target to see it fail again.

mod mutate;

use std::ffi::OsString;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Makes a program of a function that takes bytes and must not panic.
#[macro_export]
macro_rules! fuzz_target {
    (|$data:ident: &[u8]| $body:block) => {
        #[cfg(fuzzing)]
        libfuzzer_sys::fuzz_target!(|$data: &[u8]| $body);

        #[cfg(not(fuzzing))]
        fn main() -> std::process::ExitCode {
            $crate::drive_target(env!("CARGO_BIN_NAME"), |$data: &[u8]| $body)
        }
    };
}

/// Runs `check` on the files named on the command line, or on mutated samples for `--seconds N`.
pub fn drive_target(name: &str, check: impl Fn(&[u8])) -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let inputs = match arguments.as_slice() {
        [flag, seconds] if flag == "--seconds" => {
            match seconds.to_str().and_then(|s| s.parse().ok()) {
                Some(seconds) => return run_for(name, Duration::from_secs(seconds), check),
                None => return print_usage(name),
            }
        }
        [] => return print_usage(name),
        files => files,
    };
    for file in inputs {
        check(&fs::read(file).expect("the input can be read"));
        println!("{name}: {} passes", Path::new(file).display());
    }
    ExitCode::SUCCESS
}

fn run_for(name: &str, time: Duration, check: impl Fn(&[u8])) -> ExitCode {
    let home = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut samples = vec![];
    let own = ["seeds", "corpus"].map(|kind| home.join(kind).join(name));
    for folder in own.into_iter().chain([home.join("../tests/fixtures")]) {
        collect_samples(&folder, &mut samples);
    }
    let seeds = samples.len();
    // A fixed seed: the inputs are the same on every machine, and only their number differs.
    let mut mutator = mutate::SampleMutator::new(samples, 0x00c0_6e1f);
    let begun = Instant::now();
    let mut count = 0_u64;
    while begun.elapsed() < time {
        let input = mutator.next();
        if panic::catch_unwind(AssertUnwindSafe(|| check(input))).is_err() {
            let kept = keep_input(&home.join("artifacts").join(name), input);
            println!(
                "{name}: FAILED on input {count}; see it again: target/debug/{name} {}",
                kept.display()
            );
            return ExitCode::FAILURE;
        }
        count += 1;
    }
    println!("{name}: {count} inputs from {seeds} samples in {} s, none broke it", time.as_secs());
    ExitCode::SUCCESS
}

/// Collects every file under `folder`, ordered by path. A missing folder has none.
fn collect_samples(folder: &Path, samples: &mut Vec<Vec<u8>>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| entry.expect("a readable folder").path()).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            collect_samples(&path, samples);
        } else {
            samples.push(fs::read(path).expect("a readable sample"));
        }
    }
}

fn keep_input(folder: &Path, input: &[u8]) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    input.hash(&mut hasher);
    let path = folder.join(format!("crash-{:016x}", hasher.finish()));
    fs::create_dir_all(folder).expect("a folder for what broke the target");
    fs::write(&path, input).expect("what broke the target can be kept");
    path
}

fn print_usage(name: &str) -> ExitCode {
    eprintln!("usage: {name} --seconds N | {name} FILE…");
    ExitCode::from(2)
}
