//! L2: Tests of what everything that writes objects into a mirror has in common: the lock and the limits of a fetch.

use std::fs::{self, File, TryLockError};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use cogni_gateway::relay::repo::mirror::remove_unused_mirrors;
use cogni_gateway::relay::repo::{
    BranchKey, CommitNote, FetchLimits, GitProgram, ObjectId, RepoError, RepoMirror, SandboxBranch,
};
use rustix::fs::OFlags;
use tempfile::TempDir;

use super::setup::RelaySetup;
use crate::support::repository::TestRepository;

/// L2: A server whose notes have no end is left at the limits of a fetch, and nothing of the notes remains.
#[test]
fn notes_without_end_are_not_fetched() {
    let setup = NotesSetup::new();
    let limits = FetchLimits { pack_bytes: 1 << 20, ..FetchLimits::default() };
    let error = setup.put_note(limits).unwrap_err().to_string();
    assert!(error.contains("raise `[fetch]`"), "{error}");
    assert_eq!(setup.unfinished_files(), [""; 0]);
    assert_eq!(setup.server.state.packs.load(Ordering::Relaxed), 1);
    // A mirror that is full takes no notes either.
    let limits = FetchLimits { mirror_bytes: 1, ..limits };
    let error = setup.put_note(limits).unwrap_err().to_string();
    assert!(error.contains("relay sweep"), "{error}");
    assert_eq!(setup.server.state.packs.load(Ordering::Relaxed), 1);
}

/// L2: The start of another run leaves the files alone that a fetch of notes is writing.
#[test]
fn a_run_that_begins_leaves_a_fetch_of_notes_alone() {
    let setup = NotesSetup::new();
    setup.server.state.is_slow.store(true, Ordering::Relaxed);
    let (before, after) = thread::scope(|scope| {
        let noted = scope.spawn(|| setup.put_note(FetchLimits::default()));
        wait_for(|| !setup.unfinished_files().is_empty());
        let before = setup.unfinished_files();
        let lease = setup.mirror.lease_branch(&BranchKey::parse("other").unwrap()).unwrap();
        let begun = setup.mirror.ensure_branch(&lease, Some("main"), None);
        let after = setup.unfinished_files();
        setup.server.state.is_slow.store(false, Ordering::Relaxed);
        noted.join().unwrap().unwrap_err();
        begun.unwrap();
        (before, after)
    });
    assert_eq!(before, after);
    // What the server has broken off is removed.
    assert_eq!(setup.unfinished_files(), [""; 0]);
}

/// L2: The start of a run leaves the files alone that a sweep is writing, because the sweep has the lock, too.
#[test]
fn a_sweep_holds_the_lock_while_git_packs() {
    let setup = RelaySetup::new();
    let state = setup.path("state");
    let mirror = TestRepository::at(&only_mirror(&state));
    for at in 0..25 {
        let name = mirror.git_with(["hash-object", "-w", "--stdin"], &[at]);
        mirror.git_with(["pack-objects", "-q", "objects/pack/pack"], name.as_bytes());
    }
    // Git reads this file early and waits for its content.
    let shallow = mirror.path.join("shallow");
    assert!(Command::new("mkfifo").arg(&shallow).status().unwrap().success());
    let (alone, shared) = thread::scope(|scope| {
        let swept = scope.spawn(|| remove_unused_mirrors(&state, SystemTime::UNIX_EPOCH, &[]));
        let mut options = File::options();
        let options = options.write(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed());
        let writer = wait_for_some(|| options.open(&shallow).ok());
        let lock = File::create(mirror.path.with_extension("fetch")).unwrap();
        let (alone, shared) = (lock.try_lock(), lock.try_lock_shared());
        fs::remove_file(&shallow).unwrap();
        drop((writer, lock));
        assert_eq!(swept.join().unwrap().unwrap(), 0);
        (alone, shared)
    });
    assert!(matches!(alone, Err(TryLockError::WouldBlock)), "{alone:?}");
    shared.expect("fetches go on in the meantime");
    let counted = mirror.git(["count-objects", "-v"]);
    assert!(!counted.contains("packs: 25\n"), "{counted}");
}

/// The mirror of a server whose notes have no end.
struct NotesSetup {
    directory: TempDir,
    server: NotesServer,
    mirror: RepoMirror,
}

impl NotesSetup {
    /// Opens a mirror that has the server's commit already.
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let remote = TestRepository::seeded(&directory.path().join("remote.git"));
        let server = NotesServer::start(remote.git(["rev-parse", "main"]));
        let url = format!("http://{}/o/site.git", server.address);
        let state = directory.path().join("state");
        let git = GitProgram::find(&state.join("home")).unwrap();
        let mirror = RepoMirror::open(&git, &state, &url.parse().unwrap()).unwrap();
        let objects = TestRepository::at(&only_mirror(&state));
        objects.git(["fetch", "-q", remote.path.to_str().unwrap(), "main:refs/heads/main"]);
        Self { directory, server, mirror }
    }

    fn put_note(&self, limits: FetchLimits) -> Result<(), RepoError> {
        let branch = SandboxBranch::from_key(BranchKey::parse("noted").unwrap());
        let (head, committer) = (ObjectId::NONE, "Relay <relay@example.com>");
        let note = CommitNote { branch: &branch, head, text: "proved", committer };
        self.mirror.clone().with_limits(limits).put_note(note, None)
    }

    /// Returns the names of the files that git has not finished.
    fn unfinished_files(&self) -> Vec<String> {
        let packs = only_mirror(&self.directory.path().join("state")).join("objects/pack");
        let names = fs::read_dir(packs).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with("tmp_")).collect()
    }
}

/// A git server with one commit, and with notes whose pack has no end.
struct NotesServer {
    address: SocketAddr,
    state: Arc<NotesServerState>,
}

struct NotesServerState {
    tip: String,
    /// The number of packs that were begun.
    packs: AtomicUsize,
    /// True while the server sends no more than the begin of a pack.
    is_slow: AtomicBool,
}

impl NotesServer {
    fn start(tip: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (packs, is_slow) = (AtomicUsize::new(0), AtomicBool::new(false));
        let state = Arc::new(NotesServerState { tip, packs, is_slow });
        let served = Arc::downgrade(&state);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Some(state) = served.upgrade() else { return };
                thread::spawn(move || state.answer(stream.unwrap()));
            }
        });
        Self { address, state }
    }
}

impl NotesServerState {
    /// Answers one request: for the list of refs, or for a pack.
    fn answer(&self, mut stream: TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let (mut head, mut length) = (String::new(), 0);
        while reader.read_line(&mut head).unwrap() > 2 {
            let line = head.lines().last().unwrap().to_ascii_lowercase();
            if let Some(number) = line.strip_prefix("content-length: ") {
                length = number.parse().unwrap();
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let kind = if head.starts_with("GET") { "advertisement" } else { "result" };
        let answer = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: application/x-git-upload-pack-{kind}\r\nConnection: close\r\n\r\n"
        );
        stream.write_all(answer.as_bytes()).unwrap();
        if head.starts_with("GET") {
            let refs = [&*self.tip, "refs/heads/main"].join(" ") + "\0\n";
            let lines = [
                packet_line("# service=git-upload-pack\n") + "0000",
                packet_line(&refs),
                packet_line(&format!("{} refs/notes/cogni\n", "a".repeat(40))) + "0000",
            ];
            stream.write_all(lines.concat().as_bytes()).unwrap();
        } else {
            stream.write_all(b"0008NAK\n").unwrap();
            // Git asks again with its last word after a first answer.
            if body.windows(4).any(|word| word == b"done") {
                self.packs.fetch_add(1, Ordering::Relaxed);
                self.send_pack(&mut stream);
            }
        }
    }

    /// Sends a pack with one object of 6 GiB, until git leaves or has taken far more than its limit.
    fn send_pack(&self, stream: &mut TcpStream) {
        let mut head = b"PACK\0\0\0\x02\0\0\x13\x88".to_vec();
        let mut size = 6_u64 << 30;
        head.push(0x80 | 3 << 4 | u8::try_from(size & 15).unwrap());
        size >>= 4;
        while size > 127 {
            head.push(0x80 | u8::try_from(size & 127).unwrap());
            size >>= 7;
        }
        head.push(u8::try_from(size).unwrap());
        // Blocks that zlib has not compressed.
        head.extend(b"\x78\x01");
        let block = [b"\0\0\x80\xff\x7f".as_slice(), &vec![7; 0x8000]].concat();
        let mut is_open = stream.write_all(&head).is_ok();
        for sent in 0..MAX_BLOCKS {
            while is_open && sent == FIRST_BLOCKS && self.is_slow.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(10));
            }
            is_open = is_open && stream.write_all(&block).is_ok();
        }
    }
}

/// Returns the one mirror of a state directory.
fn only_mirror(state: &Path) -> PathBuf {
    let found = fs::read_dir(state.join("mirrors")).unwrap().map(|entry| entry.unwrap().path());
    found.into_iter().find(|path| path.extension().unwrap() == "git").unwrap()
}

fn packet_line(text: &str) -> String {
    format!("{:04x}{text}", text.len() + 4)
}

fn wait_for(is_there: impl Fn() -> bool) {
    wait_for_some(|| is_there().then_some(()));
}

fn wait_for_some<T>(find: impl Fn() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        match find() {
            Some(found) => return found,
            None => assert!(start.elapsed() < Duration::from_mins(1), "it has not happened"),
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// The blocks of 32 KiB that a slow server sends at first, and those after which a server ends.
const FIRST_BLOCKS: usize = 32;
const MAX_BLOCKS: usize = 64 << 5;
