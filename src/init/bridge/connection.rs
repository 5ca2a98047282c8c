//! One connection: a client of the sandbox, the run's socket, and the bytes that flow both ways.

use std::mem;
use std::os::fd::OwnedFd;

use rustix::event::PollFlags;
use rustix::io::{self, Errno};
use rustix::net::{self, SendFlags, Shutdown};

pub(super) struct Connection {
    client: End,
    upstream: End,
    up: Flow,
    down: Flow,
    /// Whether the loop has it on its list already.
    due: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Client,
    Upstream,
}

/// What the loop has to do with a connection that has been advanced.
pub(super) enum Next {
    Wait,
    /// There is more, but others have their turn first.
    Again,
    Close,
}

impl Connection {
    pub(super) fn new(client: OwnedFd, upstream: OwnedFd) -> Self {
        Self {
            client: End::new(client),
            upstream: End::new(upstream),
            up: Flow::default(),
            down: Flow::default(),
            // Nobody has looked yet whether there is something to read.
            due: true,
        }
    }

    /// The sockets to ask the kernel about, and what for. It tells of the end of each even if asked for nothing.
    pub(super) fn wanted(&self) -> impl Iterator<Item = (Side, &OwnedFd, PollFlags)> {
        let ends = [
            (Side::Client, &self.client, self.client.wanted(&self.up, &self.down)),
            (Side::Upstream, &self.upstream, self.upstream.wanted(&self.down, &self.up)),
        ];
        let ends = ends.into_iter().filter(|(_, end, _)| !end.has_ended());
        ends.map(|(side, end, flags)| (side, &end.socket, flags))
    }

    /// Remembers what the kernel reports. True if the connection is due, and was not before.
    pub(super) fn note(&mut self, side: Side, flags: PollFlags) -> bool {
        let end = match side {
            Side::Client => &mut self.client,
            Side::Upstream => &mut self.upstream,
        };
        // A hang-up or an error is what the next read or write returns.
        end.ended |= flags & (PollFlags::HUP | PollFlags::ERR);
        end.readable |= flags.contains(PollFlags::IN) || end.has_ended();
        end.writable |= flags.contains(PollFlags::OUT) || end.has_ended();
        !mem::replace(&mut self.due, true)
    }

    /// Moves what can be moved.
    pub(super) fn advance(&mut self, scratch: &mut [u8]) -> Next {
        self.due = false;
        // A client that was cut off may not be in any flow's way for a long time: its answer may be long in coming.
        if self.client.ended.contains(PollFlags::ERR) {
            return Next::Close;
        }
        // A gateway that has closed reads no more, though there may be an answer of it to deliver.
        if self.upstream.ended.contains(PollFlags::HUP) {
            self.up.discard();
        }
        let down = self.down.pump(&mut self.upstream, &mut self.client, scratch);
        let mut up = self.up.pump(&mut self.client, &mut self.upstream, scratch);
        if matches!(up, Err(Broken::Sink)) {
            // The gateway may close on a request that it does not want to the end, and say why before.
            self.up.discard();
            up = Ok(Pumped::Again);
        }
        match (down, up) {
            (Err(_), _) | (_, Err(_)) => Next::Close,
            _ if self.down.state == State::Ended && self.up.is_over() => Next::Close,
            (Ok(Pumped::Dry), Ok(Pumped::Dry)) => Next::Wait,
            _ => {
                self.due = true;
                Next::Again
            }
        }
    }
}

/// A socket, and what is known of it since the kernel last said "not now".
struct End {
    socket: OwnedFd,
    readable: bool,
    writable: bool,
    /// The hang-up, the error or both that the kernel has told of.
    ended: PollFlags,
}

impl End {
    fn new(socket: OwnedFd) -> Self {
        Self { socket, readable: true, writable: true, ended: PollFlags::empty() }
    }

    /// No read or write of it has to wait any more. The kernel would tell so each time.
    fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Nothing that would not be acted on: the loop would turn for it, and do nothing.
    fn wanted(&self, from: &Flow, to: &Flow) -> PollFlags {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, !self.readable && from.is_reading());
        flags.set(PollFlags::OUT, !self.writable && !to.held.is_empty());
        flags
    }

    /// The bytes read: none at the end of the stream. `None` if there is nothing to read now.
    fn read(&mut self, scratch: &mut [u8]) -> Result<Option<usize>, Broken> {
        match io::read(&self.socket, scratch) {
            Ok(length) => Ok(Some(length)),
            Err(Errno::AGAIN) => {
                self.readable = false;
                Ok(None)
            }
            Err(Errno::INTR) => Ok(None),
            Err(_) => Err(Broken::Source),
        }
    }

    /// How much of `bytes` the kernel has taken.
    fn write(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        match net::send(&self.socket, bytes, SendFlags::NOSIGNAL) {
            Ok(length) => Ok(length),
            Err(Errno::AGAIN) => {
                self.writable = false;
                Ok(0)
            }
            Err(Errno::INTR) => Ok(0),
            Err(_) => Err(Broken::Sink),
        }
    }
}

/// One direction.
#[derive(Default)]
struct Flow {
    /// Read, but not yet delivered: nothing most of the time, and no memory then.
    held: Vec<u8>,
    /// How much of `held` is delivered.
    delivered: usize,
    state: State,
}

#[derive(Default, PartialEq, Eq)]
enum State {
    #[default]
    Open,
    /// The source has ended; what is held is still to deliver.
    Ending,
    /// The sink has been told.
    Ended,
    /// Nobody reads; the source is emptied, so that its bytes do not turn our close into a reset.
    Discarding,
}

enum Pumped {
    /// Until the kernel says something new, there is nothing to move.
    Dry,
    Again,
}

#[derive(Debug)]
enum Broken {
    Source,
    Sink,
}

impl Flow {
    fn pump(&mut self, from: &mut End, to: &mut End, scratch: &mut [u8]) -> Result<Pumped, Broken> {
        for _ in 0..BURST {
            if !self.held.is_empty() {
                if !to.writable {
                    return Ok(Pumped::Dry);
                }
                self.deliver(to)?;
                continue;
            }
            match self.state {
                State::Ended => return Ok(Pumped::Dry),
                State::Ending => {
                    // It fails where the sink is gone, which its other flow finds out.
                    let _ = net::shutdown(&to.socket, Shutdown::Write);
                    self.state = State::Ended;
                }
                State::Open | State::Discarding if !from.readable => return Ok(Pumped::Dry),
                State::Open => match from.read(scratch)? {
                    None => {}
                    Some(0) => self.state = State::Ending,
                    Some(length) => self.take(&scratch[..length], to)?,
                },
                State::Discarding => {
                    if from.read(scratch)? == Some(0) {
                        self.state = State::Ended;
                    }
                }
            }
        }
        Ok(Pumped::Again)
    }

    /// Delivers at once, and holds what the sink has no room for.
    fn take(&mut self, bytes: &[u8], to: &mut End) -> Result<(), Broken> {
        let taken = if to.writable { to.write(bytes)? } else { 0 };
        self.held.extend_from_slice(&bytes[taken..]);
        Ok(())
    }

    fn deliver(&mut self, to: &mut End) -> Result<(), Broken> {
        self.delivered += to.write(&self.held[self.delivered..])?;
        if self.delivered == self.held.len() {
            self.forget();
        }
        Ok(())
    }

    fn discard(&mut self) {
        if !self.is_over() {
            self.forget();
            self.state = State::Discarding;
        }
    }

    /// Gives the memory back too: most connections need it once, for a large request.
    fn forget(&mut self) {
        self.held = Vec::new();
        self.delivered = 0;
    }

    fn is_reading(&self) -> bool {
        self.held.is_empty() && matches!(self.state, State::Open | State::Discarding)
    }

    fn is_over(&self) -> bool {
        matches!(self.state, State::Ended | State::Discarding)
    }
}

/// Reads or writes of one flow before the others have their turn.
const BURST: usize = 16;
