//! One connection: a client of the sandbox, the run's socket, and the bytes that flow both ways.

use std::mem;
use std::os::fd::OwnedFd;

use rustix::event::PollFlags;
use rustix::io::{self, Errno};
use rustix::net::{self, SendFlags, Shutdown};

pub(super) struct BridgedConnection {
    client: SocketEnd,
    upstream: SocketEnd,
    up: BytePipe,
    down: BytePipe,
    /// Whether the loop has it on its list already.
    due: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionSide {
    Client,
    Upstream,
}

/// What the loop has to do with a connection that has been advanced.
pub(super) enum ConnectionAction {
    Wait,
    /// There is more, but others have their turn first.
    Again,
    Close,
}

impl BridgedConnection {
    pub(super) fn new(client: OwnedFd, upstream: OwnedFd) -> Self {
        Self {
            client: SocketEnd::new(client),
            upstream: SocketEnd::new(upstream),
            up: BytePipe::default(),
            down: BytePipe::default(),
            // Nobody has looked yet whether there is something to read.
            due: true,
        }
    }

    /// The sockets to ask the kernel about, and what for. It tells of the end of each even if asked for nothing.
    pub(super) fn poll_interests(
        &self,
    ) -> impl Iterator<Item = (ConnectionSide, &OwnedFd, PollFlags)> {
        let ends = [
            (ConnectionSide::Client, &self.client, self.client.poll_flags(&self.up, &self.down)),
            (
                ConnectionSide::Upstream,
                &self.upstream,
                self.upstream.poll_flags(&self.down, &self.up),
            ),
        ];
        let ends = ends.into_iter().filter(|(_, end, _)| !end.has_ended());
        ends.map(|(side, end, flags)| (side, &end.socket, flags))
    }

    /// Remembers what the kernel reports. True if the connection is due, and was not before.
    pub(super) fn record_readiness(&mut self, side: ConnectionSide, flags: PollFlags) -> bool {
        let end = match side {
            ConnectionSide::Client => &mut self.client,
            ConnectionSide::Upstream => &mut self.upstream,
        };
        // A hang-up or an error is what the next read or write returns.
        end.ended |= flags & (PollFlags::HUP | PollFlags::ERR);
        end.readable |= flags.contains(PollFlags::IN) || end.has_ended();
        end.writable |= flags.contains(PollFlags::OUT) || end.has_ended();
        !mem::replace(&mut self.due, true)
    }

    /// Moves what can be moved.
    pub(super) fn advance(&mut self, scratch: &mut [u8]) -> ConnectionAction {
        self.due = false;
        // A client that was cut off may not be in any flow's way for a long time: its answer may be long in coming.
        if self.client.ended.contains(PollFlags::ERR) {
            return ConnectionAction::Close;
        }
        // A gateway that has closed reads no more, though there may be an answer of it to deliver.
        if self.upstream.ended.contains(PollFlags::HUP) {
            self.up.start_discarding();
        }
        let down = self.down.pump(&mut self.upstream, &mut self.client, scratch);
        let mut up = self.up.pump(&mut self.client, &mut self.upstream, scratch);
        if matches!(up, Err(PipeError::Sink)) {
            // The gateway may close on a request that it does not want to the end, and say why before.
            self.up.start_discarding();
            up = Ok(PumpOutcome::Again);
        }
        match (down, up) {
            (Err(_), _) | (_, Err(_)) => ConnectionAction::Close,
            _ if self.down.state == PipeState::Ended && self.up.is_over() => {
                ConnectionAction::Close
            }
            (Ok(PumpOutcome::Dry), Ok(PumpOutcome::Dry)) => ConnectionAction::Wait,
            _ => {
                self.due = true;
                ConnectionAction::Again
            }
        }
    }
}

/// A socket, and what is known of it since the kernel last said "not now".
struct SocketEnd {
    socket: OwnedFd,
    readable: bool,
    writable: bool,
    /// The hang-up, the error or both that the kernel has told of.
    ended: PollFlags,
}

impl SocketEnd {
    fn new(socket: OwnedFd) -> Self {
        Self { socket, readable: true, writable: true, ended: PollFlags::empty() }
    }

    /// No read or write of it has to wait any more. The kernel would tell so each time.
    fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Nothing that would not be acted on: the loop would turn for it, and do nothing.
    fn poll_flags(&self, from: &BytePipe, to: &BytePipe) -> PollFlags {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, !self.readable && from.is_reading());
        flags.set(PollFlags::OUT, !self.writable && !to.held.is_empty());
        flags
    }

    /// The bytes read: none at the end of the stream. `None` if there is nothing to read now.
    fn read(&mut self, scratch: &mut [u8]) -> Result<Option<usize>, PipeError> {
        match io::read(&self.socket, scratch) {
            Ok(length) => Ok(Some(length)),
            Err(Errno::AGAIN) => {
                self.readable = false;
                Ok(None)
            }
            Err(Errno::INTR) => Ok(None),
            Err(_) => Err(PipeError::Source),
        }
    }

    /// How much of `bytes` the kernel has taken.
    fn write(&mut self, bytes: &[u8]) -> Result<usize, PipeError> {
        match net::send(&self.socket, bytes, SendFlags::NOSIGNAL) {
            Ok(length) => Ok(length),
            Err(Errno::AGAIN) => {
                self.writable = false;
                Ok(0)
            }
            Err(Errno::INTR) => Ok(0),
            Err(_) => Err(PipeError::Sink),
        }
    }
}

/// One direction.
#[derive(Default)]
struct BytePipe {
    /// Read, but not yet delivered: nothing most of the time, and no memory then.
    held: Vec<u8>,
    /// How much of `held` is delivered.
    delivered: usize,
    state: PipeState,
}

#[derive(Default, PartialEq, Eq)]
enum PipeState {
    #[default]
    Open,
    /// The source has ended; what is held is still to deliver.
    Ending,
    /// The sink has been told.
    Ended,
    /// Nobody reads; the source is emptied, so that its bytes do not turn our close into a reset.
    Discarding,
}

enum PumpOutcome {
    /// Until the kernel says something new, there is nothing to move.
    Dry,
    Again,
}

#[derive(Debug)]
enum PipeError {
    Source,
    Sink,
}

impl BytePipe {
    fn pump(
        &mut self,
        from: &mut SocketEnd,
        to: &mut SocketEnd,
        scratch: &mut [u8],
    ) -> Result<PumpOutcome, PipeError> {
        for _ in 0..MAX_OPS_PER_TURN {
            if !self.held.is_empty() {
                if !to.writable {
                    return Ok(PumpOutcome::Dry);
                }
                self.flush_buffer(to)?;
                continue;
            }
            match self.state {
                PipeState::Ended => return Ok(PumpOutcome::Dry),
                PipeState::Ending => {
                    // It fails where the sink is gone, which its other flow finds out.
                    let _ = net::shutdown(&to.socket, Shutdown::Write);
                    self.state = PipeState::Ended;
                }
                PipeState::Open | PipeState::Discarding if !from.readable => {
                    return Ok(PumpOutcome::Dry);
                }
                PipeState::Open => match from.read(scratch)? {
                    None => {}
                    Some(0) => self.state = PipeState::Ending,
                    Some(length) => self.send_or_buffer(&scratch[..length], to)?,
                },
                PipeState::Discarding => {
                    if from.read(scratch)? == Some(0) {
                        self.state = PipeState::Ended;
                    }
                }
            }
        }
        Ok(PumpOutcome::Again)
    }

    /// Delivers at once, and holds what the sink has no room for.
    fn send_or_buffer(&mut self, bytes: &[u8], to: &mut SocketEnd) -> Result<(), PipeError> {
        let taken = if to.writable { to.write(bytes)? } else { 0 };
        self.held.extend_from_slice(&bytes[taken..]);
        Ok(())
    }

    fn flush_buffer(&mut self, to: &mut SocketEnd) -> Result<(), PipeError> {
        self.delivered += to.write(&self.held[self.delivered..])?;
        if self.delivered == self.held.len() {
            self.release_buffer();
        }
        Ok(())
    }

    fn start_discarding(&mut self) {
        if !self.is_over() {
            self.release_buffer();
            self.state = PipeState::Discarding;
        }
    }

    /// Gives the memory back too: most connections need it once, for a large request.
    fn release_buffer(&mut self) {
        self.held = Vec::new();
        self.delivered = 0;
    }

    fn is_reading(&self) -> bool {
        self.held.is_empty() && matches!(self.state, PipeState::Open | PipeState::Discarding)
    }

    fn is_over(&self) -> bool {
        matches!(self.state, PipeState::Ended | PipeState::Discarding)
    }
}

/// Reads or writes of one flow before the others have their turn.
const MAX_OPS_PER_TURN: usize = 16;
