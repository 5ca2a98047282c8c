//! Standard output, and what has become of it: whoever reads it may have gone, or its disk be full.

use std::io::{self, IsTerminal, StdoutLock, Write};

use super::run::output_renderer::escape_for_terminal;

/// What a command prints. On a terminal, nothing in it is a command to that.
pub(super) struct StdoutWriter {
    to: StdoutLock<'static>,
    is_terminal: bool,
    /// Why something was not written.
    failed: Option<io::Error>,
}

impl StdoutWriter {
    pub(super) fn stdout() -> Self {
        let to = io::stdout().lock();
        Self { is_terminal: to.is_terminal(), to, failed: None }
    }

    /// Whether all of it was written.
    pub(super) fn finish(mut self) -> io::Result<()> {
        // Kept, too.
        let _ = self.flush();
        self.failed.map_or(Ok(()), Err)
    }

    fn remember_error<T>(&mut self, done: io::Result<T>) -> io::Result<T> {
        done.map_err(|error| {
            let kind = error.kind();
            if kind != io::ErrorKind::Interrupted {
                self.failed.get_or_insert(error);
            }
            kind.into()
        })
    }
}

impl Write for StdoutWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = if self.is_terminal {
            let text = escape_for_terminal(&String::from_utf8_lossy(bytes));
            self.to.write_all(text.as_bytes()).map(|()| bytes.len())
        } else {
            self.to.write(bytes)
        };
        self.remember_error(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        let flushed = self.to.flush();
        self.remember_error(flushed)
    }
}
