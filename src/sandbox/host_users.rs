//! The host users that sandboxes run as: one of its own for each sandbox, out of a range that nothing else uses.
//!
//! The kernel counts by user what no control group limits: watches of epoll and inotify, pages of pipes, signals and
//! messages that wait, keys. A sandbox that shared its user with another could use up the other's share. A file that
//! its process has locked says that a user is taken; the kernel gives the lock back with the process.
//!
//! **Invariant:** two sandboxes of this machine have one user only where the operator gives a range of one user, or lets
//! both write to what is the operator's.

use std::ffi::OsString;
use std::fmt;
use std::fs::{self, DirBuilder, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::geteuid;
use serde::Deserialize;

use super::spec::SANDBOX_UID;

/// Users of this machine, by their numbers, from the first to the last. The group of each has the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct UserRange {
    first: u32,
    last: u32,
}

/// A sandbox's user. No other sandbox gets it while this value lives, unless all share it.
#[derive(Debug)]
pub struct UserLease {
    uid: u32,
    /// None where the user is shared.
    lock: Option<UserLock>,
}

/// The locked file that says who has a user.
#[derive(Debug)]
struct UserLock {
    path: PathBuf,
    _file: File,
}

/// Why a sandbox has no user.
#[derive(Debug, thiserror::Error)]
pub enum HostUserError {
    #[error(
        "the lock of a sandbox's user in `{}` failed: {source}; let this process write there, or give all sandboxes one user with `--uids {SANDBOX_UID}`",
        path.display()
    )]
    Lock { path: PathBuf, source: io::Error },
    #[error("no user is left for the sandbox: all of {0} are in use; give more with `--uids`")]
    Exhausted(UserRange),
    #[error(
        "no user is there for the sandbox: {0} is outside of this user namespace (`/proc/self/uid_map`); give users of it with `--uids`"
    )]
    Unmapped(UserRange),
}

impl UserRange {
    /// Users that nothing else takes: above those of systemd's `DynamicUser=` (61184 to 65519) and of systemd-nspawn
    /// (524288 to 1879048191), and below its foreign users (from 2147352576), see
    /// <https://systemd.io/UIDS-GIDS/>; above what `useradd` gives as subordinate users (`SUB_UID_MAX`, 600100000, in
    /// login.defs(5)); above what SSSD makes of users of Active Directory (up to 2000200000, sssd-ad(5)). The sign bit
    /// is clear, as Docker Engine demands.
    pub const DEFAULT_RANGE: Self = Self { first: 2_100_000_000, last: 2_100_065_535 };

    /// The user that images know, for all sandboxes together.
    pub const SHARED_USER: Self = Self::single_user(SANDBOX_UID);

    /// One user for all sandboxes.
    pub const fn single_user(uid: u32) -> Self {
        Self { first: uid, last: uid }
    }

    /// The only user, where there is one.
    pub fn only_user(self) -> Option<u32> {
        (self.first == self.last).then_some(self.first)
    }

    pub fn contains(self, uid: u32) -> bool {
        (self.first..=self.last).contains(&uid)
    }

    /// Takes a user for a sandbox that has its files in `holder`: the `preferred` user if it is free, else the next
    /// free one. A process that is not root's gives nothing away, so that its sandboxes share the user of images.
    ///
    /// # Errors
    /// There is no free user, or none can be locked.
    pub fn lease_user(
        self,
        preferred: Option<u32>,
        holder: &Path,
    ) -> Result<UserLease, HostUserError> {
        let shared = if geteuid().is_root() { self.only_user() } else { Some(SANDBOX_UID) };
        if let Some(uid) = shared {
            return Ok(UserLease { uid, lock: None });
        }
        let failed = |source| HostUserError::Lock { path: LOCK_DIR.into(), source };
        self.check_mapped()?;
        DirBuilder::new().recursive(true).mode(0o700).create(LOCK_DIR).map_err(failed)?;
        let preferred = preferred.filter(|uid| self.contains(*uid));
        for uid in preferred.into_iter().chain(self.search_order()) {
            if let Some(lock) = UserLock::try_lock(uid, holder).map_err(failed)? {
                return Ok(UserLease { uid, lock: Some(lock) });
            }
        }
        Err(HostUserError::Exhausted(self))
    }

    /// Each user once. A user that was given back comes late: something may still count for it.
    fn search_order(self) -> impl Iterator<Item = u32> {
        let count = self.last - self.first + 1;
        let start = SEARCH_START.fetch_add(1, Ordering::Relaxed) % count;
        (start..count).chain(0..start).map(move |offset| self.first + offset)
    }

    fn check_mapped(self) -> Result<(), HostUserError> {
        let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        let is_mapped = |line: &str| {
            let mut numbers = line.split_whitespace().map(str::parse::<u64>);
            let (first, count) = (numbers.next()?.ok()?, numbers.nth(1)?.ok()?);
            Some(first <= self.first.into() && u64::from(self.last) < first + count)
        };
        // A kernel without user namespaces has no such file.
        if map.is_empty() || map.lines().any(|line| is_mapped(line) == Some(true)) {
            Ok(())
        } else {
            Err(HostUserError::Unmapped(self))
        }
    }
}

impl UserLease {
    /// The user of images, which sandboxes share.
    pub fn shared_user() -> Self {
        Self { uid: SANDBOX_UID, lock: None }
    }

    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Leaves the user to what could not be removed: nothing else gets it while the holder's files are there.
    pub fn keep_locked(mut self) {
        if let Some(lock) = &mut self.lock {
            lock.path = PathBuf::new();
        }
    }
}

impl UserLock {
    /// None where the user is another sandbox's.
    fn try_lock(uid: u32, holder: &Path) -> io::Result<Option<Self>> {
        let path = Path::new(LOCK_DIR).join(uid.to_string());
        let mut options = File::options();
        let mut file =
            options.read(true).write(true).create(true).truncate(false).mode(0o600).open(&path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::AGAIN) => return Ok(None),
            locked => locked?,
        }
        // Its last holder may have removed the file since it was opened.
        let own = file.metadata()?;
        if !fs::metadata(&path).is_ok_and(|now| (now.dev(), now.ino()) == (own.dev(), own.ino())) {
            return Ok(None);
        }
        // A process that was killed leaves its sandbox to the sweep, which removes these files last.
        let mut last = vec![];
        file.read_to_end(&mut last)?;
        let last = PathBuf::from(OsString::from_vec(last));
        if last != holder && !last.as_os_str().is_empty() && last.exists() {
            return Ok(None);
        }
        file.set_len(0)?;
        rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0))?;
        file.write_all(holder.as_os_str().as_bytes())?;
        Ok(Some(Self { path, _file: file }))
    }
}

impl Drop for UserLock {
    /// While it is locked, so that nobody else has it.
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            // A file that stays is taken by the next holder.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl FromStr for UserRange {
    type Err = &'static str;

    fn from_str(given: &str) -> Result<Self, Self::Err> {
        const RANGE_RULE: &str = "give the first and the last user, such as 2100000000-2100065535, or one for all sandboxes; \
                            none is root, or above 2147483647";
        let (first, last) = given.split_once('-').unwrap_or((given, given));
        let number = |text: &str| text.parse().map_err(|_| RANGE_RULE);
        let range = Self { first: number(first)?, last: number(last)? };
        let is_valid = 0 < range.first && range.first <= range.last && range.last <= MAX_UID;
        if is_valid { Ok(range) } else { Err(RANGE_RULE) }
    }
}

impl TryFrom<String> for UserRange {
    type Error = String;

    fn try_from(given: String) -> Result<Self, String> {
        given.parse().map_err(|rule| format!("`{given}` are no users; {rule}"))
    }
}

impl Default for UserRange {
    fn default() -> Self {
        Self::DEFAULT_RANGE
    }
}

impl fmt::Display for UserRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.only_user() {
            Some(uid) => uid.fmt(f),
            None => write!(f, "{}-{}", self.first, self.last),
        }
    }
}

/// Where the users of this machine's sandboxes are locked, whatever installation a sandbox is of. Root's alone, and
/// gone with a reboot, as sandboxes are.
const LOCK_DIR: &str = "/run/cogni-uids";

/// Docker Engine's last user.
const MAX_UID: u32 = i32::MAX as u32;

/// The place in a range at which the search for a free user begins. Each process begins elsewhere.
static SEARCH_START: LazyLock<AtomicU32> = LazyLock::new(|| {
    let [_, _, _, _, low @ ..] = RandomState::new().hash_one(std::process::id()).to_be_bytes();
    AtomicU32::new(u32::from_be_bytes(low))
});

#[cfg(test)]
mod tests {
    use super::*;

    fn range(text: &str) -> UserRange {
        text.parse().expect("it is a range")
    }

    /// R3: nobody else has a sandbox's user while it is there, and a killed process's sandbox keeps its own.
    #[test]
    fn a_user_is_given_to_one_sandbox_at_a_time() {
        // Of this process, as the locks are the machine's.
        let first = 1_900_000_000 + 8 * std::process::id();
        let users = range(&format!("{first}-{}", first + 1));
        let place = tempfile::tempdir().expect("there is a place for it");
        let holder = |name: &str| place.path().join(name);
        let one = users.lease_user(None, &holder("one")).expect("both are free");
        let other = users.lease_user(Some(one.uid()), &holder("other")).expect("one is free");
        assert_ne!(one.uid(), other.uid());
        let none = users.lease_user(None, &holder("third")).expect_err("both are in use");
        assert!(matches!(none, HostUserError::Exhausted(_)), "{none}");
        let (freed, kept) = (one.uid(), other.uid());
        drop(one);
        let third = users.lease_user(None, &holder("third")).expect("one was given back");
        assert_eq!(third.uid(), freed);
        // As after the death of its process, before a sweep.
        fs::create_dir(holder("other")).expect("made");
        other.keep_locked();
        users.lease_user(Some(kept), &holder("fourth")).expect_err("something of it may still run");
        let again = users.lease_user(None, &holder("other")).expect("its own files are its own");
        assert_eq!(again.uid(), kept);
        again.keep_locked();
        fs::remove_dir(holder("other")).expect("it is empty");
        let fourth = users.lease_user(None, &holder("fourth")).expect("it was swept");
        assert_eq!(fourth.uid(), kept);
    }

    #[test]
    fn a_range_of_one_user_is_shared() {
        let holder = Path::new("/nowhere");
        let leases =
            [(); 2].map(|()| range("1001").lease_user(None, holder).expect("it is shared"));
        assert_eq!(leases.map(|lease| lease.uid()), [SANDBOX_UID, SANDBOX_UID]);
    }

    #[test]
    fn a_range_has_no_root_and_no_user_that_an_engine_refuses() {
        for wrong in ["", "0", "0-5", "7-5", "-5", "5-", "a-b", "1-2147483648", "1 - 5", "1-2-3"] {
            wrong.parse::<UserRange>().expect_err(wrong);
        }
        for right in ["1001", "2000000-2000099", "1-2147483647"] {
            assert_eq!(range(right).to_string(), right);
        }
    }
}
