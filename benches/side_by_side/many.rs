//! Measures many runs in one process: the cost of an idle run, and a thousand concurrent streams.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;

use crate::BenchArguments;
use crate::clock;
use crate::host;
use crate::measure::usual_percentiles;
use crate::meter::{self, ProcessTree};
use crate::stream::{self, StreamCourse};
use crate::subject::{BenchSubject, ProviderProcess, pause_for};
use crate::table::{ResultTable, RoundValue};

/// The numbers of runs and streams.
#[derive(Clone, Copy)]
struct ManyScale {
    runs: usize,
    streams: usize,
    chunks: u32,
}

impl ManyScale {
    const FULL: Self = Self { runs: 10_000, streams: 1000, chunks: 60 };
    const QUICK: Self = Self { runs: 200, streams: 20, chunks: 10 };
}

impl ManyScale {
    /// One run in this many streams.
    fn stride(self) -> usize {
        self.runs / self.streams
    }
}

/// Measures one process with that many runs and prints a table.
pub(crate) fn run(arguments: &BenchArguments) -> Result<()> {
    let scale = if arguments.quick { ManyScale::QUICK } else { ManyScale::FULL };
    meter::raise_file_limit()?;
    meter::confine_to_cpus(arguments.cpus)?;
    let provider = ProviderProcess::start()?;
    let mut table = ResultTable::default();
    for value in
        measure_idle(scale, &provider)?.into_iter().chain(measure_streams(scale, &provider)?)
    {
        table.record(BenchSubject::Ours, value);
    }
    writeln!(io::stdout(), "\n{}", table.render(&[BenchSubject::Ours]))?;
    let every = host::audit_stride(scale.runs, scale.stride())?;
    writeln!(io::stdout(), "Run number 0, {every}, {} … have an audit log.", 2 * every)?;
    Ok(())
}

/// Measures the process while nothing happens on any socket.
fn measure_idle(scale: ManyScale, provider: &ProviderProcess) -> Result<Vec<RoundValue>> {
    let alone = ManyHost::start(1, 1, provider)?.tree.memory()?;
    let host = ManyHost::start(scale.runs, scale.stride(), provider)?;
    let all = host.tree.memory()?;
    let before = host.tree.cpu()?;
    pause_for(LOOK);
    let share = (host.tree.cpu()? - before) as f64 / LOOK.as_nanos() as f64;
    let per_run = (all.resident - alone.resident) / (scale.runs - 1) as f64;
    let runs = scale.runs;
    Ok(vec![
        RoundValue::lower(format!("{runs} runs: ready after ms"), host.start as f64 / 1e6),
        RoundValue::lower(format!("{runs} idle runs: RSS MiB"), all.resident / 1024.0),
        RoundValue::lower(format!("{runs} idle runs: KiB per run"), per_run),
        RoundValue::lower(format!("{runs} idle runs: CPU % of one processor"), 100.0 * share),
    ])
}

/// Measures one stream on each of some sockets, at the pace of a slow model.
fn measure_streams(scale: ManyScale, provider: &ProviderProcess) -> Result<Vec<RoundValue>> {
    let host = ManyHost::start(scale.runs, scale.stride(), provider)?;
    let idle = host.tree.memory()?;
    let runs = (0..scale.runs).step_by(scale.stride());
    let sockets: Vec<PathBuf> = runs.map(|run| host::socket_path(host.dir.path(), run)).collect();
    let course = StreamCourse {
        streams: scale.streams,
        stagger: Duration::from_micros(1020),
        chunks: scale.chunks,
        interval: Duration::from_millis(100),
    };
    let (mut busy, mut cpu) = (idle, vec![]);
    let seen = stream::run(course, &sockets, || {
        busy = host.tree.memory()?;
        cpu.push(host.tree.cpu()?);
        Ok(())
    })?;
    if seen.lags.is_empty() {
        return Ok(vec![]);
    }
    let name = format!("{} streams of {} runs", scale.streams, scale.runs);
    let per_stream = (busy.resident - idle.resident) / scale.streams as f64;
    let per_chunk = cpu.last().zip(cpu.first()).map_or(0, |(after, before)| after - before);
    let mut values = usual_percentiles(&format!("{name}: chunk lag"), &seen.lags);
    values.extend(usual_percentiles(&format!("{name}: time to first byte"), &seen.first_bytes));
    values.push(RoundValue::lower(
        format!("{name}: CPU µs/chunk"),
        per_chunk as f64 / 1e3 / seen.lags.len() as f64,
    ));
    values.push(RoundValue::lower(format!("{name}: KiB per open stream"), per_stream));
    Ok(values)
}

/// The process with the runs.
struct ManyHost {
    child: Child,
    tree: ProcessTree,
    /// The time from the start of the process until the last socket was bound, in nanoseconds.
    start: u64,
    dir: TempDir,
}

impl ManyHost {
    fn start(runs: usize, stride: usize, provider: &ProviderProcess) -> Result<Self> {
        let dir = TempDir::new()?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--host").arg(dir.path());
        command.args(["--runs", &runs.to_string(), "--stride", &stride.to_string()]);
        command.args(["--port", &provider.port().to_string()]);
        let started_at = clock::monotonic_nanos();
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        let stdout = child.stdout.take().context("its stdout was piped")?;
        BufReader::new(stdout).read_line(&mut line)?;
        ensure!(line == "ready\n", "the process with the runs did not start");
        let start = clock::monotonic_nanos() - started_at;
        let tree = ProcessTree::of(child.id())?;
        Ok(Self { child, tree, start, dir })
    }
}

impl Drop for ManyHost {
    fn drop(&mut self) {
        // Closing its stdin ends the process.
        drop(self.child.stdin.take());
        let _ended = self.child.wait();
    }
}

/// The time for which an idle process is observed.
const LOOK: Duration = Duration::from_secs(2);
