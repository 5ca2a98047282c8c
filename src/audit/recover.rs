//! Taking up a log that an earlier process left behind.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use rustix::fs::OFlags;

use super::Error;
use super::chain::{Chain, Why};
use super::read::{self, Broken, Reader};
use super::verify::Tally;
use crate::budget::Amount;

/// What a log holds, as far as a new process must know.
#[derive(Debug)]
pub struct Scan {
    /// Where the next record goes.
    pub chain: Chain,
    /// Bytes up to the end of the last whole record; what follows is torn.
    pub whole_bytes: u64,
    /// The run the records belong to; empty where there are none.
    pub run: String,
    /// When the first record was written.
    pub began: Option<SystemTime>,
    /// What the settled calls were charged.
    pub spent: Amount,
    /// Admissions without a settlement, in order, with what they had reserved.
    pub open: Vec<(String, Amount)>,
}

/// The bytes of an incomplete last line, and where they are now.
#[derive(Debug)]
pub(super) struct Torn {
    pub(super) bytes: u64,
    pub(super) kept_in: PathBuf,
}

/// Reads a whole log. An incomplete last line is no error: a crash in the middle of a write leaves
/// one. Anything else that is not as it was written is.
pub fn scan(log: impl BufRead) -> Result<Scan, read::Error> {
    let mut reader = Reader::new(log);
    let mut tally = Tally::new(None);
    loop {
        match reader.entry() {
            Ok(Some(entry)) => tally.add(&entry)?,
            Ok(None) | Err(read::Error::Broken(Broken { why: Why::Torn, .. })) => break,
            Err(error) => return Err(error),
        }
    }
    let end = reader.position();
    let run = tally.run().to_owned();
    let began = humantime::parse_rfc3339(tally.began()).ok();
    let (spent, open) = tally.settle();
    Ok(Scan { chain: end.chain, whole_bytes: end.offset, run, began, spent, open })
}

/// A log that no other process writes.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) file: Arc<File>,
    is_new: bool,
}

impl Opened {
    /// Removes a file that was made here and got no record, so that nobody takes it for a log that was cut.
    pub(super) fn remove_if_unused(&self, path: &Path) -> io::Result<()> {
        if self.is_new && self.file.metadata()?.len() == 0 {
            std::fs::remove_file(path)?;
        }
        Ok(())
    }
}

/// Opens or creates a log for appending and makes sure that no other process writes it.
pub(super) fn open(path: &Path) -> Result<Opened, Error> {
    let failed = |source| Error::File { path: path.into(), source };
    // Looked at first: to open a FIFO would wait for its other end.
    // A link would let whoever can write beside the logs say what is written to.
    if path.symlink_metadata().is_ok_and(|metadata| !metadata.is_file()) {
        return Err(Error::NotAFile { path: path.into() });
    }
    let created = private(OpenOptions::new().read(true)).create_new(true).open(path);
    let is_new = created.is_ok();
    let file = match created {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            private(OpenOptions::new().read(true)).open(path)
        }
        created => created,
    };
    let file = file.map_err(failed)?;
    match file.try_lock() {
        // Between the two its maker may have removed it.
        Ok(()) if file.metadata().map_err(failed)?.nlink() > 0 => {
            Ok(Opened { file: Arc::new(file), is_new })
        }
        Ok(()) | Err(std::fs::TryLockError::WouldBlock) => Err(Error::Locked { path: path.into() }),
        Err(std::fs::TryLockError::Error(source)) => Err(failed(source)),
    }
}

/// Moves whatever follows the last whole record to a file of its own.
///
/// The bytes are on disk there before they leave the log. They are appended, so that a crash in the
/// middle of a repair, and the repair of the repair, still lose nothing.
pub(super) fn cut_torn_tail(path: &Path, log: &File, scan: &Scan) -> io::Result<Option<Torn>> {
    let bytes = log.metadata()?.len() - scan.whole_bytes;
    if bytes == 0 {
        return Ok(None);
    }
    let mut kept_in = path.as_os_str().to_owned();
    kept_in.push(format!(".torn-{}", scan.chain.next()));
    let kept_in = PathBuf::from(kept_in);
    let mut keep = private(&mut OpenOptions::new()).open(&kept_in)?;
    let mut from = log;
    from.seek(SeekFrom::Start(scan.whole_bytes))?;
    io::copy(&mut BufReader::new(from), &mut keep)?;
    keep.sync_all()?;
    sync_folder(&kept_in)?;
    log.set_len(scan.whole_bytes)?;
    Ok(Some(Torn { bytes, kept_in }))
}

/// Makes a new file's name as durable as its content.
pub(super) fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

/// Append only, readable by nobody else, and never through a link.
fn private(options: &mut OpenOptions) -> &mut OpenOptions {
    use std::os::unix::fs::OpenOptionsExt as _;
    options.append(true).create(true).mode(0o600).custom_flags(NO_LINK)
}

/// `open` fails where the last part of the path is a link.
const NO_LINK: i32 = OFlags::NOFOLLOW.bits().cast_signed();
