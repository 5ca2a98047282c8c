//! This process's own log, on standard error. A slow reader of standard error never blocks the process.

mod json;
mod text;

use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::JsonFields;

use crate::telemetry::access_log::{AccessLogFormat, FORMAT_VARIABLE};

/// The log's queue, and its thread.
pub(super) struct StderrLog {
    lines: SyncSender<LogCommand>,
}

/// A writer that queues one line per call, as the subscriber writes.
#[derive(Clone)]
struct LogLineWriter(SyncSender<LogCommand>);

enum LogCommand {
    Line(Vec<u8>),
    /// Reports that every earlier line is written.
    Finish(SyncSender<()>),
}

impl StderrLog {
    /// Starts the log: readable text, or JSON if `LOG_FORMAT=json`. A level of a flag overrides `LOG`, and `LOG`
    /// overrides the command's default level.
    pub(super) fn start(requested: Option<&str>, level: &str) -> io::Result<Self> {
        // A bounded queue to a thread: only that thread waits for standard error.
        let (lines, commands) = sync_channel(MAX_QUEUED_LINES);
        thread::Builder::new().name("log".to_owned()).spawn(move || write_lines(&commands))?;
        let filter = match requested {
            Some(requested) => filter_at(requested),
            // An invalid `LOG` falls back to the default level: a log setting must not stop a process.
            None => EnvFilter::try_from_env("LOG").unwrap_or_else(|_| filter_at(level)),
        };
        let writer = LogLineWriter(lines.clone());
        let log = tracing_subscriber::fmt().with_env_filter(filter);
        let log = log.with_writer(move || writer.clone());
        let format = std::env::var(FORMAT_VARIABLE).ok();
        if AccessLogFormat::from_variable(format.as_deref()) == AccessLogFormat::Json {
            log.fmt_fields(JsonFields::new()).event_format(json::JsonLogFormat).init();
        } else {
            let log = log.fmt_fields(text::text_fields());
            log.with_ansi(io::stderr().is_terminal()).init();
        }
        Ok(Self { lines })
    }

    /// Writes the last line of this process, and waits up to [`FLUSH_TIMEOUT`] for the queue.
    pub(super) fn finish(self, last: Option<String>) {
        let (done, is_done) = sync_channel(1);
        let mut lines = LogLineWriter(self.lines);
        if let Some(last) = last {
            let _ = writeln!(lines, "{last}");
        }
        // The queue is ordered, so that the answer comes after all earlier lines.
        if lines.0.try_send(LogCommand::Finish(done)).is_ok() {
            let _ = is_done.recv_timeout(FLUSH_TIMEOUT);
        }
    }
}

impl Write for LogLineWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // A line that does not fit is lost. Blocking here would stop the gateway because of its log.
        let _ = self.0.try_send(LogCommand::Line(line.to_vec()));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the filter for a level. Other crates only log errors: h2, hyper and rustls warn about clients' behaviour,
/// and a client could fill the log with such warnings.
fn filter_at(level: &str) -> EnvFilter {
    EnvFilter::new(format!("error,cogni_gateway={level}"))
}

fn write_lines(commands: &Receiver<LogCommand>) {
    while let Ok(command) = commands.recv() {
        match command {
            // A failed write is ignored: there is no other place to report it.
            LogCommand::Line(line) => drop(io::stderr().write_all(&line)),
            LogCommand::Finish(done) => drop(done.try_send(())),
        }
    }
}

/// The maximum number of lines that wait to be written. Our choice.
const MAX_QUEUED_LINES: usize = 1024;

/// The time to write the remaining lines when the process ends. Our choice.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
