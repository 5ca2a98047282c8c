//! `cogni-gateway health`: checks that a gateway's socket answers, for container health checks.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};

/// The flags of `health`.
#[derive(Debug, clap::Args)]
pub struct HealthArgs {
    /// The run's socket
    #[arg(long, env = "SOCKET_PATH", value_name = "PATH", default_value = "/llm-sock/llm.sock")]
    socket_path: PathBuf,
}

/// Runs the check. The exit status is 0 if `GET /health` is answered with 200, otherwise 1, because container health
/// checks know no other status.
pub fn run(args: &HealthArgs) -> anyhow::Result<ExitCode> {
    match check_health(args) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            // The error is printed here, because the caller of this function would exit with 2.
            let _ = writeln!(io::stderr(), "error: {error:#}");
            Ok(ExitCode::FAILURE)
        }
    }
}

fn check_health(args: &HealthArgs) -> anyhow::Result<()> {
    let path = args.socket_path.display();
    let mut socket = UnixStream::connect(&args.socket_path)
        .with_context(|| format!("no process answers on `{path}`"))?;
    socket.set_read_timeout(Some(REQUEST_TIMEOUT))?;
    socket.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
    let mut answer = String::new();
    socket
        .take(MAX_RESPONSE_BYTES)
        .read_to_string(&mut answer)
        .with_context(|| format!("`{path}` does not answer"))?;
    match answer.lines().next() {
        Some(status) if status.starts_with("HTTP/1.1 200 ") => Ok(()),
        other => bail!("`{path}` answers `{}`", other.unwrap_or_default()),
    }
}

/// The time that the socket has to answer. Our choice.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// The maximum size of the answer. Our choice: the body is a few bytes.
const MAX_RESPONSE_BYTES: u64 = 4096;
