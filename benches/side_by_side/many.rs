//! Measures many runs in one process: the cost of an idle run, and a thousand concurrent streams.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;

use crate::Arguments;
use crate::clock;
use crate::host;
use crate::measure::percentiles;
use crate::meter::{self, Tree};
use crate::stream::{self, Course};
use crate::subject::{Provider, Subject, pause};
use crate::table::{Table, Value};

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
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let scale = if arguments.quick { ManyScale::QUICK } else { ManyScale::FULL };
    meter::raise_file_limit()?;
    meter::confine(arguments.cpus)?;
    let provider = Provider::start()?;
    let mut table = Table::default();
    for value in idle(scale, &provider)?.into_iter().chain(streaming(scale, &provider)?) {
        table.record(Subject::Ours, value);
    }
    writeln!(io::stdout(), "\n{}", table.render(&[Subject::Ours]))?;
    let every = host::audited(scale.runs, scale.stride())?;
    writeln!(io::stdout(), "Run number 0, {every}, {} … have an audit log.", 2 * every)?;
    Ok(())
}

/// Measures the process while nothing happens on any socket.
fn idle(scale: ManyScale, provider: &Provider) -> Result<Vec<Value>> {
    let alone = ManyHost::start(1, 1, provider)?.tree.memory()?;
    let host = ManyHost::start(scale.runs, scale.stride(), provider)?;
    let all = host.tree.memory()?;
    let before = host.tree.cpu()?;
    pause(LOOK);
    let share = (host.tree.cpu()? - before) as f64 / LOOK.as_nanos() as f64;
    let per_run = (all.resident - alone.resident) / (scale.runs - 1) as f64;
    let runs = scale.runs;
    Ok(vec![
        Value::lower(format!("{runs} runs: ready after ms"), host.start as f64 / 1e6),
        Value::lower(format!("{runs} idle runs: RSS MiB"), all.resident / 1024.0),
        Value::lower(format!("{runs} idle runs: KiB per run"), per_run),
        Value::lower(format!("{runs} idle runs: CPU % of one processor"), 100.0 * share),
    ])
}

/// Measures one stream on each of some sockets, at the pace of a slow model.
fn streaming(scale: ManyScale, provider: &Provider) -> Result<Vec<Value>> {
    let host = ManyHost::start(scale.runs, scale.stride(), provider)?;
    let idle = host.tree.memory()?;
    let runs = (0..scale.runs).step_by(scale.stride());
    let sockets: Vec<PathBuf> = runs.map(|run| host::socket(host.dir.path(), run)).collect();
    let course = Course {
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
    let mut values = percentiles(&format!("{name}: chunk lag"), &seen.lags);
    values.extend(percentiles(&format!("{name}: time to first byte"), &seen.first_bytes));
    values.push(Value::lower(
        format!("{name}: CPU µs/chunk"),
        per_chunk as f64 / 1e3 / seen.lags.len() as f64,
    ));
    values.push(Value::lower(format!("{name}: KiB per open stream"), per_stream));
    Ok(values)
}

/// The process with the runs.
struct ManyHost {
    child: Child,
    tree: Tree,
    /// The time from the start of the process until the last socket was bound, in nanoseconds.
    start: u64,
    dir: TempDir,
}

impl ManyHost {
    fn start(runs: usize, stride: usize, provider: &Provider) -> Result<Self> {
        let dir = TempDir::new()?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--host").arg(dir.path());
        command.args(["--runs", &runs.to_string(), "--stride", &stride.to_string()]);
        command.args(["--port", &provider.port().to_string()]);
        let started_at = clock::now();
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        let stdout = child.stdout.take().context("its stdout was piped")?;
        BufReader::new(stdout).read_line(&mut line)?;
        ensure!(line == "ready\n", "the process with the runs did not start");
        let start = clock::now() - started_at;
        let tree = Tree::of(child.id())?;
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

/// How long an idle process is observed.
const LOOK: Duration = Duration::from_secs(2);
