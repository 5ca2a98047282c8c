//! The access log: one line of `key=value` pairs per request, for the readers nginx had (G2).
//!
//! ```text
//! time=2026-11-21T22:53:07.412Z runId=run-7 attempt=0 method=POST uri=/v1/chat/completions status=200 …
//! ```
//!
//! A request appends its line to a buffer and goes on. One thread takes what has come together, after
//! 64 KiB or 100 ms, and writes it with one call: a disk that is slow or a pipe nobody reads holds up
//! that thread and no request. What cannot be written is lost, counted, and warned about once.
//!
//! Requests that make no call, answered by us or refused, can come by the ten thousand a second, and nothing limits
//! them. Of a run's, the first of each second have lines; then one line with `outcome=repeated` has `repeats=`, the
//! number of the others, at its end.
//!
//! **Invariant:** every line has every key of [`FIELD_KEYS`], in that order, and no value holds a space, a
//! quote, `=` or a control character, whatever a client or an upstream sent.

mod entry;
mod flood_limiter;
mod writer;

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use serde::{Deserialize, Deserializer};

use crate::base::sanitize::SanitizedText;
use crate::base::trace_context::TraceId;

pub use entry::{AccessLogEntry, FIELD_KEYS};

use entry::AccessLogRunFields;
use flood_limiter::LineFloodLimiter;
use writer::{AccessLogRotation, AccessLogWriter};

/// The access log of one run. Clones, and logs of other runs made from it, share the destination.
#[derive(Clone, Debug)]
pub struct AccessLog {
    constant: AccessLogRunFields,
    destination: AccessLogDestination,
    writer: Option<Arc<AccessLogWriter>>,
    /// Of requests that made no call.
    flood: Arc<LineFloodLimiter>,
}

/// Where the lines go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AccessLogDestination {
    Off,
    #[default]
    Stdout,
    Stderr,
    File(PathBuf),
}

/// Whose requests are logged.
#[derive(Clone, Copy, Debug)]
pub struct AccessLogIdentity<'a> {
    pub run: &'a str,
    pub attempt: &'a str,
}

#[derive(Debug, thiserror::Error)]
pub enum AccessLogError {
    #[error(
        "cannot open the access log `{destination}`; name a file in a directory that this user may write, `-` for stdout, or `off`"
    )]
    Open { destination: AccessLogDestination, source: io::Error },
    #[error("cannot start the thread that writes the access log")]
    Thread(#[source] io::Error),
}

impl AccessLog {
    /// Opens the destination; a file is appended to, or created with mode 0640.
    ///
    /// # Errors
    /// The destination cannot be opened, or the writer's thread not be started.
    pub fn open_log(
        destination: &AccessLogDestination,
        identity: &AccessLogIdentity<'_>,
    ) -> Result<Self, AccessLogError> {
        Self::open_with_max_size(destination, identity, MAX_FILE_BYTES)
    }

    /// Opens the destination. A file of `max_bytes` is moved to its name with `.1`, and begun anew.
    ///
    /// # Errors
    /// As for [`open`](Self::open_log).
    pub fn open_with_max_size(
        destination: &AccessLogDestination,
        identity: &AccessLogIdentity<'_>,
        max_bytes: u64,
    ) -> Result<Self, AccessLogError> {
        let rotation = destination
            .file_path()
            .map(|path| AccessLogRotation { path: path.to_owned(), max_bytes });
        let start = |output| {
            AccessLogWriter::start_thread(output, rotation)
                .map(Arc::new)
                .map_err(AccessLogError::Thread)
        };
        let writer = destination.open_output()?.map(start).transpose()?;
        let constant =
            AccessLogRunFields { identity: identity.run_fields(), trace: NO_TRACE.into() };
        let flood = Arc::default();
        Ok(Self { constant, destination: destination.clone(), writer, flood })
    }

    /// A log for another run, to the same destination.
    #[must_use]
    pub fn for_run(&self, identity: &AccessLogIdentity<'_>) -> Self {
        let constant =
            AccessLogRunFields { identity: identity.run_fields(), ..self.constant.clone() };
        Self { constant, flood: Arc::default(), ..self.clone() }
    }

    /// The same log of a run that is part of a trace.
    #[must_use]
    pub fn with_trace(mut self, trace: &TraceId) -> Self {
        self.constant.trace = trace.to_string().into();
        self
    }

    /// Appends a line. Never waits for the destination. Of requests that made no call, only the first of each
    /// second have a line; the others are counted in one more.
    pub fn write_entry(&self, line: &AccessLogEntry<'_>) {
        let Some(writer) = &self.writer else { return };
        let mut is_written = true;
        if line.upstream_time.is_none() {
            let repeats;
            (is_written, repeats) = self.flood.count_line(line.time);
            self.append_repeats(line.time, repeats);
        }
        if is_written {
            writer.append_line(|buffer, clock| line.append_to(&self.constant, clock, buffer));
        }
    }

    /// Writes down what is counted and has no line yet, at the end of a run.
    pub fn write_repeats(&self) {
        self.append_repeats(SystemTime::now(), self.flood.take_suppressed());
    }

    fn append_repeats(&self, time: SystemTime, repeats: u64) {
        if let Some(writer) = self.writer.as_ref().filter(|_| repeats > 0) {
            writer.append_line(|buffer, clock| {
                AccessLogEntry::for_repeats(time).append_to(&self.constant, clock, buffer);
                entry::append_repeats(repeats, buffer);
            });
        }
    }

    /// Has everything written that was appended so far, and waits for it, a second at most.
    pub fn flush_log(&self) {
        if let Some(writer) = &self.writer {
            writer.wait_flushed();
        }
    }

    /// Opens a file again under its name, after a rotation has moved it; stdout stays what it is.
    ///
    /// # Errors
    /// The file cannot be opened; lines go on into the old one.
    pub fn reopen_file(&self) -> Result<(), AccessLogError> {
        let (AccessLogDestination::File(_), Some(writer)) = (&self.destination, &self.writer)
        else {
            return Ok(());
        };
        if let Some(output) = self.destination.open_output()? {
            writer.replace_file(output);
        }
        Ok(())
    }

    /// Lines that could not be written so far.
    pub fn lost_lines(&self) -> u64 {
        self.writer.as_ref().map_or(0, |writer| writer.lost_lines())
    }
}

impl AccessLogDestination {
    fn file_path(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            Self::Off | Self::Stdout | Self::Stderr => None,
        }
    }

    /// Stdout is duplicated, not opened by name: behind `/dev/stdout` of a container is a pipe or a
    /// socket that belongs to someone else, which a user without rights cannot open again.
    fn open_output(&self) -> Result<Option<File>, AccessLogError> {
        let opened = match self {
            Self::Off => return Ok(None),
            Self::Stdout => io::stdout().as_fd().try_clone_to_owned().map(File::from),
            Self::Stderr => io::stderr().as_fd().try_clone_to_owned().map(File::from),
            Self::File(path) => open_file(path),
        };
        opened
            .map(Some)
            .map_err(|source| AccessLogError::Open { destination: self.clone(), source })
    }
}

/// `off`, `-` or `/dev/stdout`, `/dev/stderr`, else a path.
impl From<&str> for AccessLogDestination {
    fn from(name: &str) -> Self {
        match name {
            "off" => Self::Off,
            "-" | "/dev/stdout" => Self::Stdout,
            "/dev/stderr" => Self::Stderr,
            path => Self::File(path.into()),
        }
    }
}

impl<'de> Deserialize<'de> for AccessLogDestination {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(|name| Self::from(name.as_str()))
    }
}

impl fmt::Display for AccessLogDestination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Stdout => f.write_str("/dev/stdout"),
            Self::Stderr => f.write_str("/dev/stderr"),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

impl AccessLogIdentity<'_> {
    fn run_fields(&self) -> Arc<str> {
        let Self { run, attempt } = self;
        format!(
            "runId={} attempt={}",
            SanitizedText(run).to_text(),
            SanitizedText(attempt).to_text()
        )
        .into()
    }
}

fn open_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(FILE_MODE).open(path)
}

/// Bytes of a log that is a file, and of the one before it. Ours: three million requests each.
pub const MAX_FILE_BYTES: u64 = 1024 * 1024 * 1024;

/// As a line shows what there is not.
const NO_TRACE: &str = "-";

/// Readable for the group that collects logs, for nobody else.
const FILE_MODE: u32 = 0o640;
