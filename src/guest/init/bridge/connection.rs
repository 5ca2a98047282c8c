//! One connection: a client in the sandbox, a connection to the run's socket, and the bytes that flow both ways.

use std::mem;
use std::os::fd::OwnedFd;

use rustix::event::PollFlags;
use rustix::io::{self, Errno};
use rustix::net::{self, SendFlags, Shutdown};

/// A client and its connection to the gateway. `up` is the direction to the gateway, `down` the direction to the
/// client.
pub(super) struct BridgedConnection {
    client: SocketEnd,
    upstream: SocketEnd,
    up: BytePipe,
    down: BytePipe,
    /// True if the connection is already in the loop's list.
    due: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionSide {
    Client,
    Upstream,
}

/// The action of the loop after a connection was advanced.
pub(super) enum ConnectionAction {
    /// No byte can be moved until the kernel reports an event.
    Wait,
    /// More bytes can be moved, after the other connections had their turn.
    Requeue,
    Close,
}

impl BridgedConnection {
    pub(super) fn new(client: OwnedFd, upstream: OwnedFd) -> Self {
        Self {
            client: SocketEnd::new(client),
            upstream: SocketEnd::new(upstream),
            up: BytePipe::default(),
            down: BytePipe::default(),
            // The sockets have not been read yet, so they may have data already.
            due: true,
        }
    }

    /// Returns the sockets to poll, and the events to poll for. The kernel always reports a socket's end, so no event
    /// is requested for the end.
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
        // An ended socket would be reported by every poll, and the loop would spin.
        let ends = ends.into_iter().filter(|(_, end, _)| !end.has_ended());
        ends.map(|(side, end, flags)| (side, &end.socket, flags))
    }

    /// Records the events that the kernel reports. Returns true if the connection was not queued to be advanced, and
    /// has to be queued now.
    pub(super) fn record_readiness(&mut self, side: ConnectionSide, flags: PollFlags) -> bool {
        let end = match side {
            ConnectionSide::Client => &mut self.client,
            ConnectionSide::Upstream => &mut self.upstream,
        };
        // A hang-up or an error lets the next read or write return at once, so that both count as ready.
        end.ended |= flags & (PollFlags::HUP | PollFlags::ERR);
        end.readable |= flags.contains(PollFlags::IN) || end.has_ended();
        end.writable |= flags.contains(PollFlags::OUT) || end.has_ended();
        !mem::replace(&mut self.due, true)
    }

    /// Moves as many bytes as possible in both directions.
    pub(super) fn advance(&mut self, scratch: &mut [u8]) -> ConnectionAction {
        self.due = false;
        // The client has reset its connection. A flow would notice only with its next byte, and the answer may take
        // long.
        if self.client.ended.contains(PollFlags::ERR) {
            return ConnectionAction::Close;
        }
        // A gateway that has closed reads no more, but its answer may still have to be delivered.
        if self.upstream.ended.contains(PollFlags::HUP) {
            self.up.start_discarding();
        }
        // `down` goes first, so that an answer that explains a refusal is read before the request fails.
        let down = self.down.pump(&mut self.upstream, &mut self.client, scratch);
        let mut up = self.up.pump(&mut self.client, &mut self.upstream, scratch);
        if matches!(up, Err(PipeError::Sink)) {
            // The gateway may stop reading a request that it refuses, and its answer says why. The rest of the request
            // is discarded.
            self.up.start_discarding();
            up = Ok(PumpOutcome::MoreToMove);
        }
        match (down, up) {
            // The answer has ended and the request is delivered or discarded: the connection has no work left.
            (Err(_), _) | (_, Err(_)) => ConnectionAction::Close,
            _ if self.down.state == PipeState::Ended && self.up.is_over() => {
                ConnectionAction::Close
            }
            (Ok(PumpOutcome::Blocked), Ok(PumpOutcome::Blocked)) => ConnectionAction::Wait,
            _ => {
                self.due = true;
                ConnectionAction::Requeue
            }
        }
    }
}

/// A socket, and its state since the kernel last reported that an operation would block.
struct SocketEnd {
    socket: OwnedFd,
    readable: bool,
    writable: bool,
    /// The hang-up and the error that the kernel has reported.
    ended: PollFlags,
}

impl SocketEnd {
    fn new(socket: OwnedFd) -> Self {
        Self { socket, readable: true, writable: true, ended: PollFlags::empty() }
    }

    /// Returns true after a hang-up or an error. No read or write blocks then, and each poll would report it again.
    fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Returns the events that the loop would act on, and no other: another event would let the loop spin.
    fn poll_flags(&self, from: &BytePipe, to: &BytePipe) -> PollFlags {
        let mut flags = PollFlags::empty();
        // The bridge polls for input only while the pipe is empty, and for output only while a pipe has bytes to
        // deliver. This is the back pressure.
        flags.set(PollFlags::IN, !self.readable && from.is_reading());
        flags.set(PollFlags::OUT, !self.writable && !to.held.is_empty());
        flags
    }

    /// Reads into `scratch`. Returns the number of bytes, which is 0 at the end of the stream, or `None` if no data is
    /// ready.
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

    /// Writes as much of `bytes` as the kernel takes, and returns the number of bytes taken.
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

/// One direction of a connection.
#[derive(Default)]
struct BytePipe {
    /// The bytes that are read but not delivered. The buffer is usually empty and has no memory then.
    held: Vec<u8>,
    /// The number of delivered bytes of `held`.
    delivered: usize,
    state: PipeState,
}

#[derive(Default, PartialEq, Eq)]
enum PipeState {
    #[default]
    Open,
    /// The source has ended; the held bytes are still to be delivered.
    Ending,
    /// The sink has been shut down for writing.
    Ended,
    /// The sink reads no more. The source is emptied, because closing a socket with unread bytes resets the connection.
    Discarding,
}

enum PumpOutcome {
    /// No byte can be moved until the kernel reports an event.
    Blocked,
    MoreToMove,
}

#[derive(Debug)]
enum PipeError {
    Source,
    Sink,
}

impl BytePipe {
    /// Moves bytes until the source is empty, the sink is full, or [`MAX_OPS_PER_TURN`] operations are done.
    fn pump(
        &mut self,
        from: &mut SocketEnd,
        to: &mut SocketEnd,
        scratch: &mut [u8],
    ) -> Result<PumpOutcome, PipeError> {
        // Each round does one operation, so that a fast flow cannot starve the others.
        for _ in 0..MAX_OPS_PER_TURN {
            // Bytes from an earlier read are delivered before anything new is read.
            if !self.held.is_empty() {
                if !to.writable {
                    return Ok(PumpOutcome::Blocked);
                }
                self.flush_buffer(to)?;
                continue;
            }
            match self.state {
                PipeState::Ended => return Ok(PumpOutcome::Blocked),
                PipeState::Ending => {
                    // The call fails if the sink is disconnected; the other direction detects that.
                    let _ = net::shutdown(&to.socket, Shutdown::Write);
                    self.state = PipeState::Ended;
                }
                PipeState::Open | PipeState::Discarding if !from.readable => {
                    return Ok(PumpOutcome::Blocked);
                }
                PipeState::Open => match from.read(scratch)? {
                    None => {}
                    Some(0) => self.state = PipeState::Ending,
                    Some(length) => self.send_or_buffer(&scratch[..length], to)?,
                },
                // The bytes are dropped.
                PipeState::Discarding => {
                    if from.read(scratch)? == Some(0) {
                        self.state = PipeState::Ended;
                    }
                }
            }
        }
        Ok(PumpOutcome::MoreToMove)
    }

    /// Delivers the bytes at once, and holds the rest if the sink is full.
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

    /// Drops the undelivered bytes, and lets later bytes of the source be dropped too.
    fn start_discarding(&mut self) {
        if !self.is_over() {
            self.release_buffer();
            self.state = PipeState::Discarding;
        }
    }

    /// Drops the buffer and its memory: most connections need the buffer once, for a large request.
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

/// The maximum number of reads and writes of one direction before other connections are served.
const MAX_OPS_PER_TURN: usize = 16;
