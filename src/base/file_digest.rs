//! The digests of files. A file that has not changed since its digest was made is not read again.

use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ring::digest::{Context, SHA256};
use rustix::fs::OFlags;
use serde::Serialize;

/// The digests of the last files that were read.
#[derive(Debug, Default)]
pub struct FileDigestCache(Mutex<HashMap<FileVersion, DigestedContent>>);

/// A file and its digest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileDigest {
    /// The path without symbolic links.
    pub path: PathBuf,
    pub device: u64,
    pub inode: u64,
    /// The SHA-256 of the content.
    pub content: String,
    /// The line after `#!`, for a script.
    #[serde(skip)]
    pub interpreter: Option<String>,
    /// True if the file is a program that the kernel runs by itself: an ELF file.
    #[serde(skip)]
    pub is_native: bool,
    #[serde(skip)]
    pub bytes: u64,
}

/// The values of a file that change with its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct FileVersion {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

#[derive(Clone, Debug)]
struct DigestedContent {
    digest: String,
    interpreter: Option<String>,
    is_native: bool,
}

impl FileDigestCache {
    /// Returns the digest of a file; `None` for a directory or another object without content. The call reads the whole
    /// file the first time, so an async caller needs a thread for it.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub fn read_digest(&self, path: &Path) -> io::Result<Option<FileDigest>> {
        let path = path.canonicalize()?;
        // The kind is checked first: opening a device can have an effect.
        if !std::fs::metadata(&path)?.is_file() {
            return Ok(None);
        }
        // The path may name another object by now, and opening a named pipe must not wait for a writer.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let mut file = File::options().read(true).custom_flags(flags).open(&path)?;
        let facts = file.metadata()?;
        if !facts.is_file() {
            return Ok(None);
        }
        let version = FileVersion::from_metadata(&facts);
        let known = self.lock_files().get(&version).cloned();
        let content = if let Some(content) = known {
            content
        } else {
            let content = DigestedContent::read(&mut file)?;
            let is_same = FileVersion::from_metadata(&file.metadata()?) == version;
            if is_same && version.is_settled() {
                self.keep(version, content.clone());
            }
            content
        };
        let DigestedContent { digest: content, interpreter, is_native } = content;
        let FileVersion { device, inode, bytes, .. } = version;
        Ok(Some(FileDigest { path, device, inode, content, interpreter, is_native, bytes }))
    }

    fn keep(&self, version: FileVersion, content: DigestedContent) {
        let mut files = self.lock_files();
        if files.len() >= MAX_KEPT_DIGESTS {
            files.clear();
        }
        files.insert(version, content);
    }

    fn lock_files(&self) -> MutexGuard<'_, HashMap<FileVersion, DigestedContent>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FileVersion {
    fn from_metadata(facts: &Metadata) -> Self {
        Self {
            device: facts.dev(),
            inode: facts.ino(),
            bytes: facts.size(),
            modified: (facts.mtime(), facts.mtime_nsec()),
            changed: (facts.ctime(), facts.ctime_nsec()),
        }
    }

    /// Returns true if a later change of the file has another time. The kernel's clock for files is coarse: two changes in
    /// one tick have the same time.
    fn is_settled(&self) -> bool {
        let changed = Duration::from_secs(self.changed.0.try_into().unwrap_or_default());
        let age = SystemTime::now().duration_since(UNIX_EPOCH + changed);
        age.is_ok_and(|age| age >= SETTLE_TIME)
    }
}

impl DigestedContent {
    fn read(file: &mut File) -> io::Result<Self> {
        let (mut digest, mut buffer) = (Context::new(&SHA256), vec![0; BUFFER_BYTES]);
        let (mut interpreter, mut is_native) = (None, false);
        let mut is_first = true;
        loop {
            let count = file.read(&mut buffer)?;
            if count == 0 {
                break;
            }
            if is_first {
                interpreter = interpreter_line(&buffer[..count]);
                is_native = buffer[..count].starts_with(ELF_MAGIC);
                is_first = false;
            }
            digest.update(&buffer[..count]);
        }
        Ok(Self { digest: hex::encode(digest.finish()), interpreter, is_native })
    }
}

/// Returns the line after `#!` at the beginning of a file.
fn interpreter_line(beginning: &[u8]) -> Option<String> {
    let line = beginning.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    // The kernel reads no more of the line.
    let line = &line[..line.len().min(MAX_INTERPRETER_BYTES)];
    Some(String::from_utf8_lossy(line).into_owned())
}

/// The first bytes of a native program.
const ELF_MAGIC: &[u8] = b"\x7fELF";

/// The size of one read, in bytes.
const BUFFER_BYTES: usize = 64 * 1024;

/// The longest line of an interpreter, in bytes: the kernel's limit.
const MAX_INTERPRETER_BYTES: usize = 256;

/// The most kept digests. Our choice: a full cache is emptied.
const MAX_KEPT_DIGESTS: usize = 1024;

/// The time after a change of a file before its digest is kept. Our choice: far longer than a tick of any kernel.
const SETTLE_TIME: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A digest is kept only for the version of a file that it was made of.
    #[test]
    fn a_digest_counts_for_one_version_of_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("script");
        fs::write(&path, "#!/bin/sh -e\nexit 1").unwrap();
        let cache = FileDigestCache::default();
        let read = || cache.read_digest(&path).unwrap().unwrap();
        let first = read();
        assert_eq!(first.interpreter.as_deref(), Some("/bin/sh -e"));
        // 1. A file that has just changed is read each time.
        assert!(cache.lock_files().is_empty());
        fs::write(&path, "#!/bin/sh -e\nexit 2").unwrap();
        let second = read();
        assert_ne!(second.content, first.content);
        // 2. A version that is kept is not read again, and another version is.
        let version = FileVersion::from_metadata(&fs::metadata(&path).unwrap());
        let kept =
            DigestedContent { digest: "kept".to_owned(), interpreter: None, is_native: false };
        cache.keep(version, kept);
        assert_eq!(read().content, "kept");
        let one = tempfile::tempdir().unwrap().path().join("none");
        assert_eq!(cache.read_digest(&one).unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::write(&path, "#!/bin/sh -e\nexit 3").unwrap();
        let times = fs::FileTimes::new().set_modified(UNIX_EPOCH);
        File::options().write(true).open(&path).unwrap().set_times(times).unwrap();
        assert_ne!(read().content, "kept");
        assert_eq!(cache.read_digest(directory.path()).unwrap(), None);
    }

    /// The digest of an old file is kept, and the number of kept digests is bounded.
    #[test]
    fn a_settled_file_is_read_once() {
        let cache = FileDigestCache::default();
        // The test's own program was built before it runs.
        let program = std::env::current_exe().unwrap();
        let version = FileVersion::from_metadata(&fs::metadata(&program).unwrap());
        cache.read_digest(&program).unwrap();
        assert_eq!(cache.lock_files().contains_key(&version), version.is_settled());
        let kept = DigestedContent { digest: String::new(), interpreter: None, is_native: false };
        for inode in 0..2 * MAX_KEPT_DIGESTS as u64 {
            cache.keep(FileVersion { inode, ..version }, kept.clone());
            assert!(cache.lock_files().len() <= MAX_KEPT_DIGESTS);
        }
    }
}
