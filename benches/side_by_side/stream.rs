//! Concurrent streams, each requested once and read to its end.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use crate::clock::{self, PreciseTimer};
use crate::closed::{PATIENCE, expect_ok};
use crate::http::{MessagePart, MessageReader};
use crate::provider::unless_blocked;
use crate::script::{self, ProviderCall, StreamTranscript};

/// The number of streams, their begin, and their content.
#[derive(Clone, Copy)]
pub(crate) struct StreamCourse {
    pub(crate) streams: usize,
    /// The time between the beginnings of two streams, which spreads their chunks over the interval.
    pub(crate) stagger: Duration,
    pub(crate) chunks: u32,
    pub(crate) interval: Duration,
}

/// The results. The window lasts from the first chunk of the stream that begins last until the first stream has no more
/// chunks, so all streams flow in it. If a stream ended earlier, the window is empty.
#[derive(Default)]
pub(crate) struct CourseResults {
    /// The time from the request to the first byte of the body, per stream, in nanoseconds.
    pub(crate) first_bytes: Vec<u64>,
    /// The time from the provider's stamp to the read here, per chunk in the window, in nanoseconds.
    pub(crate) lags: Vec<u64>,
    /// The length of the window in nanoseconds.
    pub(crate) window: u64,
}

/// Runs the course over these sockets in turn. Calls `edge` when the window opens and when it closes. Fails unless
/// every chunk, the usage chunk and `[DONE]` of every stream have arrived.
pub(crate) fn run(
    course: StreamCourse,
    sockets: &[PathBuf],
    mut edge: impl FnMut() -> Result<()>,
) -> Result<CourseResults> {
    let mut field = StreamSet::new(course, sockets)?;
    let mut events = [EpollEvent::empty(); 256];
    let mut scratch = vec![0; 64 * 1024];
    while field.open > 0 {
        let ready = field.epoll.wait(&mut events, PATIENCE)?;
        ensure!(ready > 0, "nothing came for ten seconds");
        for event in &events[..ready] {
            match event.data() {
                ALARM => field.open_stream()?,
                slot => field.read_stream(usize::try_from(slot)?, &mut scratch)?,
            }
            field.watch_window(&mut edge)?;
        }
    }
    Ok(field.seen)
}

struct StreamSet {
    course: StreamCourse,
    epoll: Epoll,
    alarm: PreciseTimer,
    request: Vec<u8>,
    streams: Vec<ClientStream>,
    began_at: u64,
    asked: usize,
    begun: usize,
    /// The streams that have not ended.
    open: usize,
    is_ending: bool,
    window: MeasureWindow,
    seen: CourseResults,
}

enum MeasureWindow {
    Before,
    /// The time when the window opened.
    Open(u64),
    After,
}

struct ClientStream {
    socket: UnixStream,
    response: MessageReader,
    transcript: StreamTranscript,
    asked_at: u64,
    has_begun: bool,
}

impl StreamSet {
    fn new(course: StreamCourse, sockets: &[PathBuf]) -> Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let mut streams = vec![];
        for slot in 0..course.streams {
            let path = &sockets[slot % sockets.len()];
            let socket = UnixStream::connect(path).context("connecting to the subject")?;
            socket.set_nonblocking(true)?;
            epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, slot as u64))?;
            streams.push(ClientStream {
                socket,
                response: MessageReader::default(),
                transcript: StreamTranscript::new(course.chunks),
                asked_at: 0,
                has_begun: false,
            });
        }
        let mut alarm = PreciseTimer::new()?;
        epoll.add(&alarm, EpollEvent::new(EpollFlags::EPOLLIN, ALARM))?;
        // This gives the subject time to accept all connections.
        let began_at = clock::monotonic_nanos() + u64::try_from(SETTLE.as_nanos())?;
        alarm.set(Some(began_at))?;
        let call = ProviderCall::Stream { chunks: course.chunks, interval: course.interval };
        Ok(Self {
            course,
            epoll,
            alarm,
            request: script::client_request(call, BODY),
            open: streams.len(),
            streams,
            began_at,
            asked: 0,
            begun: 0,
            is_ending: false,
            window: MeasureWindow::Before,
            seen: CourseResults::default(),
        })
    }

    /// Makes the requests whose time has come.
    fn open_stream(&mut self) -> Result<()> {
        while self.asked < self.streams.len() {
            let stagger = u64::try_from(self.course.stagger.as_nanos())?;
            let due = self.began_at + stagger * self.asked as u64;
            let now = clock::monotonic_nanos();
            if now < due {
                return self.alarm.set(Some(due));
            }
            let stream = &mut self.streams[self.asked];
            stream.asked_at = now;
            let written = stream.socket.write(&self.request)?;
            ensure!(written == self.request.len(), "a socket that takes no request of 2 KB");
            self.asked += 1;
        }
        self.alarm.set(None)
    }

    fn read_stream(&mut self, slot: usize, scratch: &mut [u8]) -> Result<()> {
        let stream = &mut self.streams[slot];
        let Some(read) = unless_blocked(stream.socket.read(scratch))? else { return Ok(()) };
        ensure!(read > 0, "a stream broke off after {} chunks", stream.transcript.seen());
        let now = clock::monotonic_nanos();
        let ClientStream { response, transcript, .. } = stream;
        let counts = matches!(self.window, MeasureWindow::Open(_));
        let lags = &mut self.seen.lags;
        let mut has_body = false;
        let used = response.feed(&scratch[..read], |part| match part {
            MessagePart::Head(head) => expect_ok(head, &scratch[..read]),
            MessagePart::Body(bytes) => {
                has_body = true;
                transcript.read(bytes, |sent_at| {
                    if counts {
                        lags.push(now.saturating_sub(sent_at));
                    }
                })
            }
        })?;
        ensure!(used == read, "bytes after the end of a stream");
        if has_body && !stream.has_begun {
            stream.has_begun = true;
            self.begun += 1;
            self.seen.first_bytes.push(now - stream.asked_at);
        }
        self.is_ending |= stream.transcript.seen() == self.course.chunks;
        if stream.response.is_done() {
            ensure!(stream.transcript.is_whole(), "a stream ended without all of its events");
            self.open -= 1;
        }
        Ok(())
    }

    /// Opens and closes the window.
    fn watch_window(&mut self, edge: &mut impl FnMut() -> Result<()>) -> Result<()> {
        match self.window {
            MeasureWindow::Before if self.is_ending => self.window = MeasureWindow::After,
            MeasureWindow::Before if self.begun == self.streams.len() => {
                edge()?;
                self.window = MeasureWindow::Open(clock::monotonic_nanos());
            }
            MeasureWindow::Open(since) if self.is_ending => {
                self.seen.window = clock::monotonic_nanos() - since;
                self.window = MeasureWindow::After;
                edge()?;
            }
            _ => (),
        }
        Ok(())
    }
}

const ALARM: u64 = u64::MAX;
const SETTLE: Duration = Duration::from_millis(50);
/// The size of each request's body.
const BODY: usize = 2048;
