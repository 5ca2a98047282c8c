//! The process that owns an object, so that a sweep can tell leftovers from objects in use.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::process;

/// The identity of a process, unique on this machine over all boots. A pid is reused, but not together with its start
/// time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnerProcess {
    /// The first digits of the kernel's boot id, without dashes.
    boot: String,
    pid: u32,
    /// The start time in clock ticks since the boot.
    started: u64,
    /// The inode of the process's pid namespace: a pid is valid only in its namespace.
    namespace: u64,
}

/// The state of an owner, as far as this process can determine it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerState {
    Alive,
    Dead,
    /// The owner cannot be seen from here, so none of its objects may be touched.
    Unknown,
}

impl OwnerProcess {
    /// Returns the identity of this process.
    ///
    /// # Errors
    /// Returns an error if `/proc` cannot be read.
    pub fn this_process() -> io::Result<Self> {
        let pid = process::id();
        let started = process_start_time(pid)?.ok_or(io::ErrorKind::NotFound)?;
        Ok(Self { boot: read_boot_id()?, pid, started, namespace: pid_namespace()? })
    }

    /// Parses the text that [`OwnerProcess`]'s `Display` writes, or its form in a file name.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(SEPARATORS);
        let boot = parts.next().filter(|boot| is_boot_id(boot))?.to_owned();
        let pid = parts.next()?.parse().ok().filter(|pid| *pid > 0)?;
        let (started, namespace) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        parts.next().is_none().then_some(Self { boot, pid, started, namespace })
    }

    /// Returns the owner's state. An owner counts as dead only if its death is certain.
    pub fn state(&self) -> OwnerState {
        let (Ok(boot), Ok(namespace)) = (read_boot_id(), pid_namespace()) else {
            return OwnerState::Unknown;
        };
        // No process survives a boot.
        if self.boot != boot {
            return OwnerState::Dead;
        }
        // The pid belongs to another namespace, where this process cannot look it up.
        if self.namespace != namespace {
            return OwnerState::Unknown;
        }
        match process_start_time(self.pid) {
            Ok(Some(started)) if started == self.started => OwnerState::Alive,
            Ok(Some(_)) => OwnerState::Dead,
            // A `/proc` that hides other users' processes also reports no such file. If it shows init (pid 1), it
            // hides none.
            Ok(None) if matches!(process_start_time(1), Ok(Some(_))) => OwnerState::Dead,
            _ => OwnerState::Unknown,
        }
    }

    /// Returns the identity as a part of a directory's name, without `:`.
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

/// Reads the first digits of the boot's id: enough to tell boots apart, and short enough for a socket's path.
fn read_boot_id() -> io::Result<String> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.replace('-', "");
    text.get(..BOOT_ID_DIGITS).map(str::to_owned).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn pid_namespace() -> io::Result<u64> {
    fs::metadata("/proc/self/ns/pid").map(|found| found.ino())
}

/// Returns the start time of a process; `None` if there is no process of that pid, or only a zombie.
fn process_start_time(pid: u32) -> io::Result<Option<u64>> {
    let stat = match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    // The program's name before the last `)` may hold anything, spaces and brackets too (proc(5)).
    let fields = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    let mut fields = fields.split(' ');
    // State Z is a zombie and X a dead process: neither uses its objects any more.
    let is_gone = matches!(fields.next(), Some("Z" | "X"));
    let started = fields.nth(STARTTIME_AFTER_STATE).and_then(|field| field.parse().ok());
    match started {
        Some(_) if is_gone => Ok(None),
        Some(started) => Ok(Some(started)),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

const SEPARATORS: [char; 2] = [':', '-'];

/// The number of hexadecimal digits that identify a boot: our choice.
const BOOT_ID_DIGITS: usize = 16;

/// The index of `starttime` among the fields after the state: `starttime` is field 22 of `stat`, the state is field 3
/// (proc(5)).
const STARTTIME_AFTER_STATE: usize = 18;
