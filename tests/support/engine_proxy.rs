//! Stands between a client and a real Docker Engine, and does to their calls what a bad day does.
//!
//! A fault strikes at a call, so that where it strikes does not depend on time.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use super::process::{patience, pause_for};

/// What a client may ask of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
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

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It does not reach the engine, and nobody answers.
    Lost,
    /// The engine has done it, and nobody answers.
    AnswerLost,
    /// The engine has done it, and half of its answer arrives.
    AnswerCut,
    /// The connection ends instead.
    Refused,
    /// The engine has done it, and is slow to say so.
    Late(Duration),
    /// The engine does it later.
    Slow(Duration),
    /// The engine has done it, and the connection ends; and nobody can look at it before [`Middleman::resume`].
    Forsaken,
}

pub(crate) struct Middleman {
    socket: PathBuf,
    shared: Arc<Shared>,
}

struct Shared {
    engine: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    plan: Plan,
    /// In the order in which they came.
    calls: Vec<Call>,
    has_struck: bool,
    is_down: bool,
    /// Both ends of every connection, so that they can be cut.
    connections: Vec<UnixStream>,
}

#[derive(Default)]
enum Plan {
    #[default]
    None,
    Once(Call, Fault),
    Each(Call, Fault),
    Always(Fault),
}

impl Middleman {
    pub(crate) fn new(directory: &Path, engine: &Path) -> Self {
        let socket = directory.join("middleman.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let shared = Arc::new(Shared { engine: engine.to_owned(), state: Mutex::default() });
        let theirs = Arc::clone(&shared);
        // Ends with the test's process.
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let shared = Arc::clone(&theirs);
                // A connection that ends in the middle is what this is for.
                thread::spawn(move || drop(shared.serve(client)));
            }
        });
        Self { socket, shared }
    }

    pub(crate) fn socket(&self) -> &str {
        self.socket.to_str().unwrap()
    }

    /// The next `call` meets `fault`, and no other does.
    pub(crate) fn strike(&self, call: Call, fault: Fault) {
        let mut state = self.shared.state();
        state.plan = Plan::Once(call, fault);
        state.has_struck = false;
    }

    /// Every `call` meets `fault` from now on: a run and the sweep beside it ask the same.
    pub(crate) fn strike_each(&self, call: Call, fault: Fault) {
        let mut state = self.shared.state();
        state.plan = Plan::Each(call, fault);
        state.has_struck = false;
    }

    pub(crate) fn always(&self, fault: Fault) {
        self.shared.state().plan = Plan::Always(fault);
    }

    /// Waits until the fault has struck.
    pub(crate) fn until_struck(&self) {
        let calls = || format!("the fault does not strike: {:?}", self.calls());
        patience(|| self.shared.state().has_struck, calls);
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        self.shared.state().calls.clone()
    }

    /// Cuts every connection, and takes no new one.
    pub(crate) fn go_down(&self) {
        let mut state = self.shared.state();
        state.is_down = true;
        for connection in state.connections.drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// From now on nothing meets a fault.
    pub(crate) fn resume(&self) {
        self.shared.state().plan = Plan::None;
    }

    pub(crate) fn come_back(&self) {
        self.shared.state().is_down = false;
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// One connection, until one of its ends has had enough.
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
            let fault = self.meet(Call::of(&head));
            if matches!(fault, Some(Fault::Lost | Fault::Refused)) {
                self.strike();
                return hold(from_client, fault);
            }
            if let Some(Fault::Slow(delay)) = fault {
                pause_for(delay);
            }
            engine.write_all(&request)?;
            let Some(fault) = fault else {
                if copy_message(&mut from_engine, &mut to_client)?.contains(" 101 ") {
                    return splice([(from_client, engine), (from_engine, to_client)]);
                }
                continue;
            };
            let mut answer = vec![];
            let head = copy_message(&mut from_engine, &mut answer)?;
            self.strike();
            match fault {
                Fault::AnswerCut => return to_client.write_all(&answer[..answer.len() / 2]),
                Fault::Late(delay) => pause_for(delay),
                Fault::Slow(_) => (),
                Fault::Forsaken => {
                    self.state().plan = Plan::Each(Call::Inspect, Fault::Refused);
                    return Ok(());
                }
                Fault::Lost | Fault::AnswerLost | Fault::Refused => {
                    return hold(from_client, Some(fault));
                }
            }
            to_client.write_all(&answer)?;
            if head.contains(" 101 ") {
                return splice([(from_client, engine), (from_engine, to_client)]);
            }
        }
    }

    /// What `call` is to meet.
    fn meet(&self, call: Call) -> Option<Fault> {
        let mut state = self.state();
        state.calls.push(call);
        match state.plan {
            Plan::Once(at, fault) if at == call => {
                state.plan = Plan::None;
                Some(fault)
            }
            Plan::Each(at, fault) if at == call => Some(fault),
            Plan::Always(fault) => Some(fault),
            Plan::Once(..) | Plan::Each(..) | Plan::None => None,
        }
    }

    fn strike(&self) {
        self.state().has_struck = true;
    }
}

impl Call {
    fn of(head: &str) -> Self {
        let mut words = head.split([' ', '?']);
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        // Without the API's version, and without ids.
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

/// Copies one message of HTTP/1.1 as it comes, and returns its head.
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

/// Its length; a chunk of none is the last.
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

/// Says nothing, for as long as the client waits; where it is refused, it does not have to.
fn hold(mut client: impl Read, fault: Option<Fault>) -> io::Result<()> {
    if fault != Some(Fault::Refused) {
        io::copy(&mut client, &mut io::sink())?;
    }
    Ok(())
}

/// Both ways, each to its end.
fn splice(ways: [(BufReader<UnixStream>, UnixStream); 2]) -> io::Result<()> {
    let [there, back] = ways;
    let there = thread::spawn(move || pour(there));
    let poured = pour(back);
    let _ = there.join();
    poured
}

fn pour((mut from, mut to): (BufReader<UnixStream>, UnixStream)) -> io::Result<()> {
    let poured = io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
    poured.map(drop)
}
