//! The end of a log file, where whole records are added or nothing is.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::sync::Arc;

/// Appends lines; after a failure the file ends with its last whole record.
#[derive(Debug)]
pub(super) struct AuditLogFile {
    file: Arc<File>,
    /// The end of the last whole record.
    len: u64,
    /// A part of a record stands after `len` and could not be cut off yet.
    ragged: bool,
}

impl AuditLogFile {
    pub(super) fn new(file: Arc<File>, len: u64) -> Self {
        Self { file, len, ragged: false }
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Moves `lines` into the file, usually with one `write`. Whole lines that got there before an
    /// error stay there and leave `lines`; the rest stays in `lines`.
    pub(super) fn write_lines(&mut self, lines: &mut Vec<u8>) -> io::Result<()> {
        if self.ragged {
            self.file.set_len(self.len)?;
            self.ragged = false;
        }
        let (written, result) = write_counting(&self.file, lines);
        let whole = memchr::memrchr(b'\n', &lines[..written]).map_or(0, |end| end + 1);
        self.len += whole as u64;
        self.ragged = written > whole && self.file.set_len(self.len).is_err();
        lines.drain(..whole);
        result
    }
}

/// `write_all` that also says how far it came.
fn write_counting(mut file: &File, bytes: &[u8]) -> (usize, io::Result<()>) {
    let mut written = 0;
    while written < bytes.len() {
        match file.write(&bytes[written..]) {
            Ok(0) => return (written, Err(ErrorKind::WriteZero.into())),
            Ok(count) => written += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => (),
            Err(error) => return (written, Err(error)),
        }
    }
    (written, Ok(()))
}
