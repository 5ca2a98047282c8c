//! The model provider behind every subject: one thread, one epoll loop, answers from memory.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use crate::clock::{self, PreciseTimer};
use crate::http::{MessagePart, MessageReader};
use crate::script::{self, ContentEvent, ProviderCall};

/// Serves on a loopback port, written to stdout, and on `socket`, until stdin is closed.
pub(crate) fn serve(socket: &Path) -> Result<()> {
    let tcp = TcpListener::bind("127.0.0.1:0")?;
    let unix = UnixListener::bind(socket).context("binding the provider's socket")?;
    writeln!(io::stdout(), "{}", tcp.local_addr()?.port())?;
    let mut provider = ProviderLoop::new(tcp, unix)?;
    while provider.serve_ready()? {}
    Ok(())
}

struct ProviderLoop {
    epoll: Epoll,
    alarm: PreciseTimer,
    tcp: TcpListener,
    unix: UnixListener,
    peers: Vec<Option<PeerConnection>>,
    accepted: u64,
    /// Paced streams, ordered by the time of their next chunk.
    due: BinaryHeap<Reverse<(u64, StreamSlot)>>,
    /// Unpaced streams whose sockets take more data.
    eager: VecDeque<StreamSlot>,
    event: ContentEvent,
    scratch: Vec<u8>,
}

/// A slot and the peer that it was given to; the slot may belong to another peer by now.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct StreamSlot {
    slot: usize,
    peer: u64,
}

/// A connection. Reading and writing are the same for both socket families.
struct PeerConnection {
    id: u64,
    socket: File,
    request: MessageReader,
    head: Vec<u8>,
    body: Vec<u8>,
    unsent: Vec<u8>,
    flow: Option<SentStream>,
}

/// An open stream.
#[derive(Clone, Copy)]
struct SentStream {
    sent: u32,
    chunks: u32,
    /// Nanoseconds between chunks.
    interval: u64,
}

impl ProviderLoop {
    fn new(tcp: TcpListener, unix: UnixListener) -> Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let alarm = PreciseTimer::new()?;
        tcp.set_nonblocking(true)?;
        unix.set_nonblocking(true)?;
        epoll.add(&tcp, EpollEvent::new(EpollFlags::EPOLLIN, TCP))?;
        epoll.add(&unix, EpollEvent::new(EpollFlags::EPOLLIN, UNIX))?;
        epoll.add(&alarm, EpollEvent::new(EpollFlags::EPOLLIN, ALARM))?;
        epoll.add(io::stdin(), EpollEvent::new(EpollFlags::EPOLLIN, STDIN))?;
        Ok(Self {
            epoll,
            alarm,
            tcp,
            unix,
            peers: vec![],
            accepted: 0,
            due: BinaryHeap::new(),
            eager: VecDeque::new(),
            event: ContentEvent::new(),
            scratch: vec![0; SCRATCH],
        })
    }

    /// Waits once and handles the events. Returns false if stdin was closed.
    fn serve_ready(&mut self) -> Result<bool> {
        let mut events = [EpollEvent::empty(); 256];
        let patience = if self.eager.is_empty() { EpollTimeout::NONE } else { EpollTimeout::ZERO };
        let ready = match self.epoll.wait(&mut events, patience) {
            Err(nix::Error::EINTR) => 0,
            waited => waited?,
        };
        for event in &events[..ready] {
            match event.data() {
                STDIN => return Ok(false),
                ALARM => (),
                TCP => self.accept_tcp()?,
                UNIX => self.accept_unix()?,
                slot => self.serve_peer(usize::try_from(slot)?, event.events()),
            }
        }
        self.send_due();
        self.send_eager();
        self.alarm.set(self.due.peek().map(|Reverse((due, ..))| *due))?;
        Ok(true)
    }

    fn accept_tcp(&mut self) -> Result<()> {
        while let Some((socket, _)) = unless_blocked(self.tcp.accept())? {
            socket.set_nonblocking(true)?;
            socket.set_nodelay(true)?;
            self.accept_peer(socket.into())?;
        }
        Ok(())
    }

    fn accept_unix(&mut self) -> Result<()> {
        while let Some((socket, _)) = unless_blocked(self.unix.accept())? {
            socket.set_nonblocking(true)?;
            self.accept_peer(socket.into())?;
        }
        Ok(())
    }

    fn accept_peer(&mut self, socket: OwnedFd) -> Result<()> {
        let free = self.peers.iter().position(Option::is_none);
        let slot = free.unwrap_or_else(|| {
            self.peers.push(None);
            self.peers.len() - 1
        });
        self.epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, slot as u64))?;
        self.accepted += 1;
        self.peers[slot] = Some(PeerConnection {
            id: self.accepted,
            socket: socket.into(),
            request: MessageReader::default(),
            head: vec![],
            body: vec![],
            unsent: vec![],
            flow: None,
        });
        Ok(())
    }

    /// Reads and writes as much as one peer's socket allows. A peer that breaks off is removed.
    fn serve_peer(&mut self, slot: usize, ready: EpollFlags) {
        let mut result = Ok(());
        if ready.contains(EpollFlags::EPOLLOUT) {
            result = self.flush_peer(slot);
        }
        if result.is_ok() && ready.intersects(EpollFlags::EPOLLIN | EpollFlags::EPOLLHUP) {
            result = self.receive_request(slot);
        }
        if result.is_err() {
            self.peers[slot] = None;
        }
    }

    fn receive_request(&mut self, slot: usize) -> Result<()> {
        let Some(peer) = &mut self.peers[slot] else { return Ok(()) };
        let Some(read) = unless_blocked((&peer.socket).read(&mut self.scratch))? else {
            return Ok(());
        };
        ensure!(read > 0, "the peer has left");
        if !peer.take_bytes(&self.scratch[..read])? {
            return Ok(());
        }
        let call = ProviderCall::of(&peer.body);
        peer.body.clear();
        match call {
            ProviderCall::Unary => {
                self.send_bytes(slot, &script::unary_answer(script::ANSWER.as_bytes()))
            }
            ProviderCall::Echo => {
                let head = serde_json::to_vec(&String::from_utf8_lossy(&peer.head))?;
                self.send_bytes(slot, &script::unary_answer(&head))
            }
            ProviderCall::Stream { chunks, interval } => {
                let interval = u64::try_from(interval.as_nanos())?;
                peer.flow = Some(SentStream { sent: 0, chunks, interval });
                self.begin_stream(slot)
            }
        }
    }

    /// Sends the head with the first chunk, as a provider does after it has waited for its model.
    fn begin_stream(&mut self, slot: usize) -> Result<()> {
        let mut bytes = script::stream_head();
        let now = clock::monotonic_nanos();
        bytes.extend_from_slice(self.event.stamp(0, now));
        self.send_bytes(slot, &bytes)?;
        let Some(PeerConnection { id, flow: Some(flow), .. }) = &mut self.peers[slot] else {
            return Ok(());
        };
        flow.sent = 1;
        let stream_slot = StreamSlot { slot, peer: *id };
        let pause = if flow.interval > 0 { flow.interval } else { GATHERING };
        self.due.push(Reverse((now + pause, stream_slot)));
        Ok(())
    }

    fn send_due(&mut self) {
        while let Some(Reverse((due, stream_slot))) = self.due.peek().copied() {
            let now = clock::monotonic_nanos();
            if due > now {
                break;
            }
            self.due.pop();
            if self.is_eager(stream_slot) {
                self.eager.push_back(stream_slot);
            } else if let Some(flow) = self.send_chunk(stream_slot) {
                // A provider that cannot keep the pace slows down; it does not catch up.
                self.due.push(Reverse(((due + flow.interval).max(now), stream_slot)));
            }
        }
    }

    fn is_eager(&self, stream_slot: StreamSlot) -> bool {
        let peer = self.peers.get(stream_slot.slot).and_then(Option::as_ref);
        let flow = peer.filter(|peer| peer.id == stream_slot.peer).and_then(|peer| peer.flow);
        flow.is_some_and(|flow| flow.interval == 0)
    }

    /// Sends one chunk for each unpaced stream whose socket is not full.
    fn send_eager(&mut self) {
        for _ in 0..self.eager.len() {
            let Some(stream_slot) = self.eager.pop_front() else { return };
            let more = self.send_chunk(stream_slot).is_some();
            // A full socket reports when it takes more, and `flush` puts it back into the queue.
            if more
                && self.peers[stream_slot.slot].as_ref().is_some_and(|peer| peer.unsent.is_empty())
            {
                self.eager.push_back(stream_slot);
            }
        }
    }

    /// Sends the next chunk, or everything after the last chunk. Returns the stream if it has more.
    fn send_chunk(&mut self, stream_slot: StreamSlot) -> Option<SentStream> {
        let peer = self
            .peers
            .get_mut(stream_slot.slot)?
            .as_mut()
            .filter(|peer| peer.id == stream_slot.peer)?;
        let flow = peer.flow.as_mut()?;
        if !peer.unsent.is_empty() {
            return Some(*flow);
        }
        let result = if flow.sent == flow.chunks {
            let end = script::stream_end(flow.chunks);
            peer.flow = None;
            self.send_bytes(stream_slot.slot, &end)
        } else {
            let frame = self.event.stamp(flow.sent, clock::monotonic_nanos());
            flow.sent += 1;
            peer.write_bytes(frame).and_then(|()| self.update_interest(stream_slot.slot))
        };
        if result.is_err() {
            self.peers[stream_slot.slot] = None;
        }
        self.peers[stream_slot.slot].as_ref()?.flow
    }

    fn send_bytes(&mut self, slot: usize, bytes: &[u8]) -> Result<()> {
        let Some(peer) = &mut self.peers[slot] else { return Ok(()) };
        peer.write_bytes(bytes)?;
        self.update_interest(slot)
    }

    fn flush_peer(&mut self, slot: usize) -> Result<()> {
        let Some(peer) = &mut self.peers[slot] else { return Ok(()) };
        let bytes = std::mem::take(&mut peer.unsent);
        peer.write_bytes(&bytes)?;
        if !peer.unsent.is_empty() {
            return Ok(());
        }
        let ready = EpollEvent::new(EpollFlags::EPOLLIN, slot as u64);
        self.epoll.modify(&peer.socket, &mut { ready })?;
        if peer.flow.is_some_and(|flow| flow.interval == 0) {
            self.eager.push_back(StreamSlot { slot, peer: peer.id });
        }
        Ok(())
    }

    /// Registers for the event that a full socket takes more.
    fn update_interest(&self, slot: usize) -> Result<()> {
        let Some(peer) = &self.peers[slot] else { return Ok(()) };
        if !peer.unsent.is_empty() {
            let both = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT;
            self.epoll.modify(&peer.socket, &mut EpollEvent::new(both, slot as u64))?;
        }
        Ok(())
    }
}

impl PeerConnection {
    /// Takes a piece of the request. Returns true when the request is complete.
    fn take_bytes(&mut self, bytes: &[u8]) -> Result<bool> {
        let Self { head, body, request, .. } = self;
        let used = request.feed(bytes, |part| {
            match part {
                MessagePart::Head(bytes) => {
                    head.clear();
                    head.extend_from_slice(bytes);
                }
                MessagePart::Body(bytes) => {
                    let room = KEPT.saturating_sub(body.len()).min(bytes.len());
                    body.extend_from_slice(&bytes[..room]);
                }
            }
            Ok(())
        })?;
        ensure!(used == bytes.len(), "the provider takes one request at a time");
        if request.is_done() {
            request.reset();
            return Ok(true);
        }
        Ok(false)
    }

    fn write_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        let written = unless_blocked(self.socket.write(bytes))?.unwrap_or(0);
        self.unsent.extend_from_slice(&bytes[written..]);
        Ok(())
    }
}

/// Returns the result, or `None` if the socket would block.
pub(crate) fn unless_blocked<T>(result: io::Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error.into()),
    }
}

const TCP: u64 = u64::MAX;
const UNIX: u64 = u64::MAX - 1;
const ALARM: u64 = u64::MAX - 2;
const STDIN: u64 = u64::MAX - 3;
/// The size of one read; a 1 MB prompt then stays within the processor's cache.
const SCRATCH: usize = 64 * 1024;
/// Nanoseconds that unpaced streams wait after their first chunk, so that all of them have begun.
const GATHERING: u64 = 30_000_000;
/// The number of bytes of a body that are searched for the model's name.
const KEPT: usize = 64 * 1024;
