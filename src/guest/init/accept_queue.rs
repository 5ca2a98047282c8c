//! A check of TCP connections that no process has accepted, because no control group counts their memory.
//!
//! The kernel charges a TCP connection to a control group when a process accepts the connection. Until then its buffers
//! are memory of the whole machine. A sandbox that connects to itself and accepts nothing could use up the machine's
//! TCP memory, and connections of other sandboxes would be reset. So the sandbox ends when too much data or too many
//! connections wait.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::time::Duration;

/// The interval between two reads of the kernel's tables. One processor can open about 20,000 connections in that time.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// The connections in all accept queues of this network namespace.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct WaitingConnections {
    pub(crate) count: u64,
    /// The number of bytes that the connections have received.
    pub(crate) bytes: u64,
}

impl WaitingConnections {
    /// Reads the kernel's tables. A table that cannot be read counts as empty: a kernel without `/proc/net/tcp` has no
    /// TCP.
    pub(crate) fn read() -> Self {
        let mut waiting = Self::default();
        // The tables have one line for each socket and are slow to read, so the cheap socket counters are read first.
        if in_use("/proc/net/sockstat", "TCP:") + in_use("/proc/net/sockstat6", "TCP6:") < FEW {
            return waiting;
        }
        for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
            if let Ok(table) = File::open(table) {
                waiting.add(BufReader::new(table));
            }
        }
        waiting
    }

    pub(crate) fn is_too_much(&self) -> bool {
        self.count > MAX_COUNT || self.bytes > MAX_BYTES
    }

    /// Adds the waiting connections of a table in the format of `/proc/net/tcp`.
    fn add(&mut self, mut table: impl BufRead) {
        let mut line = String::new();
        while table.read_line(&mut line).is_ok_and(|length| length > 0) {
            if let Some(received) = waiting_bytes(&line) {
                self.count += 1;
                self.bytes += received;
            }
            line.clear();
        }
    }
}

/// Returns the bytes that a connection has received, if no process has accepted the connection. Such a connection is
/// open, and no file refers to it (inode 0).
fn waiting_bytes(line: &str) -> Option<u64> {
    // The fields are: number, local address, remote address, state, queues, timer, retransmits, uid, timeout, inode.
    let mut fields = line.split_ascii_whitespace().skip(3);
    let (state, queues, inode) = (fields.next()?, fields.next()?, fields.nth(4)?);
    let (_, received) = queues.split_once(':')?;
    let is_open = matches!(state, ESTABLISHED | CLOSE_WAIT);
    if is_open && inode == "0" { u64::from_str_radix(received, 16).ok() } else { None }
}

/// Reads the number of sockets from a line such as `TCP: inuse 7 orphan 0 tw 0 alloc 9 mem 1`.
fn in_use(path: &str, protocol: &str) -> u64 {
    let text = fs::read_to_string(path).unwrap_or_default();
    let line =
        text.lines().find_map(|line| line.strip_prefix(protocol)?.trim().strip_prefix("inuse "));
    line.and_then(|numbers| numbers.split(' ').next()?.parse().ok()).unwrap_or(0)
}

/// The states of `/proc/net/tcp` in which a connection is open, from `include/net/tcp_states.h`. A closed connection
/// has no file either, but another state.
const ESTABLISHED: &str = "01";
const CLOSE_WAIT: &str = "08";

/// The number of sockets below which the tables are not read. The accept queues of so few sockets hold less than
/// [`MAX_BYTES`]: one socket's receive buffer has 212,992 bytes (`net.core.rmem_max`).
const FEW: u64 = 256;

/// The maximum number of waiting connections. Our choice: a listener's queue has 128 entries in most programs, and at
/// most 4,096 (`net.core.somaxconn`).
const MAX_COUNT: u64 = 1024;
/// The maximum number of bytes that waiting connections may hold. Our choice.
const MAX_BYTES: u64 = 64 * 1024 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000002 00:00000000 00000000     0        0 31 1 0 100 0 0 10 0
   1: 0100007F:1F90 0100007F:8235 01 00000000:0000EA60 00:00000000 00000000     0        0 0 1 0 20 4 30 10 -1
   2: 0100007F:1F90 0100007F:8236 08 00000000:00000010 00:00000000 00000000     0        0 0 1 0 20 4 30 10 -1
   3: 0100007F:8235 0100007F:1F90 01 00000000:00000007 00:00000000 00000000  1000        0 77 1 0 20 4 30 10 -1
   4: 0100007F:8236 0100007F:1F90 05 00000000:00000000 00:00000000 00000000     0        0 0 1 0 20 4 30 10 -1
   5: 0100007F:8237 0100007F:1F90 06 00000000:00000000 03:00000F9C 00000000     0        0 0 3 0
";

    #[test]
    fn connections_that_no_process_has_accepted_are_counted() {
        let mut waiting = WaitingConnections::default();
        waiting.add(TABLE.as_bytes());
        assert_eq!(waiting, WaitingConnections { count: 2, bytes: 60_016 });
        assert!(!waiting.is_too_much());
        for line in ["", "x", "1: a b 01", "1: a b 01 0:zz c d e f 0"] {
            assert_eq!(waiting_bytes(line), None, "{line}");
        }
    }

    #[test]
    fn both_bounds_hold() {
        for (count, bytes, is_too_much) in
            [(1024, 0, false), (1025, 0, true), (1, 64 << 20, false), (1, (64 << 20) + 1, true)]
        {
            assert_eq!(WaitingConnections { count, bytes }.is_too_much(), is_too_much);
        }
    }
}
