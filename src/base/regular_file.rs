//! Opens a file that must be a regular one, and reads it within a limit.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

/// Opens a file for reading. A named pipe or a device is refused: reading it would never end.
///
/// # Errors
/// Returns an error if the file cannot be opened, or is no regular file.
pub fn open_regular_file(path: &Path) -> io::Result<File> {
    // Opening a named pipe does not wait for a writer.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    Ok(file)
}

/// Reads a file with a credential or with keys as text.
///
/// # Errors
/// As [`read_regular_file`], with a limit of 1 MiB.
pub fn read_secret_file(path: &Path) -> io::Result<String> {
    read_regular_file(path, MAX_SECRET_FILE_BYTES)
}

/// Reads a file of at most `max_bytes` bytes as text.
///
/// # Errors
/// Returns an error if the file cannot be read, is no regular file, is longer, or is no UTF-8.
pub fn read_regular_file(path: &Path, max_bytes: u64) -> io::Result<String> {
    let text = String::from_utf8(read_within(open_regular_file(path)?, max_bytes)?);
    text.map_err(|_| {
        io::Error::new(io::ErrorKind::InvalidData, "stream did not contain valid UTF-8")
    })
}

/// Reads a source of at most `max_bytes` bytes, such as standard input.
///
/// # Errors
/// Returns an error if the source cannot be read, or is longer.
pub fn read_within(source: impl Read, max_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![];
    source.take(max_bytes + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        return Err(io::Error::other(format!("it has more than {max_bytes} bytes")));
    }
    Ok(bytes)
}

/// The largest file of a secret. Our choice: thousands of keys, and a wrong path cannot fill the memory.
const MAX_SECRET_FILE_BYTES: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::read_regular_file;
    use std::fs;

    /// A file at the limit is read; a longer one, a directory and a named pipe are refused at once.
    #[test]
    fn only_a_regular_file_within_its_limit_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("file"), "four").unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, at("pipe"), rustix::fs::Mode::RUSR).unwrap();
        assert_eq!(read_regular_file(&at("file"), 4).unwrap(), "four");
        let refused =
            |name: &str, most| read_regular_file(&at(name), most).unwrap_err().to_string();
        assert_eq!(refused("file", 3), "it has more than 3 bytes");
        assert_eq!([refused("pipe", 9), refused("", 9)], ["it is no regular file"; 2]);
    }
}
