//! The local port and the run's socket, joined: one loop over every connection of the sandbox.
//!
//! The loop is edge-triggered: the kernel reports each change once, we remember it, and nothing is reported twice for
//! want of somebody to act on it. So there is no state in which the loop turns and does nothing.
//!
//! **Invariant:** what is not yet delivered is bounded, per connection and direction, by one read ([`CHUNK`]); while
//! there is any, nothing more is read, and the kernel tells the sender to wait.

mod connection;

use std::mem;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{self, SocketFlags, sockopt};
use rustix::time::Timespec;

use super::say;
use super::socket::RunSocket;
use connection::{Connection, Next, Side};

pub(crate) struct Bridge {
    epoll: OwnedFd,
    listener: OwnedFd,
    socket: RunSocket,
    connections: Vec<Option<Connection>>,
    /// Connections with something to do, each once.
    due: Vec<usize>,
    /// Whether the listener may have more.
    accepting: bool,
    /// Accepted, but the run's socket or the kernel had no room for it yet.
    waiting: Option<OwnedFd>,
    /// Whether the run's socket has refused the last connection.
    refused: bool,
    scratch: Vec<u8>,
    events: Vec<Event>,
}

impl Bridge {
    pub(crate) fn new(listener: OwnedFd, socket: RunSocket) -> Result<Self, Errno> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        watch(&epoll, &listener, LISTENER)?;
        Ok(Self {
            epoll,
            listener,
            socket,
            connections: vec![],
            due: vec![],
            accepting: false,
            waiting: None,
            refused: false,
            scratch: vec![0; CHUNK],
            events: Vec::with_capacity(EVENTS),
        })
    }

    /// Has [`turn`](Self::turn) return early when there is something to read from `source`.
    pub(crate) fn listen_to(&self, source: impl AsFd) -> Result<(), Errno> {
        watch(&self.epoll, source, GUEST)
    }

    /// Waits for something to happen, for `time` at most, and does what there is to do. Tells whether the guest of
    /// [`listen_to`](Self::listen_to) is ready.
    pub(crate) fn turn(&mut self, time: Option<Duration>) -> bool {
        self.wait(self.patience(time));
        let mut guest = false;
        for place in 0..self.events.len() {
            let Event { flags, data } = self.events[place];
            match data.u64() {
                GUEST => guest = true,
                LISTENER => self.accepting = true,
                id => self.note(id, flags),
            }
        }
        // Those that are put on the list meanwhile have their turn next time.
        let due = self.due.len();
        for place in 0..due {
            self.advance(self.due[place]);
        }
        self.due.drain(..due);
        // Last, so that an event of this turn never meets a newer connection in an old one's place.
        self.accept();
        guest
    }

    fn patience(&self, time: Option<Duration>) -> Option<Duration> {
        let stuck = self.accepting && self.has_room();
        match (self.due.is_empty(), stuck) {
            (false, _) => Some(Duration::ZERO),
            (true, true) => Some(time.unwrap_or(RETRY).min(RETRY)),
            (true, false) => time,
        }
    }

    fn wait(&mut self, time: Option<Duration>) {
        let time = time.map(|time| Timespec::try_from(time).expect("options end at 10000 hours"));
        self.events.clear();
        match epoll::wait(&self.epoll, spare_capacity(&mut self.events), time.as_ref()) {
            // Somebody looked at us with a debugger, or stopped and continued us.
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => unreachable!("an epoll of ours, and memory of ours: {error}"),
        }
    }

    fn note(&mut self, id: u64, flags: EventFlags) {
        let (index, side) = from_id(id);
        if let Some(Some(connection)) = self.connections.get_mut(index)
            && connection.note(side, flags)
        {
            self.due.push(index);
        }
    }

    fn advance(&mut self, index: usize) {
        let Some(connection) = &mut self.connections[index] else { return };
        match connection.advance(&mut self.scratch) {
            Next::Wait => {}
            Next::Again => self.due.push(index),
            Next::Close => self.connections[index] = None,
        }
    }

    fn accept(&mut self) {
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
                    self.join(client, upstream);
                }
                Err(Errno::AGAIN | Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    self.waiting = Some(client);
                    return;
                }
                Err(error) => self.refuse(error),
            }
        }
    }

    fn next_client(&mut self) -> Result<OwnedFd, Errno> {
        match self.waiting.take() {
            Some(client) => Ok(client),
            None => net::accept_with(&self.listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC),
        }
    }

    /// The client, which is dropped, sees its connection closed. Said once, however often the agent tries.
    fn refuse(&mut self, error: Errno) {
        if !mem::replace(&mut self.refused, true) {
            say(self.socket.explain(error));
        }
    }

    fn join(&mut self, client: OwnedFd, upstream: OwnedFd) {
        // An event of a stream is a few bytes: without this the kernel would wait for more.
        let _ = sockopt::set_tcp_nodelay(&client, true);
        let index = self.free_slot();
        let watched = watch(&self.epoll, &client, to_id(index, Side::Client))
            .and_then(|()| watch(&self.epoll, &upstream, to_id(index, Side::Upstream)));
        // Where the kernel has no memory to watch them, both are closed.
        if watched.is_ok() {
            self.connections[index] = Some(Connection::new(client, upstream));
        }
    }

    fn free_slot(&mut self) -> usize {
        self.connections.iter().position(Option::is_none).unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        })
    }

    fn has_room(&self) -> bool {
        self.connections.iter().flatten().count() < MAX_CONNECTIONS
    }
}

fn watch(epoll: &OwnedFd, source: impl AsFd, id: u64) -> Result<(), Errno> {
    // The listener and the guest are read until they are empty, so that an edge is enough for them too.
    let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
    epoll::add(epoll, source, EventData::new_u64(id), flags)
}

fn to_id(index: usize, side: Side) -> u64 {
    index as u64 * 2 + u64::from(side == Side::Upstream)
}

fn from_id(id: u64) -> (usize, Side) {
    let index = usize::try_from(id / 2).expect("made from an index");
    (index, if id.is_multiple_of(2) { Side::Client } else { Side::Upstream })
}

const LISTENER: u64 = u64::MAX;
const GUEST: u64 = u64::MAX - 1;

/// Of one agent; more wait in the listener's backlog. A fourth of what the gateway takes from one run.
const MAX_CONNECTIONS: usize = 256;

/// One read. As much as a pipe or a unix socket's usual buffers hold at one time.
const CHUNK: usize = 64 << 10;

/// Taken from the kernel at one time; more are next.
const EVENTS: usize = 64;

/// When a connection is tried again that neither we nor the gateway had room for.
const RETRY: Duration = Duration::from_millis(10);
