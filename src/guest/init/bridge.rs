//! The bridge between the local port and the run's socket: one loop over all connections of the sandbox.
//!
//! The loop asks poll(2) only for events that it acts on: input on a socket that was empty, space on a socket that was
//! full, and the end of each socket once. So the loop never spins without work. The bridge does not use epoll: the
//! kernel limits epoll watches per user, and the limit may be used up.
//!
//! **Invariant:** undelivered data is bounded by one read ([`READ_BUFFER_BYTES`]) per connection and direction. While a
//! direction has undelivered data, its source is not read, and the kernel slows the sender down.

mod connection;

use std::mem;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{self, SocketFlags, sockopt};
use rustix::time::Timespec;

use super::log_line;
use super::run_socket::{RunSocket, sleep};
use connection::{BridgedConnection, ConnectionAction, ConnectionSide};

/// The connections between the local port and the run's socket, and the listener of the port.
pub(crate) struct SocketBridge {
    /// `None` if the sandbox has no gateway.
    listener: Option<OwnedFd>,
    socket: RunSocket,
    connections: Vec<Option<BridgedConnection>>,
    /// The indices of connections that have work to do, each at most once.
    due: Vec<usize>,
    /// True if the listener may have more connections to accept.
    accepting: bool,
    /// An accepted client for which the run's socket or the kernel had no capacity yet.
    waiting: Option<OwnedFd>,
    /// True if the run's socket has refused the last connection.
    refused: bool,
    scratch: Vec<u8>,
    /// The events of the last wait, with the indices of their connections.
    events: Vec<(usize, ConnectionSide, PollFlags)>,
}

impl SocketBridge {
    pub(crate) fn new(listener: Option<OwnedFd>, socket: RunSocket) -> Self {
        Self {
            listener,
            socket,
            connections: vec![],
            due: vec![],
            accepting: false,
            waiting: None,
            refused: false,
            scratch: vec![0; READ_BUFFER_BYTES],
            events: vec![],
        }
    }

    /// Waits for an event, for at most `time`, and handles the events of the connections. Returns true if one of the
    /// `watched_fds` may be readable; the caller then reads it.
    pub(crate) fn poll_once(
        &mut self,
        time: Option<Duration>,
        watched_fds: &[BorrowedFd<'_>],
    ) -> bool {
        // 1. Wait, and mark the connections that have events.
        let has_watched_event = self.wait_for_events(self.next_timeout(time), watched_fds);
        for position in 0..self.events.len() {
            let (index, side, flags) = self.events[position];
            self.record_event(index, side, flags);
        }
        // 2. Advance the connections that are due. Connections that become due in this step wait for the next call, so
        //    that one busy connection cannot starve the signals.
        let due = self.due.len();
        for position in 0..due {
            self.advance_connection(self.due[position]);
        }
        self.due.drain(..due);
        // 3. Accept last. An event of this call then never meets a new connection that reuses the index of a closed
        //    one.
        self.accept_clients();
        has_watched_event
    }

    /// Returns the timeout of the next poll.
    fn next_timeout(&self, time: Option<Duration>) -> Option<Duration> {
        // A client waits that could not be accepted or connected. No event reports free capacity, so the loop retries.
        let stuck = self.accepting && self.has_room();
        match (self.due.is_empty(), stuck) {
            (false, _) => Some(Duration::ZERO),
            (true, true) => Some(time.unwrap_or(RETRY_INTERVAL).min(RETRY_INTERVAL)),
            (true, false) => time,
        }
    }

    /// Waits, and stores the events of the connections. Returns true if one of `watched_fds` may be
    /// readable.
    fn wait_for_events(&mut self, time: Option<Duration>, watched_fds: &[BorrowedFd<'_>]) -> bool {
        let time = time.map(|time| Timespec::try_from(time).expect("options end at 10000 hours"));
        // A listener with connections that cannot be accepted yet would always be ready, and the loop would spin.
        let may_accept = !self.accepting && self.has_room();
        let listener = self.listener.as_ref().filter(|_| may_accept);
        let open = self.connections.iter().enumerate();
        let open = open.filter_map(|(index, connection)| Some((index, connection.as_ref()?)));
        let ends = open.flat_map(|(index, connection)| {
            connection
                .poll_interests()
                .map(move |(side, socket, flags)| (index, side, socket, flags))
        });
        // The order in `polled` is: connections, watched descriptors, listener. `sources` has an entry for each of the
        // connections only.
        let (mut sources, mut polled) =
            (vec![], Vec::with_capacity(2 * self.connections.len() + 3));
        for (index, side, socket, flags) in ends {
            sources.push((index, side));
            polled.push(PollFd::new(socket, flags));
        }
        polled.extend(watched_fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)));
        polled.extend(listener.map(|listener| PollFd::new(listener, PollFlags::IN)));
        self.events.clear();
        match poll(&mut polled, time.as_ref()) {
            // A debugger, or a stop and continue, has interrupted the wait.
            Err(Errno::INTR) | Ok(0) => return false,
            // The kernel has no memory, or the limit of open files was lowered. The watched descriptors must still be
            // served.
            Err(_) => {
                sleep(RETRY_INTERVAL);
                return true;
            }
            Ok(_) => (),
        }
        let flags = polled.iter().map(PollFd::revents);
        let events = sources.iter().zip(flags.clone()).filter(|(_, flags)| !flags.is_empty());
        self.events.extend(events.map(|((index, side), flags)| (*index, *side, flags)));
        // `fold` and not `any`: the flag of every watched descriptor must be consumed, so that the next flag is the
        // listener's.
        let mut other_flags = flags.skip(sources.len()).map(|flags| !flags.is_empty());
        let has_watched_event = other_flags
            .by_ref()
            .take(watched_fds.len())
            .fold(false, |any, is_ready| any | is_ready);
        self.accepting |= other_flags.next().unwrap_or(false);
        has_watched_event
    }

    fn record_event(&mut self, index: usize, side: ConnectionSide, flags: PollFlags) {
        if let Some(Some(connection)) = self.connections.get_mut(index)
            && connection.record_readiness(side, flags)
        {
            self.due.push(index);
        }
    }

    fn advance_connection(&mut self, index: usize) {
        let Some(connection) = &mut self.connections[index] else { return };
        match connection.advance(&mut self.scratch) {
            ConnectionAction::Wait => {}
            ConnectionAction::Requeue => self.due.push(index),
            ConnectionAction::Close => self.connections[index] = None,
        }
    }

    /// Accepts waiting clients while the bridge has capacity, and connects each to the run's socket.
    fn accept_clients(&mut self) {
        while self.accepting && self.has_room() {
            let client = match self.next_client() {
                Ok(client) => client,
                Err(Errno::AGAIN) => return self.accepting = false,
                Err(Errno::CONNABORTED | Errno::INTR) => continue,
                // No descriptor or memory is free. `accepting` stays set, so that the next call retries.
                Err(_) => return,
            };
            match self.socket.connect() {
                Ok(upstream) => {
                    self.refused = false;
                    self.connect_pair(client, upstream);
                }
                // The gateway's backlog or this process has no capacity. The client is stored and retried first.
                Err(Errno::AGAIN | Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    self.waiting = Some(client);
                    return;
                }
                Err(error) => self.report_refusal(error),
            }
        }
    }

    fn next_client(&mut self) -> Result<OwnedFd, Errno> {
        if let Some(client) = self.waiting.take() {
            return Ok(client);
        }
        let listener = self.listener.as_ref().ok_or(Errno::AGAIN)?;
        net::accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)
    }

    /// Logs a refused connection once, however often the agent tries. The client is dropped and sees its connection
    /// closed.
    fn report_refusal(&mut self, error: Errno) {
        if !mem::replace(&mut self.refused, true) {
            log_line(self.socket.describe_error(error));
        }
    }

    fn connect_pair(&mut self, client: OwnedFd, upstream: OwnedFd) {
        // A stream's event is a few bytes: without this option the kernel would delay them to fill a packet.
        let _ = sockopt::set_tcp_nodelay(&client, true);
        let index = self.free_index();
        self.connections[index] = Some(BridgedConnection::new(client, upstream));
        self.due.push(index);
    }

    fn free_index(&mut self) -> usize {
        self.connections.iter().position(Option::is_none).unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        })
    }

    fn has_room(&self) -> bool {
        self.connections.iter().flatten().count() < MAX_CONNECTIONS
    }
}

/// The maximum number of connections of one agent. Further ones wait in the listener's backlog. A quarter of the
/// connections that the gateway accepts from one run.
const MAX_CONNECTIONS: usize = 256;

/// The size of one read: as much as a pipe or a unix socket's usual buffer holds.
const READ_BUFFER_BYTES: usize = 64 << 10;

/// The interval at which a connection is retried for which the bridge or the gateway had no capacity.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);
