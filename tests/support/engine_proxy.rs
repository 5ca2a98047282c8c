//! A proxy between a client and a real Docker Engine that injects faults.
//!
//! A fault is bound to a call, so its effect does not depend on timing.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::mem;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use super::process::{pause_for, wait_until};

/// A call that a client makes to an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProxiedCall {
    Version,
    Image,
    Create,
    Attach,
    Start,
    Wait,
    Kill,
    Inspect,
    Remove,
    List,
    Other,
}

/// The fault of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EngineFault {
    /// The call does not reach the engine, and gets no answer.
    Lost,
    /// The engine executes the call, and the answer is lost.
    AnswerLost,
    /// The engine executes the call, and half of its answer arrives.
    AnswerCut,
    /// The connection is closed instead of an answer.
    Refused,
    /// The engine executes the call, and the answer comes late.
    Late(Duration),
    /// The engine executes the call later.
    Slow(Duration),
    /// The engine executes the call, the connection is closed, and further inspections fail until
    /// [`EngineProxy::resume`].
    Forsaken,
}

pub(crate) struct EngineProxy {
    socket: PathBuf,
    shared: Arc<SharedPlan>,
}

struct SharedPlan {
    engine: PathBuf,
    state: Mutex<EngineProxyState>,
}

#[derive(Default)]
struct EngineProxyState {
    plan: FaultPlan,
    /// The calls in the order of their arrival.
    calls: Vec<ProxiedCall>,
    has_struck: bool,
    is_down: bool,
    /// Both ends of every connection, so that they can be closed.
    connections: Vec<UnixStream>,
    /// Both ends of the connections that have become streams of output.
    attached: Vec<UnixStream>,
}

#[derive(Default)]
enum FaultPlan {
    #[default]
    None,
    Once(ProxiedCall, EngineFault),
    Each(ProxiedCall, EngineFault),
    Always(EngineFault),
}

impl EngineProxy {
    pub(crate) fn new(directory: &Path, engine: &Path) -> Self {
        let socket = directory.join("engine_proxy.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let shared = Arc::new(SharedPlan { engine: engine.to_owned(), state: Mutex::default() });
        let shared_state = Arc::clone(&shared);
        // The thread ends with the test's process.
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let shared = Arc::clone(&shared_state);
                // Connections that break are the purpose of this proxy.
                thread::spawn(move || drop(shared.serve(client)));
            }
        });
        Self { socket, shared }
    }

    pub(crate) fn socket(&self) -> &str {
        self.socket.to_str().unwrap()
    }

    /// Injects `fault` into the next `call`, and into no other.
    pub(crate) fn inject(&self, call: ProxiedCall, fault: EngineFault) {
        let mut state = self.shared.state();
        state.plan = FaultPlan::Once(call, fault);
        state.has_struck = false;
    }

    /// Injects `fault` into every `call` from now on, because a run and a concurrent sweep make the same calls.
    pub(crate) fn inject_always(&self, call: ProxiedCall, fault: EngineFault) {
        let mut state = self.shared.state();
        state.plan = FaultPlan::Each(call, fault);
        state.has_struck = false;
    }

    pub(crate) fn always(&self, fault: EngineFault) {
        self.shared.state().plan = FaultPlan::Always(fault);
    }

    /// Waits until a fault has been injected.
    pub(crate) fn wait_until_injected(&self) {
        let calls = || format!("the fault does not strike: {:?}", self.calls());
        wait_until(|| self.shared.state().has_struck, calls);
    }

    pub(crate) fn calls(&self) -> Vec<ProxiedCall> {
        self.shared.state().calls.clone()
    }

    /// Closes every connection, and accepts no new one.
    pub(crate) fn disconnect(&self) {
        let mut state = self.shared.state();
        state.is_down = true;
        for connection in state.connections.drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// Closes the streams of output, and no other connection.
    pub(crate) fn cut_attached(&self) {
        let attached = mem::take(&mut self.shared.state().attached);
        assert!(!attached.is_empty(), "there is no stream of output");
        for connection in attached {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// Injects no faults from now on.
    pub(crate) fn resume(&self) {
        self.shared.state().plan = FaultPlan::None;
    }

    pub(crate) fn reconnect(&self) {
        self.shared.state().is_down = false;
    }
}

impl SharedPlan {
    fn state(&self) -> MutexGuard<'_, EngineProxyState> {
        self.state.lock().unwrap()
    }

    /// Serves one connection until either end closes it.
    fn serve(&self, client: UnixStream) -> io::Result<()> {
        let engine = self.connect(&client)?;
        let ends = [client.try_clone()?, engine.try_clone()?];
        let served = self.relay(client, engine);
        for end in ends {
            let _ = end.shutdown(Shutdown::Both);
        }
        served
    }

    fn connect(&self, client: &UnixStream) -> io::Result<UnixStream> {
        let engine = UnixStream::connect(&self.engine)?;
        let mut state = self.state();
        if state.is_down {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        state.connections.extend([client.try_clone()?, engine.try_clone()?]);
        Ok(engine)
    }

    fn relay(&self, client: UnixStream, mut engine: UnixStream) -> io::Result<()> {
        let mut from_client = BufReader::new(client.try_clone()?);
        let mut from_engine = BufReader::new(engine.try_clone()?);
        let mut to_client = client;
        loop {
            let mut request = vec![];
            let head = copy_message(&mut from_client, &mut request)?;
            let fault = self.meet(ProxiedCall::of(&head));
            if matches!(fault, Some(EngineFault::Lost | EngineFault::Refused)) {
                self.inject();
                return hold_connection(from_client, fault);
            }
            if let Some(EngineFault::Slow(delay)) = fault {
                pause_for(delay);
            }
            engine.write_all(&request)?;
            let Some(fault) = fault else {
                if copy_message(&mut from_engine, &mut to_client)?.contains(" 101 ") {
                    let ends = [engine.try_clone()?, to_client.try_clone()?];
                    self.state().attached.extend(ends);
                    return copy_both([(from_client, engine), (from_engine, to_client)]);
                }
                continue;
            };
            let mut answer = vec![];
            let head = copy_message(&mut from_engine, &mut answer)?;
            self.inject();
            match fault {
                EngineFault::AnswerCut => return to_client.write_all(&answer[..answer.len() / 2]),
                EngineFault::Late(delay) => pause_for(delay),
                EngineFault::Slow(_) => (),
                EngineFault::Forsaken => {
                    self.state().plan = FaultPlan::Each(ProxiedCall::Inspect, EngineFault::Refused);
                    return Ok(());
                }
                EngineFault::Lost | EngineFault::AnswerLost | EngineFault::Refused => {
                    return hold_connection(from_client, Some(fault));
                }
            }
            to_client.write_all(&answer)?;
            if head.contains(" 101 ") {
                return copy_both([(from_client, engine), (from_engine, to_client)]);
            }
        }
    }

    /// Returns the fault for `call`, if there is one.
    fn meet(&self, call: ProxiedCall) -> Option<EngineFault> {
        let mut state = self.state();
        state.calls.push(call);
        match state.plan {
            FaultPlan::Once(at, fault) if at == call => {
                state.plan = FaultPlan::None;
                Some(fault)
            }
            FaultPlan::Each(at, fault) if at == call => Some(fault),
            FaultPlan::Always(fault) => Some(fault),
            FaultPlan::Once(..) | FaultPlan::Each(..) | FaultPlan::None => None,
        }
    }

    fn inject(&self) {
        self.state().has_struck = true;
    }
}

impl ProxiedCall {
    fn of(head: &str) -> Self {
        let mut words = head.split([' ', '?']);
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        // The path without the API's version and without ids.
        let mut parts =
            path.trim_start_matches('/').split('/').skip_while(|part| part.starts_with("v1."));
        match (method, parts.next(), parts.next(), parts.next()) {
            ("GET", Some("version"), ..) => Self::Version,
            ("GET", Some("images"), ..) => Self::Image,
            ("POST", Some("containers"), Some("create"), None) => Self::Create,
            ("GET", Some("containers"), Some("json"), None) => Self::List,
            ("DELETE", Some("containers"), Some(_), None) => Self::Remove,
            ("GET", Some("containers"), Some(_), Some("json")) => Self::Inspect,
            ("POST", Some("containers"), Some(_), Some("attach")) => Self::Attach,
            ("POST", Some("containers"), Some(_), Some("start")) => Self::Start,
            ("POST", Some("containers"), Some(_), Some("wait")) => Self::Wait,
            ("POST", Some("containers"), Some(_), Some("kill")) => Self::Kill,
            _ => Self::Other,
        }
    }
}

/// Copies one HTTP/1.1 message as it arrives, and returns its head.
fn copy_message(from: &mut impl BufRead, to: &mut impl Write) -> io::Result<String> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if from.read_line(&mut head)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    to.write_all(head.as_bytes())?;
    let lower = head.to_ascii_lowercase();
    if lower.contains("transfer-encoding: chunked") {
        while copy_chunk(from, to)? > 0 {}
    } else if let Some((_, length)) = lower.split_once("content-length: ") {
        let length = length.lines().next().unwrap_or_default().trim().parse().unwrap();
        io::copy(&mut from.take(length), to)?;
    }
    Ok(head)
}

/// Copies a chunk and returns its length; an empty chunk is the last.
fn copy_chunk(from: &mut impl BufRead, to: &mut impl Write) -> io::Result<u64> {
    let mut line = String::new();
    from.read_line(&mut line)?;
    let length = u64::from_str_radix(line.trim(), 16)
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    let mut chunk = line.into_bytes();
    from.take(length + 2).read_to_end(&mut chunk)?;
    to.write_all(&chunk)?;
    Ok(length)
}

/// Sends nothing as long as the client waits; a refused client need not wait.
fn hold_connection(mut client: impl Read, fault: Option<EngineFault>) -> io::Result<()> {
    if fault != Some(EngineFault::Refused) {
        io::copy(&mut client, &mut io::sink())?;
    }
    Ok(())
}

/// Copies in both directions until each has ended.
fn copy_both(ways: [(BufReader<UnixStream>, UnixStream); 2]) -> io::Result<()> {
    let [there, back] = ways;
    let there = thread::spawn(move || copy_one(there));
    let poured = copy_one(back);
    let _ = there.join();
    poured
}

fn copy_one((mut from, mut to): (BufReader<UnixStream>, UnixStream)) -> io::Result<()> {
    let poured = io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
    poured.map(drop)
}
