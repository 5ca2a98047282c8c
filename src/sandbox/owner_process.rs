//! Which process answers for an object, so that what it left behind can be told from what it still uses.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::process;

/// A process, told from all others of this machine, before and after: pids come again, start times with them do not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnerProcess {
    /// The kernel's id of its boot, without dashes.
    boot: String,
    pid: u32,
    /// In clock ticks since the boot.
    started: u64,
    /// The inode of its pid namespace: a pid means something there only.
    namespace: u64,
}

/// What can be said about an owner from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerState {
    Alive,
    Dead,
    /// It cannot be seen from here, so nothing of it may be touched.
    Unknown,
}

impl OwnerProcess {
    /// This process.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn this_process() -> io::Result<Self> {
        let pid = process::id();
        let started = process_start_time(pid)?.ok_or(io::ErrorKind::NotFound)?;
        Ok(Self { boot: read_boot_id()?, pid, started, namespace: pid_namespace()? })
    }

    /// Reads what [`OwnerProcess`]'s `Display` wrote.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(SEPARATORS);
        let boot = parts.next().filter(|boot| is_boot_id(boot))?.to_owned();
        let pid = parts.next()?.parse().ok().filter(|pid| *pid > 0)?;
        let (started, namespace) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        parts.next().is_none().then_some(Self { boot, pid, started, namespace })
    }

    /// Whether it still runs. Only what is certain is called dead.
    pub fn state(&self) -> OwnerState {
        let (Ok(boot), Ok(namespace)) = (read_boot_id(), pid_namespace()) else {
            return OwnerState::Unknown;
        };
        if self.boot != boot {
            return OwnerState::Dead;
        }
        if self.namespace != namespace {
            return OwnerState::Unknown;
        }
        match process_start_time(self.pid) {
            Ok(Some(started)) if started == self.started => OwnerState::Alive,
            Ok(Some(_)) => OwnerState::Dead,
            // A `/proc` that hides other users' processes looks the same; where it shows init, it hides nobody.
            Ok(None) if matches!(process_start_time(1), Ok(Some(_))) => OwnerState::Dead,
            _ => OwnerState::Unknown,
        }
    }

    /// For the name of a directory, where `:` would be in the way.
    pub fn to_file_name(&self) -> String {
        self.to_string().replace(':', "-")
    }
}

impl fmt::Display for OwnerProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}:{}", self.boot, self.pid, self.started, self.namespace)
    }
}

fn is_boot_id(text: &str) -> bool {
    text.len() == BOOT_ID_DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The first digits of the boot's id: enough to tell this boot from others, short enough for a socket's path.
fn read_boot_id() -> io::Result<String> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.replace('-', "");
    text.get(..BOOT_ID_DIGITS).map(str::to_owned).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn pid_namespace() -> io::Result<u64> {
    fs::metadata("/proc/self/ns/pid").map(|found| found.ino())
}

/// When a process started; `None` where there is none of that pid, or only its remains.
fn process_start_time(pid: u32) -> io::Result<Option<u64>> {
    let stat = match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    // The name before it may hold anything, spaces and brackets too (proc(5)).
    let fields = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    let mut fields = fields.split(' ');
    let is_gone = matches!(fields.next(), Some("Z" | "X"));
    let started = fields.nth(STARTTIME_AFTER_STATE).and_then(|field| field.parse().ok());
    match started {
        Some(_) if is_gone => Ok(None),
        Some(started) => Ok(Some(started)),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

const SEPARATORS: [char; 2] = [':', '-'];

const BOOT_ID_DIGITS: usize = 16;

/// `starttime` is field 22 of `stat` (proc(5)), the state is field 3.
const STARTTIME_AFTER_STATE: usize = 18;
