//! A second barrier for files, by the kernel's Landlock: the agent writes only below the paths that the runner allows,
//! even if a mount or a file mode would permit more by mistake. Landlock does not restrict reading and executing here.
//!
//! The rules hold for the agent and its children, and cannot be removed. A process under these rules cannot trace a
//! process outside them. From version 6 on, the kernel also denies it to signal outside processes and to connect to
//! their abstract sockets.
//!
//! TCP is not restricted: Landlock distinguishes ports and not addresses, and a sandbox reaches only its own addresses.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::ptr;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::options::UnixSocketPolicy;

/// The rules as plain data. [`LandlockRuleset::load_into_kernel`] hands them to the kernel.
#[derive(Debug, PartialEq, Eq)]
struct LandlockRuleset {
    attributes: RulesetAttr,
    /// The accesses that are allowed below each path.
    rules: Vec<(PathBuf, u64)>,
}

/// `struct landlock_ruleset_attr`: the accesses that are denied unless a rule allows them. A kernel that knows fewer
/// fields accepts unknown fields if they are zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RulesetAttr {
    files: u64,
    network: u64,
    scopes: u64,
}

/// `struct landlock_path_beneath_attr`.
#[repr(C, packed)]
struct PathBeneathAttr {
    allowed: u64,
    parent: RawFd,
}

/// Builds a ruleset for an agent that may write below these paths. Returns `None` if the kernel cannot enforce it.
pub(crate) fn prepare_ruleset(
    writable: &[PathBuf],
    unix_sockets: UnixSocketPolicy,
) -> io::Result<Option<OwnedFd>> {
    match supported_abi().filter(|version| *version >= MIN_ABI) {
        Some(version) => {
            LandlockRuleset::new(version, writable, unix_sockets).load_into_kernel().map(Some)
        }
        None => Ok(None),
    }
}

impl LandlockRuleset {
    fn new(version: u32, writable: &[PathBuf], unix_sockets: UnixSocketPolicy) -> Self {
        // The kernel refuses a ruleset with an access that its version does not know.
        let known = match version {
            0..=2 => !(ACCESS_TRUNCATE | ACCESS_IOCTL_DEVICE),
            3 | 4 => !ACCESS_IOCTL_DEVICE,
            _ => !0,
        };
        let sockets =
            if unix_sockets == UnixSocketPolicy::Allowed { ACCESS_MAKE_SOCKET } else { 0 };
        // Existing devices can be used; the agent cannot create devices.
        let fixed = [(PathBuf::from("/"), ACCESS_READ), (PathBuf::from("/dev"), ACCESS_WRITE)];
        let own =
            writable.iter().map(|path| (path.clone(), ACCESS_WRITE | ACCESS_MODIFY | sockets));
        let rules = fixed.into_iter().chain(own);
        let files =
            (ACCESS_READ | ACCESS_WRITE | ACCESS_MODIFY | ACCESS_MAKE_SOCKET | ACCESS_MAKE_DEVICE)
                & known;
        let scopes = if version >= 6 { SCOPE_ABSTRACT_SOCKETS | SCOPE_SIGNALS } else { 0 };
        Self {
            attributes: RulesetAttr { files, network: 0, scopes },
            rules: rules.map(|(path, allowed)| (path, allowed & known)).collect(),
        }
    }

    fn load_into_kernel(&self) -> io::Result<OwnedFd> {
        let ruleset = create_ruleset(&self.attributes)?;
        for (path, allowed) in &self.rules {
            // A path that does not exist, or that this process cannot reach, needs no rule: the agent cannot write
            // there.
            if let Some(target) = open_path(path)? {
                let is_directory = target.metadata()?.is_dir();
                // The kernel refuses rules for a file with accesses that only a directory has.
                let allowed = if is_directory { *allowed } else { allowed & FILE_ACCESS };
                add_rule(&ruleset, &target, allowed)?;
            }
        }
        Ok(ruleset)
    }
}

fn open_path(path: &Path) -> io::Result<Option<File>> {
    match rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
        Ok(file) => Ok(Some(file.into())),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns the kernel's Landlock version. Returns `None` if the kernel has no Landlock, was started without Landlock,
/// or denies the call.
#[expect(unsafe_code, reason = "there is no safe call that asks for the version")]
fn supported_abi() -> Option<u32> {
    let nothing = ptr::null::<libc::c_void>();
    // SAFETY: when it is asked for its version, the kernel takes no attributes, and neither reads nor writes this
    // process's memory.
    let version = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, nothing, 0_usize, CREATE_RULESET_VERSION)
    };
    u32::try_from(version).ok()
}

#[expect(unsafe_code, reason = "there is no safe call that makes a ruleset")]
fn create_ruleset(attributes: &RulesetAttr) -> io::Result<OwnedFd> {
    let (call, size) = (libc::SYS_landlock_create_ruleset, size_of::<RulesetAttr>());
    // SAFETY: the kernel reads as many bytes as `size` says, which are the attributes.
    let made = unsafe { libc::syscall(call, ptr::from_ref(attributes), size, 0) };
    let made = RawFd::try_from(made).ok().filter(|made| *made >= 0);
    let made = made.ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the descriptor is new, and no other value owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(made) })
}

#[expect(unsafe_code, reason = "there is no safe call that adds a rule")]
fn add_rule(ruleset: &OwnedFd, target: &File, allowed: u64) -> io::Result<()> {
    let beneath = PathBeneathAttr { allowed, parent: target.as_raw_fd() };
    let (call, ruleset) = (libc::SYS_landlock_add_rule, ruleset.as_raw_fd());
    // SAFETY: the kernel reads one such structure, and both descriptors are open.
    let done = unsafe { libc::syscall(call, ruleset, RULE_PATH_BENEATH, &raw const beneath, 0) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Applies the ruleset to the calling thread, for good. The call needs `no_new_privs` and no other privilege.
#[expect(unsafe_code, reason = "there is no safe call that puts rules on")]
pub(crate) fn restrict_self(ruleset: &OwnedFd) -> io::Result<()> {
    let (call, ruleset) = (libc::SYS_landlock_restrict_self, ruleset.as_raw_fd());
    // SAFETY: the descriptor is open, and no pointer is passed.
    let done = unsafe { libc::syscall(call, ruleset, 0) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The lowest usable version. Version 1 denies every move of a file to another directory.
const MIN_ABI: u32 = 2;

/// `LANDLOCK_CREATE_RULESET_VERSION` and `LANDLOCK_RULE_PATH_BENEATH` of linux/landlock.h. The constants below are from
/// the same file.
const CREATE_RULESET_VERSION: u32 = 1;
const RULE_PATH_BENEATH: u32 = 1;

const ACCESS_EXECUTE: u64 = 1;
const ACCESS_WRITE_FILE: u64 = 1 << 1;
const ACCESS_READ_FILE: u64 = 1 << 2;
const ACCESS_READ_DIR: u64 = 1 << 3;
const ACCESS_REMOVE: u64 = 1 << 4 | 1 << 5;
const ACCESS_MAKE_DEVICE: u64 = 1 << 6 | 1 << 11;
/// Creates directories, files, pipes and symlinks.
const ACCESS_MAKE: u64 = 1 << 7 | 1 << 8 | 1 << 10 | 1 << 12;
const ACCESS_MAKE_SOCKET: u64 = 1 << 9;
/// Links files, and moves them between directories.
const ACCESS_REFER: u64 = 1 << 13;
const ACCESS_TRUNCATE: u64 = 1 << 14;
const ACCESS_IOCTL_DEVICE: u64 = 1 << 15;

const ACCESS_READ: u64 = ACCESS_EXECUTE | ACCESS_READ_FILE | ACCESS_READ_DIR;
const ACCESS_WRITE: u64 = ACCESS_WRITE_FILE | ACCESS_TRUNCATE | ACCESS_IOCTL_DEVICE;
const ACCESS_MODIFY: u64 = ACCESS_MAKE | ACCESS_REMOVE | ACCESS_REFER;

/// The accesses that a rule for a file may have; the kernel refuses the others.
const FILE_ACCESS: u64 = ACCESS_EXECUTE | ACCESS_READ_FILE | ACCESS_WRITE;

const SCOPE_ABSTRACT_SOCKETS: u64 = 1;
const SCOPE_SIGNALS: u64 = 1 << 1;

#[cfg(test)]
mod tests {
    use super::*;

    /// R3: no kernel receives an access that it does not know, nor a rule for an access that it does not deny.
    #[test]
    fn each_version_is_told_what_it_knows() {
        let describe = |version, unix_sockets| {
            let LandlockRuleset { attributes, rules } =
                LandlockRuleset::new(version, &["/workspace".into()], unix_sockets);
            let allowed = rules.iter().fold(0, |all, (_, allowed)| all | allowed);
            assert_eq!(allowed & !attributes.files, 0);
            let rules = rules.iter().map(|(path, rights)| format!("{} {rights:x}", path.display()));
            let rules = rules.collect::<Vec<_>>().join(", ");
            format!("{version}: {:x} {:x}, {rules}", attributes.files, attributes.scopes)
        };
        let mut all =
            [2, 3, 4, 5, 6, 7].map(|version| describe(version, UnixSocketPolicy::Denied)).to_vec();
        all.push(describe(7, UnixSocketPolicy::Allowed));
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
