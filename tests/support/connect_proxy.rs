//! A company's HTTP proxy: it tunnels TLS to any requested host, and connects every host to one server.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// Tunnels connections until the test's process ends.
pub(crate) struct ConnectProxy {
    pub(crate) address: SocketAddr,
    asked: Arc<Mutex<Vec<String>>>,
}

impl ConnectProxy {
    /// Starts a proxy that connects every host to `server`.
    pub(crate) fn to(server: SocketAddr) -> Self {
        Self::start(server, false)
    }

    /// Starts a proxy that also requires a password, any password.
    pub(crate) fn with_password(server: SocketAddr) -> Self {
        Self::start(server, true)
    }

    fn start(server: SocketAddr, is_guarded: bool) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let shared_requests = requests.clone();
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let requests = shared_requests.clone();
                // The client reports a connection that breaks.
                thread::spawn(move || {
                    drop(carry_connection(client, server, &requests, is_guarded));
                });
            }
        });
        Self { address, asked: requests }
    }

    /// Returns the head of each request so far: `CONNECT HOST:PORT`, and whether it had a password.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

fn carry_connection(
    client: TcpStream,
    server: SocketAddr,
    requests: &Mutex<Vec<String>>,
    is_guarded: bool,
) -> io::Result<()> {
    let mut from = BufReader::new(client.try_clone()?);
    loop {
        let (target, has_password) = read_head(&mut from)?;
        let ending = if has_password { " with a password" } else { "" };
        requests.lock().unwrap().push(target + ending);
        if has_password || !is_guarded {
            break;
        }
        (&client).write_all(WHO)?;
    }
    let server = TcpStream::connect(server)?;
    (&client).write_all(b"HTTP/1.1 200 here you are\r\n\r\n")?;
    let (to, back) = (server.try_clone()?, client);
    let up = thread::spawn(move || {
        let _ = io::copy(&mut from, &mut &to);
        to.shutdown(Shutdown::Write)
    });
    let _ = io::copy(&mut &server, &mut &back);
    let _ = back.shutdown(Shutdown::Both);
    up.join().unwrap()
}

/// Reads the requested host, and whether there was a password.
fn read_head(from: &mut impl BufRead) -> io::Result<(String, bool)> {
    let (mut first, mut line, mut has_password) = (String::new(), String::new(), false);
    if from.read_line(&mut first)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    while from.read_line(&mut line)? > 0 && line != "\r\n" {
        has_password |= line.to_ascii_lowercase().starts_with("proxy-authorization: basic ");
        line.clear();
    }
    Ok((first.trim_end().trim_end_matches(" HTTP/1.1").to_owned(), has_password))
}

const WHO: &[u8] =
    b"HTTP/1.1 407 who are you\r\nProxy-Authenticate: Basic realm=\"x\"\r\nContent-Length: 0\r\n\r\n";
