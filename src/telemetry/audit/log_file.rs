//! The end of a log file. Only whole records are added to it.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::sync::Arc;

/// A writer of lines. After a failure the file ends with its last whole record.
#[derive(Debug)]
pub(super) struct AuditLogFile {
    file: Arc<File>,
    /// The end of the last whole record, in bytes from the start of the file.
    len: u64,
    /// True if a part of a record follows `len` and could not be cut off yet.
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

    /// Moves `lines` into the file, usually with one `write`. If an error comes in the middle, whole lines that were
    /// written leave `lines`, and the others stay in `lines`.
    pub(super) fn write_lines(&mut self, lines: &mut Vec<u8>) -> io::Result<()> {
        // 1. Cut off the part of a record that an earlier failure has left.
        if self.ragged {
            self.file.set_len(self.len)?;
            self.ragged = false;
        }
        // 2. Write, and count only whole lines as written.
        let (written, result) = write_counting(&self.file, lines);
        let whole = memchr::memrchr(b'\n', &lines[..written]).map_or(0, |end| end + 1);
        self.len += whole as u64;
        // 3. Cut off a line that was written in part. It stays in `lines`, so the next write repeats it.
        self.ragged = written > whole && self.file.set_len(self.len).is_err();
        lines.drain(..whole);
        result
    }
}

/// Writes all bytes. Returns the number of written bytes also after an error.
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
