//! Git over HTTP: git's own server program, protected by the same tokens.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderName, HeaderValue, StatusCode};

use super::hub::FakeGithubHandle;
use super::reply::FakeResponse;
use super::route::GitRoute;

pub(super) async fn handle_git(
    hub: &FakeGithubHandle,
    ask: &GitRoute,
    head: &Parts,
    body: Bytes,
) -> FakeResponse {
    let path = {
        // The lock is released before the child process runs.
        let state = hub.lock_state();
        // GitHub answers 401 for a private repository, so that git sends its credentials.
        if !state.access.can_access(head, &ask.name) {
            let realm = "Basic realm=\"GitHub\"".to_owned();
            return FakeResponse::bad_credentials().with_header("www-authenticate", realm);
        }
        state.repositories.get(&ask.name).map(|repository| repository.path.clone())
    };
    let Some(path) = path else { return FakeResponse::not_found() };
    // The backend is a child process, and its pipes block.
    let call = CgiRequest::new(&path, ask, head);
    let done = tokio::task::spawn_blocking(move || call.run_backend(&body)).await;
    match done.map_err(io::Error::other).and_then(|output| parse_cgi_output(&output?)) {
        Ok(reply) => reply,
        Err(error) => {
            tracing::warn!(%error, "git's server program failed");
            FakeResponse::error(StatusCode::INTERNAL_SERVER_ERROR, "git failed")
        }
    }
}

/// The request in the form that the program expects (RFC 3875).
struct CgiRequest {
    path: PathBuf,
    variables: Vec<(&'static str, String)>,
}

impl CgiRequest {
    fn new(path: &Path, ask: &GitRoute, head: &Parts) -> Self {
        let header = |name: &str| {
            let value = head.headers.get(name).and_then(|value| value.to_str().ok());
            value.unwrap_or_default().to_owned()
        };
        let variables = vec![
            ("PATH_INFO", ask.path.clone()),
            ("REQUEST_METHOD", head.method.to_string()),
            ("QUERY_STRING", head.uri.query().unwrap_or_default().to_owned()),
            ("CONTENT_TYPE", header("content-type")),
            ("HTTP_CONTENT_ENCODING", header("content-encoding")),
            ("GIT_PROTOCOL", header("git-protocol")),
            ("GIT_HTTP_EXPORT_ALL", "1".to_owned()),
            // Git permits a push only if the server names a user.
            ("REMOTE_USER", "x-access-token".to_owned()),
            ("REMOTE_ADDR", "127.0.0.1".to_owned()),
        ];
        Self { path: path.to_path_buf(), variables }
    }

    fn run_backend(self, body: &[u8]) -> io::Result<Vec<u8>> {
        let mut child = Command::new("git")
            .arg("http-backend")
            // The caller's environment and git configuration must not change the server's behaviour.
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .env("GIT_PROJECT_ROOT", self.path)
            .env("CONTENT_LENGTH", body.len().to_string())
            .envs(self.variables)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut stdin = child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut stdout = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut output = vec![];
        let read = thread::scope(|scope| {
            // Git may write its answer before it has read the whole request, so that both pipes are served at the same
            // time.
            scope.spawn(move || drop(stdin.write_all(body)));
            stdout.read_to_end(&mut output)
        });
        // The exit status does not matter: an error of git is in its answer.
        child.wait()?;
        read.map(|_| output)
    }
}

/// Parses a program's answer: header lines, an empty line, the body.
fn parse_cgi_output(output: &[u8]) -> io::Result<FakeResponse> {
    let end = output.windows(4).position(|bytes| bytes == b"\r\n\r\n");
    let end = end.ok_or(io::ErrorKind::InvalidData)?;
    let (lines, body) = (&output[..end], &output[end + 4..]);
    let mut status = StatusCode::OK;
    let mut headers = vec![];
    for line in str::from_utf8(lines).map_err(io::Error::other)?.split("\r\n") {
        let (name, value) = line.split_once(": ").ok_or(io::ErrorKind::InvalidData)?;
        // A CGI program reports the status as a header; without one the status is 200.
        if name.eq_ignore_ascii_case("status") {
            let code = value.get(..3).and_then(|code| code.parse::<u16>().ok());
            status = code.and_then(|code| StatusCode::from_u16(code).ok()).unwrap_or(status);
            continue;
        }
        let name = HeaderName::try_from(name).map_err(io::Error::other)?;
        headers.push((name, HeaderValue::try_from(value).map_err(io::Error::other)?));
    }
    Ok(FakeResponse::bytes(status, headers, Bytes::copy_from_slice(body)))
}
