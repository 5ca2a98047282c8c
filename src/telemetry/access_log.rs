//! The access log: one line of `key=value` pairs per request, for readers that parsed nginx's log before (G2).
//!
//! ```text
//! time=2026-11-21T22:53:07.412Z runId=run-7 attempt=0 method=POST uri=/v1/chat/completions status=200 …
//! ```
//!
//! With `LOG_FORMAT=json`, a line is a JSON object with the same keys ([`AccessLogFormat`]).
//!
//! A request appends its line to a buffer and continues. A thread of the log takes the collected lines after 64 KiB or
//! 100 ms, and writes them in one call. A slow disk or a pipe without a reader therefore delays that thread and no
//! request. Lines that cannot be written are lost and counted; a warning is logged once.
//!
//! Requests that make no call, because the gateway answers or refuses them itself, can arrive by the ten thousand a
//! second without a limit. The first such requests of a run in each second have lines of their own. One further line
//! with `outcome=repeated` has the number of the others in `repeats=` at its end.
//!
//! **Invariant:** every line has every key of [`FIELD_KEYS`] in that order. In the text form, no value contains a space,
//! a quote, `=` or a control character, whatever a client or an upstream has sent. In JSON, such characters are escaped.

mod entry;
mod flood_limiter;
mod json_line;
mod writer;

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::{Deserialize, Deserializer};

use crate::base::sanitize::SanitizedText;
use crate::base::trace_context::TraceId;

pub use entry::{AccessLogEntry, FIELD_KEYS};

use entry::AccessLogRunFields;
use flood_limiter::LineFloodLimiter;
use writer::{AccessLogRotation, AccessLogWriter};

/// The access log of one run. Clones, and the logs of other runs made from this log, share the destination.
#[derive(Clone, Debug)]
pub struct AccessLog {
    constant: AccessLogRunFields,
    format: AccessLogFormat,
    destination: AccessLogDestination,
    writer: Option<Arc<AccessLogWriter>>,
    /// The limiter for lines of requests that made no call.
    flood: Arc<LineFloodLimiter>,
}

/// The destination of the lines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AccessLogDestination {
    Off,
    #[default]
    Stdout,
    Stderr,
    File(PathBuf),
}

/// The form of the lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessLogFormat {
    /// `key=value` pairs with one space between them.
    #[default]
    Text,
    /// A JSON object with the keys of the text form. Numbers are JSON numbers, and a missing value is `null`.
    Json,
}

/// The run whose requests are logged.
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
    #[error(
        "the access log `{}` is a named pipe that no process reads; start its reader first", path.display()
    )]
    UnreadPipe { path: PathBuf },
    #[error("cannot start the thread that writes the access log")]
    Thread(#[source] io::Error),
}

impl AccessLog {
    /// Opens the destination for lines of text. An existing file is appended to; a new file gets mode 0640.
    ///
    /// # Errors
    /// Returns an error if the destination cannot be opened, or if the writer's thread cannot be started.
    pub fn open_log(
        destination: &AccessLogDestination,
        identity: &AccessLogIdentity<'_>,
    ) -> Result<Self, AccessLogError> {
        Self::open_with_format(destination, identity, AccessLogFormat::Text, MAX_FILE_BYTES)
    }

    /// Opens the destination for lines of a form. A file that reaches `max_bytes` is renamed with the suffix `.1`, and a new file begins.
    ///
    /// # Errors
    /// Returns an error if the destination cannot be opened, or if the writer's thread cannot be started.
    pub fn open_with_format(
        destination: &AccessLogDestination,
        identity: &AccessLogIdentity<'_>,
        format: AccessLogFormat,
        max_bytes: u64,
    ) -> Result<Self, AccessLogError> {
        // Only a file can be renamed; a pipe has no size to limit.
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
            AccessLogRunFields { identity: identity.run_fields(format), trace: NO_TRACE.into() };
        let flood = Arc::default();
        Ok(Self { constant, format, destination: destination.clone(), writer, flood })
    }

    /// Returns a log for another run with the same destination.
    #[must_use]
    pub fn for_run(&self, identity: &AccessLogIdentity<'_>) -> Self {
        let constant = AccessLogRunFields {
            identity: identity.run_fields(self.format),
            ..self.constant.clone()
        };
        // Each run has a limiter of its own, so a run that floods the log does not suppress lines of others.
        Self { constant, flood: Arc::default(), ..self.clone() }
    }

    /// Returns the log for a run that belongs to a trace.
    #[must_use]
    pub fn with_trace(mut self, trace: &TraceId) -> Self {
        self.constant.trace = trace.to_string().into();
        self
    }

    /// Appends a line and never waits for the destination. For requests that made no call, only the first of each
    /// second have a line; the others are counted in one further line.
    pub fn write_entry(&self, line: &AccessLogEntry<'_>) {
        let Some(writer) = &self.writer else { return };
        let mut is_written = true;
        // Without upstream time, no call was made: the request cost nothing, and only the limiter bounds it.
        if line.upstream_time.is_none() {
            let repeats;
            (is_written, repeats) = self.flood.count_line(line.time);
            // The count of the last second comes first, so the lines stay in the order of time.
            self.append_repeats(line.time, repeats);
        }
        if is_written {
            writer.append_line(|buffer, clock| match self.format {
                AccessLogFormat::Text => line.append_to(&self.constant, clock, buffer),
                AccessLogFormat::Json => line.append_json_to(&self.constant, clock, buffer),
            });
        }
    }

    /// Writes the count of requests that have no line yet, at the end of a run.
    pub fn write_repeats(&self) {
        self.append_repeats(SystemTime::now(), self.flood.take_suppressed());
    }

    fn append_repeats(&self, time: SystemTime, repeats: u64) {
        if let Some(writer) = self.writer.as_ref().filter(|_| repeats > 0) {
            // The line stands for a number of suppressed lines.
            let line = AccessLogEntry::without_values(time, "repeated");
            writer.append_line(|buffer, clock| match self.format {
                AccessLogFormat::Text => {
                    line.append_to(&self.constant, clock, buffer);
                    entry::append_repeats(repeats, buffer);
                }
                AccessLogFormat::Json => {
                    line.append_json_to(&self.constant, clock, buffer);
                    json_line::append_repeats(repeats, buffer);
                }
            });
        }
    }

    /// Waits until all lines appended so far are written, for at most a second.
    pub fn flush_log(&self) {
        if let Some(writer) = &self.writer {
            writer.wait_flushed();
        }
    }

    /// Opens the file again under its name after a rotation has renamed it. Standard output and standard error stay
    /// unchanged.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened. Lines then still go to the old file.
    pub fn reopen_file(&self) -> Result<(), AccessLogError> {
        let (AccessLogDestination::File(_), Some(writer)) = (&self.destination, &self.writer)
        else {
            return Ok(());
        };
        // The new file is open before the old one is given up, so no line is without a destination.
        if let Some(output) = self.destination.open_output()? {
            writer.replace_file(output);
        }
        Ok(())
    }

    /// Returns the number of lines that could not be written so far.
    pub fn lost_lines(&self) -> u64 {
        self.writer.as_ref().map_or(0, |writer| writer.lost_lines())
    }
}

impl AccessLogDestination {
    /// Returns the path of the file, if the destination is a file.
    pub fn file_path(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            Self::Off | Self::Stdout | Self::Stderr => None,
        }
    }

    /// Opens the destination. Standard output is duplicated and not opened by name: in a container, `/dev/stdout` is a
    /// pipe or a socket of another user, which an unprivileged user cannot open again.
    fn open_output(&self) -> Result<Option<File>, AccessLogError> {
        let opened = match self {
            Self::Off => return Ok(None),
            Self::Stdout => io::stdout().as_fd().try_clone_to_owned().map(File::from),
            Self::Stderr => io::stderr().as_fd().try_clone_to_owned().map(File::from),
            Self::File(path) => open_file(path),
        };
        opened.map(Some).map_err(|source| match self {
            Self::File(path) if is_unread_pipe(path, &source) => {
                AccessLogError::UnreadPipe { path: path.clone() }
            }
            _ => AccessLogError::Open { destination: self.clone(), source },
        })
    }
}

impl AccessLogFormat {
    /// Returns the form that the variable [`FORMAT_VARIABLE`] selects. Any value but `json` selects text.
    pub fn from_variable(value: Option<&str>) -> Self {
        if value == Some("json") { Self::Json } else { Self::Text }
    }
}

/// Parses a destination: `off`, `-` or `/dev/stdout`, `/dev/stderr`, or else a path.
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
    /// Returns the text of the fields that are equal in every line of a run, made once.
    fn run_fields(&self, format: AccessLogFormat) -> Arc<str> {
        let Self { run, attempt } = self;
        let fields = match format {
            AccessLogFormat::Text => format!(
                "runId={} attempt={}",
                SanitizedText(run).to_text(),
                SanitizedText(attempt).to_text()
            ),
            AccessLogFormat::Json => json_line::run_members(run, attempt),
        };
        fields.into()
    }
}

/// Opens a file for lines at its end. The opening of a named pipe fails at once if no process reads the pipe.
fn open_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(FILE_MODE);
    let file = options.custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path)?;
    // Writes wait for the reader of a pipe that is full: only the thread of the log writes.
    rustix::fs::fcntl_setfl(&file, rustix::fs::fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(file)
}

/// Returns true if the opening of a path has failed because the path is a named pipe that no process reads.
fn is_unread_pipe(path: &Path, error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::NXIO.raw_os_error())
        && fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_fifo())
}

/// The largest size of the current file and of the file before it, in bytes. The value is our choice: three million
/// requests each.
pub const MAX_FILE_BYTES: u64 = 1024 * 1024 * 1024;

/// The environment variable that selects the form of log lines.
pub const FORMAT_VARIABLE: &str = "LOG_FORMAT";

/// The text for a missing trace, as for every missing value.
const NO_TRACE: &str = "-";

/// The mode of a new file: the group that collects logs may read it, other users may not.
const FILE_MODE: u32 = 0o640;
