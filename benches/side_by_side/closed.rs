//! Closed-loop load: each client waits for its answer before the next request.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use crate::clock;
use crate::http::{self, MessagePart, MessageReader};
use crate::provider::unless_blocked;
use crate::script::{self, ProviderCall, StreamTranscript};

/// The request, the number of clients, and the duration.
#[derive(Clone, Copy)]
pub(crate) struct ClosedLoad {
    pub(crate) call: ProviderCall,
    /// The size of a request's body.
    pub(crate) bytes: usize,
    pub(crate) clients: usize,
    pub(crate) warm_up: Duration,
    pub(crate) window: Duration,
}

/// Makes requests until the time is over. Calls `edge` when the window opens and when it closes. Returns how long the
/// answers in between took, in nanoseconds: unary ones until complete, streams until the first byte of their body.
pub(crate) fn run(
    load: &ClosedLoad,
    socket: &Path,
    mut edge: impl FnMut() -> Result<()>,
) -> Result<Vec<u64>> {
    let request = script::client_request(load.call, load.bytes);
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    let mut callers = vec![];
    for slot in 0..load.clients {
        let caller = LoadClient::connect(socket, load.call)?;
        epoll.add(&caller.socket, epoll_event(slot, false))?;
        callers.push(caller);
    }
    for (slot, caller) in callers.iter_mut().enumerate() {
        caller.send_request(&request, &epoll, slot)?;
    }
    let opens = clock::monotonic_nanos() + u64::try_from(load.warm_up.as_nanos())?;
    let closes = opens + u64::try_from(load.window.as_nanos())?;
    let mut took = vec![];
    let mut is_open = false;
    let mut events = [EpollEvent::empty(); 64];
    let mut scratch = vec![0; 64 * 1024];
    loop {
        let ready = epoll.wait(&mut events, PATIENCE)?;
        ensure!(ready > 0, "no answer within ten seconds");
        for event in &events[..ready] {
            let slot = usize::try_from(event.data())?;
            let caller = &mut callers[slot];
            if event.events().contains(EpollFlags::EPOLLOUT) {
                caller.write_request(&request, &epoll, slot)?;
            }
            if !event.events().intersects(EpollFlags::EPOLLIN | EpollFlags::EPOLLHUP) {
                continue;
            }
            let Some(duration) = caller.receive_answer(&mut scratch)? else { continue };
            if is_open {
                took.push(duration);
            }
            caller.send_request(&request, &epoll, slot)?;
        }
        let now = clock::monotonic_nanos();
        if !is_open && now >= opens {
            is_open = true;
            edge()?;
        }
        // On a machine that is busy with other things, the window stays open until there are enough answers.
        if now >= closes && took.len() >= load.clients {
            edge()?;
            return Ok(took);
        }
    }
}

struct LoadClient {
    socket: UnixStream,
    call: ProviderCall,
    response: MessageReader,
    progress: AnswerProgress,
    /// The number of bytes of the request that are written.
    written: usize,
    is_blocked: bool,
    asked_at: u64,
    answered_at: Option<u64>,
}

/// The part of the expected answer that has arrived.
enum AnswerProgress {
    Answer(usize),
    Stream(StreamTranscript),
}

impl LoadClient {
    fn connect(socket: &Path, call: ProviderCall) -> Result<Self> {
        let socket = UnixStream::connect(socket).context("connecting to the subject")?;
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket,
            call,
            response: MessageReader::default(),
            progress: AnswerProgress::Answer(0),
            written: 0,
            is_blocked: false,
            asked_at: 0,
            answered_at: None,
        })
    }

    fn send_request(&mut self, request: &[u8], epoll: &Epoll, slot: usize) -> Result<()> {
        self.progress = match self.call {
            ProviderCall::Unary | ProviderCall::Echo => AnswerProgress::Answer(0),
            ProviderCall::Stream { chunks, .. } => {
                AnswerProgress::Stream(StreamTranscript::new(chunks))
            }
        };
        self.written = 0;
        self.answered_at = None;
        self.asked_at = clock::monotonic_nanos();
        self.write_request(request, epoll, slot)
    }

    /// Writes what the socket takes, and registers for the rest.
    fn write_request(&mut self, request: &[u8], epoll: &Epoll, slot: usize) -> Result<()> {
        while self.written < request.len() {
            match unless_blocked(self.socket.write(&request[self.written..]))? {
                Some(written) => self.written += written,
                None => break,
            }
        }
        let is_blocked = self.written < request.len();
        if is_blocked != self.is_blocked {
            self.is_blocked = is_blocked;
            epoll.modify(&self.socket, &mut epoll_event(slot, is_blocked))?;
        }
        Ok(())
    }

    /// Reads once. Returns the duration if the answer is complete.
    fn receive_answer(&mut self, scratch: &mut [u8]) -> Result<Option<u64>> {
        let Some(read) = unless_blocked(self.socket.read(scratch))? else { return Ok(None) };
        ensure!(read > 0, "the subject closed the connection");
        let Self { response, progress, answered_at, .. } = self;
        let used = response.feed(&scratch[..read], |part| match part {
            MessagePart::Head(head) => expect_ok(head, &scratch[..read]),
            MessagePart::Body(bytes) => {
                answered_at.get_or_insert_with(clock::monotonic_nanos);
                progress.read_bytes(bytes)
            }
        })?;
        ensure!(used == read, "bytes after the end of the answer");
        if !self.response.is_done() {
            return Ok(None);
        }
        self.response.reset();
        ensure!(self.progress.is_whole(), "the answer is not complete");
        let end = match self.progress {
            AnswerProgress::Answer(_) => clock::monotonic_nanos(),
            AnswerProgress::Stream(_) => self.answered_at.context("an answer without a body")?,
        };
        Ok(Some(end - self.asked_at))
    }
}

impl AnswerProgress {
    fn read_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Stream(transcript) => transcript.read(bytes, |_| ()),
            Self::Answer(seen) => {
                let expected = script::ANSWER.as_bytes().get(*seen..*seen + bytes.len());
                ensure!(expected == Some(bytes), "not the provider's answer");
                *seen += bytes.len();
                Ok(())
            }
        }
    }

    fn is_whole(&self) -> bool {
        match self {
            Self::Answer(seen) => *seen == script::ANSWER.len(),
            Self::Stream(transcript) => transcript.is_whole(),
        }
    }
}

/// Fails with the whole response if it is not a success.
pub(crate) fn expect_ok(head: &[u8], response: &[u8]) -> Result<()> {
    let is_ok = http::status_code(head)? == 200;
    ensure!(is_ok, "refused:\n{}", String::from_utf8_lossy(response));
    Ok(())
}

fn epoll_event(slot: usize, blocked: bool) -> EpollEvent {
    let flags = if blocked { EpollFlags::EPOLLOUT } else { EpollFlags::empty() };
    EpollEvent::new(flags | EpollFlags::EPOLLIN, slot as u64)
}

/// Milliseconds: longer than any measured call takes.
pub(crate) const PATIENCE: u16 = 10_000;
