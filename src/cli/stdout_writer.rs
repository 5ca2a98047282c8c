//! Standard output, with its first error: the reader may have closed the pipe, or a disk may be full.

use std::io::{self, IsTerminal, StdoutLock, Write};

use super::run::output_renderer::escape_for_terminal;

/// The output of a command. On a terminal, control characters are replaced.
pub(super) struct StdoutWriter {
    out: StdoutLock<'static>,
    is_terminal: bool,
    /// The first error of a write.
    failed: Option<io::Error>,
}

impl StdoutWriter {
    pub(super) fn stdout() -> Self {
        let out = io::stdout().lock();
        Self { is_terminal: out.is_terminal(), out, failed: None }
    }

    /// Flushes the output, and returns its first error.
    pub(super) fn finish(mut self) -> io::Result<()> {
        // `flush` stores its error in `failed`.
        let _ = self.flush();
        self.failed.map_or(Ok(()), Err)
    }

    fn remember_error<T>(&mut self, done: io::Result<T>) -> io::Result<T> {
        done.map_err(|error| {
            let kind = error.kind();
            // An interrupted write is repeated by the caller.
            if kind != io::ErrorKind::Interrupted {
                self.failed.get_or_insert(error);
            }
            // The caller receives an error of the same kind; the original is stored for the end of the command.
            kind.into()
        })
    }
}

impl Write for StdoutWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = if self.is_terminal {
            // A terminal obeys escapes, and some of the output was chosen by a client.
            let text = escape_for_terminal(&String::from_utf8_lossy(bytes));
            self.out.write_all(text.as_bytes()).map(|()| bytes.len())
        } else {
            self.out.write(bytes)
        };
        self.remember_error(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        let flushed = self.out.flush();
        self.remember_error(flushed)
    }
}
