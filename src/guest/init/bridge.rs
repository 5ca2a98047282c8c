//! The local port and the run's socket, joined: one loop over every connection of the sandbox.
//!
//! The kernel is asked by poll(2) only for what would be acted on: to read from a socket that had nothing more, to write
//! to a socket that took no more, and for the end of each, once. So there is no state in which the loop turns and does
//! nothing. It is not asked by epoll, whose watches the kernel counts by user: there may be none left.
//!
//! **Invariant:** what is not yet delivered is bounded, per connection and direction, by one read ([`READ_BUFFER_BYTES`]); while
//! there is any, nothing more is read, and the kernel tells the sender to wait.

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

pub(crate) struct SocketBridge {
    /// None where nothing is to be bridged.
    listener: Option<OwnedFd>,
    socket: RunSocket,
    connections: Vec<Option<BridgedConnection>>,
    /// Connections with something to do, each once.
    due: Vec<usize>,
    /// Whether the listener may have more.
    accepting: bool,
    /// Accepted, but the run's socket or the kernel had no room for it yet.
    waiting: Option<OwnedFd>,
    /// Whether the run's socket has refused the last connection.
    refused: bool,
    scratch: Vec<u8>,
    /// Of the last wait, by the indices of their connections.
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

    /// Waits for something to happen, for `time` at most, and does what there is to do. Tells whether there is something
    /// to read from one of the `guests`, which the caller does then.
    pub(crate) fn poll_once(&mut self, time: Option<Duration>, guests: &[BorrowedFd<'_>]) -> bool {
        let has_guest = self.wait_for_events(self.next_timeout(time), guests);
        for place in 0..self.events.len() {
            let (index, side, flags) = self.events[place];
            self.record_event(index, side, flags);
        }
        // Those that are put on the list meanwhile have their turn next time.
        let due = self.due.len();
        for place in 0..due {
            self.advance_connection(self.due[place]);
        }
        self.due.drain(..due);
        // Last, so that an event of this turn never meets a newer connection in an old one's place.
        self.accept_clients();
        has_guest
    }

    fn next_timeout(&self, time: Option<Duration>) -> Option<Duration> {
        let stuck = self.accepting && self.has_room();
        match (self.due.is_empty(), stuck) {
            (false, _) => Some(Duration::ZERO),
            (true, true) => Some(time.unwrap_or(RETRY_INTERVAL).min(RETRY_INTERVAL)),
            (true, false) => time,
        }
    }

    /// Keeps what has happened to the connections. Tells whether something has to a guest.
    fn wait_for_events(&mut self, time: Option<Duration>, guests: &[BorrowedFd<'_>]) -> bool {
        let time = time.map(|time| Timespec::try_from(time).expect("options end at 10000 hours"));
        // A listener with connections that there is no room for would be ready all the time.
        let may_accept = !self.accepting && self.has_room();
        let listener = self.listener.as_ref().filter(|_| may_accept);
        let open = self.connections.iter().enumerate();
        let open = open.filter_map(|(index, connection)| Some((index, connection.as_ref()?)));
        let ends = open.flat_map(|(index, connection)| {
            connection
                .poll_interests()
                .map(move |(side, socket, flags)| (index, side, socket, flags))
        });
        let (mut sources, mut polled) =
            (vec![], Vec::with_capacity(2 * self.connections.len() + 3));
        for (index, side, socket, flags) in ends {
            sources.push((index, side));
            polled.push(PollFd::new(socket, flags));
        }
        polled.extend(guests.iter().map(|guest| PollFd::from_borrowed_fd(*guest, PollFlags::IN)));
        polled.extend(listener.map(|listener| PollFd::new(listener, PollFlags::IN)));
        self.events.clear();
        match poll(&mut polled, time.as_ref()) {
            // Somebody looked at us with a debugger, or stopped and continued us.
            Err(Errno::INTR) | Ok(0) => return false,
            // The kernel has no memory, or our limit of open files was lowered: the guests must not wait for that.
            Err(_) => {
                sleep(RETRY_INTERVAL);
                return true;
            }
            Ok(_) => (),
        }
        let flags = polled.iter().map(PollFd::revents);
        let events = sources.iter().zip(flags.clone()).filter(|(_, flags)| !flags.is_empty());
        self.events.extend(events.map(|((index, side), flags)| (*index, *side, flags)));
        let mut others = flags.skip(sources.len()).map(|flags| !flags.is_empty());
        let has_guest =
            others.by_ref().take(guests.len()).fold(false, |any, is_ready| any | is_ready);
        self.accepting |= others.next().unwrap_or(false);
        has_guest
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
            ConnectionAction::Again => self.due.push(index),
            ConnectionAction::Close => self.connections[index] = None,
        }
    }

    fn accept_clients(&mut self) {
        while self.accepting && self.has_room() {
            let client = match self.next_client() {
                Ok(client) => client,
                Err(Errno::AGAIN) => return self.accepting = false,
                Err(Errno::CONNABORTED | Errno::INTR) => continue,
                // No descriptor or no memory is free: tried again after a while.
                Err(_) => return,
            };
            match self.socket.connect() {
                Ok(upstream) => {
                    self.refused = false;
                    self.connect_pair(client, upstream);
                }
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

    /// The client, which is dropped, sees its connection closed. Said once, however often the agent tries.
    fn report_refusal(&mut self, error: Errno) {
        if !mem::replace(&mut self.refused, true) {
            log_line(self.socket.describe_error(error));
        }
    }

    fn connect_pair(&mut self, client: OwnedFd, upstream: OwnedFd) {
        // An event of a stream is a few bytes: without this the kernel would wait for more.
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

/// Of one agent; more wait in the listener's backlog. A fourth of what the gateway takes from one run.
const MAX_CONNECTIONS: usize = 256;

/// One read. As much as a pipe or a unix socket's usual buffers hold at one time.
const READ_BUFFER_BYTES: usize = 64 << 10;

/// When a connection is tried again that neither we nor the gateway had room for.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);
