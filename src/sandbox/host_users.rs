//! The host users that sandboxes run as: a separate user for each sandbox, from a range that no other program uses.
//!
//! The kernel counts some resources per user, without a limit per cgroup: watches of epoll and inotify, pages of
//! pipes, waiting signals and messages, keys. A sandbox that shared its user with another could use up the other's
//! share. A process locks a file for each user that it takes; the kernel releases the lock when the process ends.
//!
//! **Invariant:** two sandboxes of this machine have the same user only if the operator gives a range of one user, or
//! lets both write to a path of the operator's.

use std::ffi::OsString;
use std::fmt;
use std::fs::{self, DirBuilder, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, ErrorKind, Read, Seek, Write};
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

/// The user of a sandbox. No other sandbox gets this user while the value lives, unless all sandboxes share one user.
#[derive(Debug)]
pub struct UserLease {
    uid: u32,
    /// The lock of the user; `None` if the user is shared.
    lock: Option<UserLock>,
}

/// A locked file whose content is the path of the user's holder.
#[derive(Debug)]
struct UserLock {
    path: PathBuf,
    _file: File,
}

/// The error of a sandbox that gets no user.
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
        "no user can be used for the sandbox: {0} is outside of this user namespace (`/proc/self/uid_map`); give users of the namespace with `--uids`"
    )]
    Unmapped(UserRange),
}

impl UserRange {
    /// The default range, which no known program uses. The range lies above these users:
    /// - systemd's `DynamicUser=` (61184 to 65519) and systemd-nspawn (524288 to 1879048191), see
    ///   <https://systemd.io/UIDS-GIDS/>;
    /// - the subordinate users that `useradd` assigns (`SUB_UID_MAX`, 600100000, in login.defs(5));
    /// - the users that SSSD makes for Active Directory (up to 2000200000, sssd-ad(5)).
    ///
    /// The range lies below systemd's foreign users (from 2147352576). The sign bit is clear, as Docker Engine demands.
    pub const DEFAULT_RANGE: Self = Self { first: 2_100_000_000, last: 2_100_065_535 };

    /// The usual user of images, shared by all sandboxes.
    pub const SHARED_USER: Self = Self::single_user(SANDBOX_UID);

    /// Returns a range of one user, shared by all sandboxes.
    pub const fn single_user(uid: u32) -> Self {
        Self { first: uid, last: uid }
    }

    /// Returns the only user of the range, if the range has one user.
    pub fn only_user(self) -> Option<u32> {
        (self.first == self.last).then_some(self.first)
    }

    pub fn contains(self, uid: u32) -> bool {
        (self.first..=self.last).contains(&uid)
    }

    /// Leases a user for a sandbox whose files are in `holder`: the `preferred` user if it is free, else the next free
    /// user. A process that does not run as root cannot change the owner of files, so its sandboxes share the usual
    /// user of images.
    ///
    /// # Errors
    /// Returns an error if no user is free, or a user's lock fails.
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
        // In a container, this process may see only some of the users of the machine.
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

    /// Returns each user of the range once. A released user comes late, because the kernel may still count something
    /// for it.
    fn search_order(self) -> impl Iterator<Item = u32> {
        let count = self.last - self.first + 1;
        let start = SEARCH_START.fetch_add(1, Ordering::Relaxed) % count;
        (start..count).chain(0..start).map(move |offset| self.first + offset)
    }

    fn check_mapped(self) -> Result<(), HostUserError> {
        let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        let is_mapped = |line: &str| {
            let mut numbers = line.split_whitespace().map(str::parse::<u64>);
            // The fields of a line are the first user inside, the first user outside, and the number of users
            // (user_namespaces(7)).
            let (first, count) = (numbers.next()?.ok()?, numbers.nth(1)?.ok()?);
            Some(first <= self.first.into() && u64::from(self.last) < first + count)
        };
        // A kernel without user namespaces has no such file, and maps every user.
        if map.is_empty() || map.lines().any(|line| is_mapped(line) == Some(true)) {
            Ok(())
        } else {
            Err(HostUserError::Unmapped(self))
        }
    }
}

impl UserLease {
    /// Returns the usual user of images, which sandboxes share.
    pub fn shared_user() -> Self {
        Self { uid: SANDBOX_UID, lock: None }
    }

    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Keeps the user reserved for files that could not be removed: no other sandbox gets the user while the files
    /// exist.
    pub fn keep_locked(mut self) {
        if let Some(lock) = &mut self.lock {
            // Without a path, the drop does not remove the lock's file, whose content still names the holder.
            lock.path = PathBuf::new();
        }
    }
}

/// Removes the lock files of killed processes whose sandboxes are gone, and returns their number. A directory of locks
/// that does not exist, or that this process may not read, has no such files for this process.
///
/// # Errors
/// Returns an error if a file cannot be opened, locked or removed.
pub fn remove_stale_locks() -> io::Result<usize> {
    let entries = match fs::read_dir(LOCK_DIR) {
        Ok(entries) => entries,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => {
            return Ok(0);
        }
        Err(error) => return Err(error),
    };
    let mut count = 0;
    for entry in entries {
        let entry = entry?;
        // A file is named by the number of its user.
        if entry.file_name().to_str().is_some_and(|name| name.parse::<u32>().is_ok()) {
            count += usize::from(UserLock::remove_if_stale(&entry.path())?);
        }
    }
    Ok(count)
}

impl UserLock {
    /// Removes a lock file that no process holds and whose holder's files are gone. Returns true if it is removed.
    fn remove_if_stale(path: &Path) -> io::Result<bool> {
        // 1. A look without the lock: a process that leases a user at this moment must not find the file locked by a
        //    sweep, unless the file is stale.
        let mut file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        if Self::is_reserved(&mut file)? {
            return Ok(false);
        }
        // 2. The lock, which a living holder has.
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::AGAIN) => return Ok(false),
            locked => locked?,
        }
        // 3. Another process may have had the lock since the look, and may have replaced or removed the file.
        file.rewind()?;
        if !is_named(&file, path)? || Self::is_reserved(&mut file)? {
            return Ok(false);
        }
        // 4. The file is removed while it is locked. A process that has opened it before finds at its own check that the
        //    name is gone.
        fs::remove_file(path)?;
        Ok(true)
    }

    /// Returns true if the file names a holder whose files exist. After a holder was killed, its sandbox may still run.
    /// The sweep removes the holder's files last, so the user is free only when the files are gone.
    fn is_reserved(file: &mut File) -> io::Result<bool> {
        Ok(Self::read_holder(file)?.is_some_and(|holder| holder.exists()))
    }

    /// Reads the path of the last holder, from the beginning of the file; `None` if the file is empty.
    fn read_holder(file: &mut File) -> io::Result<Option<PathBuf>> {
        let mut holder = vec![];
        file.read_to_end(&mut holder)?;
        Ok((!holder.is_empty()).then(|| PathBuf::from(OsString::from_vec(holder))))
    }

    /// Tries to lock a user; returns `None` if another sandbox has the user.
    fn try_lock(uid: u32, holder: &Path) -> io::Result<Option<Self>> {
        // 1. Open the file of the user, and lock it without waiting.
        let path = Path::new(LOCK_DIR).join(uid.to_string());
        let mut options = File::options();
        let mut file =
            options.read(true).write(true).create(true).truncate(false).mode(0o600).open(&path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::AGAIN) => return Ok(None),
            locked => locked?,
        }
        // 2. The last holder or a sweep may have removed the file since the open. The lock would then be on a file
        //    without a name, which excludes no other process.
        if !is_named(&file, &path)? {
            return Ok(None);
        }
        // 3. The user may be reserved for the files of an earlier holder, which was killed.
        let last = Self::read_holder(&mut file)?;
        if last.is_some_and(|last| last != holder && last.exists()) {
            return Ok(None);
        }
        // 4. Write the new holder over the old one.
        file.set_len(0)?;
        file.rewind()?;
        file.write_all(holder.as_os_str().as_bytes())?;
        Ok(Some(Self { path, _file: file }))
    }
}

/// Returns true if `path` still leads to the open file.
fn is_named(file: &File, path: &Path) -> io::Result<bool> {
    let own = file.metadata()?;
    Ok(fs::metadata(path).is_ok_and(|now| (now.dev(), now.ino()) == (own.dev(), own.ino())))
}

impl Drop for UserLock {
    /// Removes the file while it is locked, so that no other process holds a lock on it.
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            // A file that could not be removed is reused by the next holder.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl FromStr for UserRange {
    type Err = &'static str;

    fn from_str(range_text: &str) -> Result<Self, Self::Err> {
        const RANGE_RULE: &str = "give the first and the last user, such as 2100000000-2100065535, or one for all sandboxes; \
                            none is root, or above 2147483647";
        let (first, last) = range_text.split_once('-').unwrap_or((range_text, range_text));
        let number = |text: &str| text.parse().map_err(|_| RANGE_RULE);
        let range = Self { first: number(first)?, last: number(last)? };
        let is_valid = 0 < range.first && range.first <= range.last && range.last <= MAX_UID;
        if is_valid { Ok(range) } else { Err(RANGE_RULE) }
    }
}

impl TryFrom<String> for UserRange {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse().map_err(|rule| format!("`{text}` is not a range of users; {rule}"))
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

/// The directory of the locks, shared by all installations of this machine. Only root can enter the directory. A
/// reboot removes it, and ends all sandboxes.
const LOCK_DIR: &str = "/run/cogni-uids";

/// The highest user that Docker Engine accepts.
const MAX_UID: u32 = i32::MAX as u32;

/// The offset in a range at which the search for a free user begins. Each process begins at a random offset.
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

    /// R3: no other sandbox has a sandbox's user while the sandbox exists, and a killed process's sandbox keeps its
    /// user.
    #[test]
    fn a_user_is_given_to_one_sandbox_at_a_time() {
        // The range depends on the process, because all tests of this machine share the locks.
        let first = 1_900_000_000 + 8 * std::process::id();
        let users = range(&format!("{first}-{}", first + 1));
        let temp_dir = tempfile::tempdir().expect("there is a place for it");
        let holder = |name: &str| temp_dir.path().join(name);
        let first_lease = users.lease_user(None, &holder("one")).expect("both are free");
        let second_lease =
            users.lease_user(Some(first_lease.uid()), &holder("other")).expect("one is free");
        assert_ne!(first_lease.uid(), second_lease.uid());
        let none = users.lease_user(None, &holder("third")).expect_err("both are in use");
        assert!(matches!(none, HostUserError::Exhausted(_)), "{none}");
        let (first_uid, second_uid) = (first_lease.uid(), second_lease.uid());
        drop(first_lease);
        let third = users.lease_user(None, &holder("third")).expect("one was given back");
        assert_eq!(third.uid(), first_uid);
        // The state after the holder's process has died, and before a sweep.
        fs::create_dir(holder("other")).expect("made");
        second_lease.keep_locked();
        users
            .lease_user(Some(second_uid), &holder("fourth"))
            .expect_err("something of it may still run");
        let again = users.lease_user(None, &holder("other")).expect("its own files are its own");
        assert_eq!(again.uid(), second_uid);
        again.keep_locked();
        fs::remove_dir(holder("other")).expect("it is empty");
        let fourth = users.lease_user(None, &holder("fourth")).expect("it was swept");
        assert_eq!(fourth.uid(), second_uid);
    }

    /// R5: The lock of a killed process is removed, and no lock that a living process holds or that is kept for files.
    #[test]
    fn a_sweep_removes_only_stale_locks() {
        let first = 1_920_000_000 + 8 * std::process::id();
        let users = range(&format!("{first}-{}", first + 2));
        let temp_dir = tempfile::tempdir().expect("there is a place for it");
        let holder = |name: &str| temp_dir.path().join(name);
        let lock = |uid: u32| Path::new(LOCK_DIR).join(uid.to_string());
        let [living, killed, left] = ["living", "killed", "left"]
            .map(|name| users.lease_user(None, &holder(name)).expect("one is free"));
        let (living_uid, killed_uid, left_uid) = (living.uid(), killed.uid(), left.uid());
        fs::create_dir(holder("left")).expect("made");
        // The kernel unlocks the files of a process that is killed, and they stay.
        killed.keep_locked();
        left.keep_locked();
        assert!(lock(killed_uid).exists());
        // Tests of other threads and processes sweep, too, so the number of files is not known.
        remove_stale_locks().expect("swept");
        let exists = [living_uid, killed_uid, left_uid].map(|uid| lock(uid).exists());
        assert_eq!(exists, [true, false, true]);
        fs::remove_dir(holder("left")).expect("it is empty");
        remove_stale_locks().expect("swept");
        assert_eq!([living_uid, left_uid].map(|uid| lock(uid).exists()), [true, false]);
        drop(living);
    }

    /// R3: A process that has opened a lock before a sweep removed it does not get the user twice.
    #[test]
    fn leases_beside_sweeps_exclude_each_other() {
        let first = 1_930_000_000 + 8 * std::process::id();
        let users = range(&format!("{first}-{}", first + 1));
        let temp_dir = tempfile::tempdir().expect("there is a place for it");
        let taken = [0, 1].map(|_| std::sync::Mutex::new(()));
        std::thread::scope(|scope| {
            for name in ["one", "two", "three"] {
                let (taken, holder) = (&taken, temp_dir.path().join(name));
                scope.spawn(move || {
                    for turn in 0..2000 {
                        let Ok(lease) = users.lease_user(None, &holder) else { continue };
                        let own = &taken[(lease.uid() - first) as usize];
                        let held = own.try_lock().expect("no other thread has the user");
                        std::thread::yield_now();
                        drop(held);
                        // Some holders are killed.
                        if turn % 3 == 0 { lease.keep_locked() } else { drop(lease) }
                    }
                });
            }
            scope.spawn(|| (0..500).for_each(|_| drop(remove_stale_locks())));
        });
        remove_stale_locks().expect("swept");
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
