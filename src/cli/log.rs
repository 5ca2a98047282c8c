//! Our own log, on standard error. Whoever reads it may be slow, or not read at all: that holds nobody here.

mod json;

use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::JsonFields;

/// What waits to be written, until it is finished.
pub(super) struct StderrLog {
    lines: SyncSender<LogCommand>,
}

/// One line at a time, as the subscriber writes them.
#[derive(Clone)]
struct LogLineWriter(SyncSender<LogCommand>);

enum LogCommand {
    Line(Vec<u8>),
    /// Say when everything before is written.
    Finish(SyncSender<()>),
}

impl StderrLog {
    /// Readable on a terminal, JSON for machines if `LOG_FORMAT=json`. What a flag asks for wins over `LOG`, and both
    /// over what the command logs by default.
    pub(super) fn start(asked: Option<&str>, level: &str) -> io::Result<Self> {
        let (lines, orders) = sync_channel(MAX_QUEUED_LINES);
        thread::Builder::new().name("log".to_owned()).spawn(move || write_lines(&orders))?;
        let filter = match asked {
            Some(asked) => filter_at(asked),
            None => EnvFilter::try_from_env("LOG").unwrap_or_else(|_| filter_at(level)),
        };
        let writer = LogLineWriter(lines.clone());
        let log = tracing_subscriber::fmt().with_env_filter(filter);
        let log = log.with_writer(move || writer.clone());
        if std::env::var("LOG_FORMAT").is_ok_and(|format| format == "json") {
            log.fmt_fields(JsonFields::new()).event_format(json::JsonLogFormat).init();
        } else {
            log.with_ansi(io::stderr().is_terminal()).init();
        }
        Ok(Self { lines })
    }

    /// The last words of this process, and a moment for all that was said before.
    pub(super) fn finish(self, last: Option<String>) {
        let (done, is_done) = sync_channel(1);
        let mut lines = LogLineWriter(self.lines);
        if let Some(last) = last {
            let _ = writeln!(lines, "{last}");
        }
        if lines.0.try_send(LogCommand::Finish(done)).is_ok() {
            let _ = is_done.recv_timeout(FLUSH_TIMEOUT);
        }
    }
}

impl Write for LogLineWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // What does not fit is lost, as it would be on a screen that nobody looks at.
        let _ = self.0.try_send(LogCommand::Line(line.to_vec()));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Ours at a level, and errors of the crates below us: h2, hyper and rustls warn of what a client does, who could fill the
/// log with that.
fn filter_at(level: &str) -> EnvFilter {
    EnvFilter::new(format!("error,cogni_gateway={level}"))
}

fn write_lines(orders: &Receiver<LogCommand>) {
    while let Ok(order) = orders.recv() {
        match order {
            LogCommand::Line(line) => drop(io::stderr().write_all(&line)),
            LogCommand::Finish(done) => drop(done.try_send(())),
        }
    }
}

/// Waiting to be written.
const MAX_QUEUED_LINES: usize = 1024;

/// For what is on its way when the process ends.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
