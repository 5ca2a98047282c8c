//! The trust of the sandbox's programs in the run's tunnels: the gateway's certificate as a file, and the variables by
//! which programs find the file and the way to the gateway.
//!
//! The sandbox has no network, so the run's own authority is the only one that its programs can need.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::InitFailure;
use super::run_socket::RunSocket;

/// Returns the variables of programs that use tunnels. `proxy` is the address of the gateway in the sandbox.
pub fn tunnel_variables(proxy: &str) -> impl Iterator<Item = (&'static str, String)> {
    let trust = TRUST_VARIABLES.iter().map(|name| (*name, CERTIFICATE_FILE.to_owned()));
    let proxies = PROXY_VARIABLES.iter().map(|name| (*name, proxy.to_owned()));
    let direct = DIRECT_VARIABLES.iter().map(|name| (*name, DIRECT_HOSTS.to_owned()));
    trust.chain(proxies).chain(direct).chain([(NODE_PROXY_VARIABLE, "1".to_owned())])
}

/// Asks the gateway for the certificate of the run's tunnels, and writes it into the sandbox.
pub(super) fn install_certificate(
    socket: &RunSocket,
    timeout: Duration,
) -> Result<(), InitFailure> {
    let connected = socket.connect().map_err(|error| socket.describe_error(error));
    let stream = UnixStream::from(connected.map_err(InitFailure::socket_failure)?);
    let certificate = fetch_certificate(stream, timeout).map_err(|error| {
        InitFailure::socket_failure(format!(
            "the gateway gives no certificate for `--tunnels`: {error}; give a connection of the run `tunnel = true`, or leave the option out"
        ))
    })?;
    fs::write(CERTIFICATE_FILE, certificate).map_err(|error| {
        let action = format!("write `{CERTIFICATE_FILE}` (mount a tmpfs at `/run`)");
        InitFailure::setup_failure(&action, error)
    })
}

fn fetch_certificate(mut stream: UnixStream, timeout: Duration) -> io::Result<String> {
    stream.set_nonblocking(false)?;
    // A timeout of zero is refused by the kernel's interface.
    let timeout = Some(timeout.max(Duration::from_millis(1)));
    stream.set_read_timeout(timeout)?;
    stream.set_write_timeout(timeout)?;
    stream.write_all(REQUEST)?;
    let mut answer = String::new();
    stream.take(MAX_ANSWER_BYTES).read_to_string(&mut answer)?;
    let status = answer.split(' ').nth(1).unwrap_or_default();
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    if status == "200" && body.starts_with("-----BEGIN CERTIFICATE-----") {
        Ok(body.to_owned())
    } else {
        Err(io::Error::other(format!("its answer has the status `{}`", status.escape_debug())))
    }
}

/// The file of the certificate: in memory, and writable by every sandbox of the gateway.
const CERTIFICATE_FILE: &str = "/run/tunnel-ca.pem";

/// The variables by which programs find the authorities that they trust. Node.js and Deno add them to their own; the
/// other programs use them instead of their own.
const TRUST_VARIABLES: &[&str] = &[
    "CARGO_HTTP_CAINFO",
    "CURL_CA_BUNDLE",
    "DENO_CERT",
    "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS",
    "PIP_CERT",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_FILE",
    "npm_config_cafile",
];

/// The variables of the proxy for `https`. Programs differ in the case that they read.
const PROXY_VARIABLES: &[&str] = &["HTTPS_PROXY", "https_proxy"];

/// The variables with the hosts that are reached without the proxy.
const DIRECT_VARIABLES: &[&str] = &["NO_PROXY", "no_proxy"];
const DIRECT_HOSTS: &str = "localhost,127.0.0.1,::1";

/// The variable with which Node.js (from 22.21 and 24.5 on) reads the variables of the proxy.
const NODE_PROXY_VARIABLE: &str = "NODE_USE_ENV_PROXY";

const REQUEST: &[u8] =
    b"GET /connect/ca.pem HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";

/// The largest answer that is read. Our choice: a certificate has about 1 KiB, and more with the names of many hosts.
const MAX_ANSWER_BYTES: u64 = 256 << 10;
