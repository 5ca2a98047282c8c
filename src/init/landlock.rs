//! A second lock on files, by the kernel's Landlock: the agent writes where it is told that it may, and nowhere else,
//! whatever a mount or a mode would let it do by mistake. Reading and executing are as they were.
//!
//! It holds for the agent and its children, and cannot be taken off. With it nobody traces a process that is not behind
//! it; where the kernel knows how (version 6), nobody signals one either, nor connects to its abstract sockets.
//!
//! TCP is left to the network: Landlock tells ports from each other, and not addresses, and a sandbox has no address but
//! its own.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::ptr;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::options::UnixSockets;

/// What the kernel is to be told. [`Ruleset::load`] tells it.
#[derive(Debug, PartialEq, Eq)]
struct Ruleset {
    attributes: Attributes,
    /// What is allowed below each path.
    rules: Vec<(PathBuf, u64)>,
}

/// `struct landlock_ruleset_attr`: what is denied unless a rule allows it. A kernel that knows fewer fields takes those
/// that it does not know, where they are zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Attributes {
    files: u64,
    network: u64,
    scopes: u64,
}

/// `struct landlock_path_beneath_attr`.
#[repr(C, packed)]
struct Beneath {
    allowed: u64,
    parent: RawFd,
}

/// Makes rules for an agent that may write below these paths; none where the kernel cannot hold it to them.
pub(crate) fn prepare(
    writable: &[PathBuf],
    unix_sockets: UnixSockets,
) -> io::Result<Option<OwnedFd>> {
    match version().filter(|version| *version >= OLDEST) {
        Some(version) => Ruleset::new(version, writable, unix_sockets).load().map(Some),
        None => Ok(None),
    }
}

impl Ruleset {
    fn new(version: u32, writable: &[PathBuf], unix_sockets: UnixSockets) -> Self {
        let known = match version {
            0..=2 => !(TRUNCATE | IOCTL_DEV),
            3 | 4 => !IOCTL_DEV,
            _ => !0,
        };
        let sockets = if unix_sockets == UnixSockets::Allowed { MAKE_SOCK } else { 0 };
        // A device can be used where it is; nobody makes one.
        let fixed = [(PathBuf::from("/"), READ), (PathBuf::from("/dev"), USE)];
        let own = writable.iter().map(|path| (path.clone(), USE | CHANGE | sockets));
        let rules = fixed.into_iter().chain(own);
        let files = (READ | USE | CHANGE | MAKE_SOCK | MAKE_DEVICE) & known;
        let scopes = if version >= 6 { ABSTRACT_SOCKETS | SIGNALS } else { 0 };
        Self {
            attributes: Attributes { files, network: 0, scopes },
            rules: rules.map(|(path, allowed)| (path, allowed & known)).collect(),
        }
    }

    fn load(&self) -> io::Result<OwnedFd> {
        let ruleset = create(&self.attributes)?;
        for (path, allowed) in &self.rules {
            // What is not there cannot be written to either.
            if let Some(place) = open(path)? {
                let is_directory = place.metadata()?.is_dir();
                let allowed = if is_directory { *allowed } else { allowed & OF_A_FILE };
                allow(&ruleset, &place, allowed)?;
            }
        }
        Ok(ruleset)
    }
}

fn open(path: &Path) -> io::Result<Option<File>> {
    match rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
        Ok(place) => Ok(Some(place.into())),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// None where the kernel has none, was started without it, or is not to be asked.
#[expect(unsafe_code, reason = "there is no safe call that asks for the version")]
fn version() -> Option<u32> {
    let nothing = ptr::null::<libc::c_void>();
    // SAFETY: asked for its version the kernel takes no attributes, and so neither reads nor writes memory of ours.
    let version =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, nothing, 0_usize, VERSION) };
    u32::try_from(version).ok()
}

#[expect(unsafe_code, reason = "there is no safe call that makes a ruleset")]
fn create(attributes: &Attributes) -> io::Result<OwnedFd> {
    let (call, size) = (libc::SYS_landlock_create_ruleset, size_of::<Attributes>());
    // SAFETY: the kernel reads as many bytes as it is told, which are the attributes.
    let made = unsafe { libc::syscall(call, ptr::from_ref(attributes), size, 0) };
    let made = RawFd::try_from(made).ok().filter(|made| *made >= 0);
    let made = made.ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the descriptor is new, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(made) })
}

#[expect(unsafe_code, reason = "there is no safe call that adds a rule")]
fn allow(ruleset: &OwnedFd, place: &File, allowed: u64) -> io::Result<()> {
    let beneath = Beneath { allowed, parent: place.as_raw_fd() };
    let (call, ruleset) = (libc::SYS_landlock_add_rule, ruleset.as_raw_fd());
    // SAFETY: the kernel reads one such structure, and both descriptors are open.
    let done = unsafe { libc::syscall(call, ruleset, PATH_BENEATH, &raw const beneath, 0) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Puts the rules on the calling thread, for good. Needs no privilege, but `no_new_privs`.
#[expect(unsafe_code, reason = "there is no safe call that puts rules on")]
pub(crate) fn restrict(ruleset: &OwnedFd) -> io::Result<()> {
    let (call, ruleset) = (libc::SYS_landlock_restrict_self, ruleset.as_raw_fd());
    // SAFETY: the descriptor is open, and no pointer is passed.
    let done = unsafe { libc::syscall(call, ruleset, 0) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Before it, nobody may move a file from one directory to another, wherever that is.
const OLDEST: u32 = 2;

/// `LANDLOCK_CREATE_RULESET_VERSION` and `LANDLOCK_RULE_PATH_BENEATH` of linux/landlock.h, where the rest is from, too.
const VERSION: u32 = 1;
const PATH_BENEATH: u32 = 1;

const EXECUTE: u64 = 1;
const WRITE_FILE: u64 = 1 << 1;
const READ_FILE: u64 = 1 << 2;
const READ_DIR: u64 = 1 << 3;
const REMOVE: u64 = 1 << 4 | 1 << 5;
const MAKE_DEVICE: u64 = 1 << 6 | 1 << 11;
/// Directories, files, pipes and symlinks.
const MAKE: u64 = 1 << 7 | 1 << 8 | 1 << 10 | 1 << 12;
const MAKE_SOCK: u64 = 1 << 9;
/// Links, and moves between directories.
const REFER: u64 = 1 << 13;
const TRUNCATE: u64 = 1 << 14;
const IOCTL_DEV: u64 = 1 << 15;

const READ: u64 = EXECUTE | READ_FILE | READ_DIR;
const USE: u64 = WRITE_FILE | TRUNCATE | IOCTL_DEV;
const CHANGE: u64 = MAKE | REMOVE | REFER;

/// What can be said of a file; of the others the kernel does not take it.
const OF_A_FILE: u64 = EXECUTE | READ_FILE | USE;

const ABSTRACT_SOCKETS: u64 = 1;
const SIGNALS: u64 = 1 << 1;

#[cfg(test)]
mod tests {
    use super::*;

    /// R3: no kernel is asked for what it does not know, nor to allow what it does not deny.
    #[test]
    fn each_version_is_told_what_it_knows() {
        let told = |version, unix_sockets| {
            let Ruleset { attributes, rules } =
                Ruleset::new(version, &["/workspace".into()], unix_sockets);
            let allowed = rules.iter().fold(0, |all, (_, allowed)| all | allowed);
            assert_eq!(allowed & !attributes.files, 0);
            let rules = rules.iter().map(|(path, rights)| format!("{} {rights:x}", path.display()));
            let rules = rules.collect::<Vec<_>>().join(", ");
            format!("{version}: {:x} {:x}, {rules}", attributes.files, attributes.scopes)
        };
        let mut all = [2, 3, 4, 5, 6, 7].map(|version| told(version, UnixSockets::Denied)).to_vec();
        all.push(told(7, UnixSockets::Allowed));
        assert_eq!(
            all,
            [
                "2: 3fff 0, / d, /dev 2, /workspace 35b2",
                "3: 7fff 0, / d, /dev 4002, /workspace 75b2",
                "4: 7fff 0, / d, /dev 4002, /workspace 75b2",
                "5: ffff 0, / d, /dev c002, /workspace f5b2",
                "6: ffff 3, / d, /dev c002, /workspace f5b2",
                "7: ffff 3, / d, /dev c002, /workspace f5b2",
                "7: ffff 3, / d, /dev c002, /workspace f7b2",
            ]
        );
    }
}
