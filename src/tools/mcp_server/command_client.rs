//! The requests to a server that is a program in a sandbox of its own. The messages are lines on the program's standard
//! input and output.
//!
//! The program starts with the first request, and serves the run until the run ends. A request that opens a session
//! starts a program that has ended; other requests do not, because the new program does not know their session. Each
//! program has a number, so that no request of an earlier program's session is written to it.
//!
//! **Invariant:** a run has at most one sandbox for each server, and a program whose answer was not awaited to its end is
//! stopped. So no answer is taken for another one.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{Mutex, Semaphore, oneshot};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::answer::{AnswerMessage, MAX_ENVELOPE_BYTES, McpAnswer, answer_ping, parse_message};
use super::error::McpServerError;
use super::request::{McpRequest, McpSession};
use crate::base::secret::SecretString;
use crate::base::task_group::TaskGroup;
use crate::base::time::MAX_TIME;
use crate::tools::config::McpServerConfig;
use crate::tools::credential_source::CredentialSource;
use crate::tools::job::{JobCall, JobRunner, ToolJob};
use crate::tools::run_credentials::RunCredentials;

/// The client of one program.
pub(super) struct McpCommandClient {
    /// The name of the server.
    name: String,
    job: Arc<ToolJob>,
    /// The credentials among the program's variables, by their names.
    credentials: Vec<(String, CredentialSource)>,
    /// The place where the program runs; `None` in a process that makes no sandboxes, where every request fails.
    host: Option<McpCommandHost>,
    secrets: Arc<RunCredentials>,
    /// The program that waits for a request. A request takes it, and puts it back after the answer.
    program: Mutex<ProgramPlace>,
    /// The one place for a sandbox, which is taken until the sandbox is removed.
    sandbox: Arc<Semaphore>,
}

/// The place where the programs of a run's servers run.
#[derive(Clone)]
pub struct McpCommandHost {
    pub jobs: Arc<dyn JobRunner>,
    pub tasks: TaskGroup,
}

/// The place of the run's program.
#[derive(Default)]
struct ProgramPlace {
    waiting: Option<ServerProgram>,
    /// The number of programs that were started, which is the number of the last one.
    started: u64,
}

/// A program that has started. Its drop stops it.
struct ServerProgram {
    stream: UnixStream,
    /// The bytes that were read and belong to no answer yet.
    received: BytesMut,
    /// Gets the reason why the program serves no more, after its end.
    ended: oneshot::Receiver<String>,
    _stop: DropGuard,
}

impl McpCommandClient {
    pub(super) fn new(
        (name, job): (&str, Arc<ToolJob>),
        config: &McpServerConfig,
        host: Option<McpCommandHost>,
        secrets: &Arc<RunCredentials>,
    ) -> Self {
        let credentials = config.secret_env();
        Self {
            name: name.to_owned(),
            job,
            credentials: credentials.map(|(name, source)| (name.clone(), source.clone())).collect(),
            host,
            secrets: Arc::clone(secrets),
            program: Mutex::default(),
            sandbox: Arc::new(Semaphore::new(1)),
        }
    }

    /// Sends a request, or a notification if there is no id, and returns the answer. The requests of a run take turns.
    ///
    /// # Errors
    /// Returns [`McpServerError::NotSent`] if the program of the session had ended before the request was written,
    /// [`McpServerError::ProgramEnded`] if the program ended later, or the reason why there is no valid answer. An error of
    /// the server's method is part of the answer.
    pub(super) async fn post(
        &self,
        session: &McpSession,
        request: &McpRequest<'_>,
        id: Option<u64>,
        max_bytes: usize,
    ) -> Result<McpAnswer, McpServerError> {
        let mut place = self.program.lock().await;
        if !request.opens_session() && session.program != place.started {
            return Err(McpServerError::NotSent);
        }
        let mut program = match place.waiting.take() {
            Some(program) => program,
            None if request.opens_session() => {
                let program = self.start_program().await?;
                place.started += 1;
                program
            }
            None => return Err(McpServerError::NotSent),
        };
        // Until the answer is here, no program waits: an error, and a caller that leaves, drop the program.
        let line = to_line(&session.body(request, id));
        program.write_line(&line).await?;
        let Some(id) = id else {
            place.waiting = Some(program);
            return Ok(McpAnswer::default());
        };
        let answer = program.read_answer(id, max_bytes + MAX_ENVELOPE_BYTES);
        let patience = if request.may_be_unknown() { MAX_SILENCE } else { MAX_TIME };
        // Some servers are silent before `initialize`. An answer that comes later is skipped.
        let Ok(message) = tokio::time::timeout(patience, answer).await else {
            place.waiting = Some(program);
            return Err(McpServerError::Malformed("there is no answer to `server/discover`"));
        };
        let message = Some(message?);
        place.waiting = Some(program);
        let (program, guard) = (place.started, self.secrets.guard_answer());
        Ok(McpAnswer { session: None, program, message, guard })
    }

    /// Starts the program, after the end of the one before it.
    async fn start_program(&self) -> Result<ServerProgram, McpServerError> {
        let unreachable = |why: &str| McpServerError::Unreachable(why.to_owned());
        let host = self.host.as_ref().ok_or_else(|| unreachable("there is no sandbox for it"))?;
        let place = Arc::clone(&self.sandbox).acquire_owned().await;
        let stop = CancellationToken::new();
        let call = JobCall {
            // The id names the sandbox, and its form is that of the ids of calls.
            id: format!("ts-{}", uuid::Uuid::now_v7().simple()),
            image: self.job.image.clone(),
            timeout: self.job.limits.max_runtime,
            job: Arc::clone(&self.job),
            arguments: "{}".to_owned(),
            secret_env: self.read_credentials()?,
            stop: stop.clone(),
        };
        let (sender, connected) = oneshot::channel();
        let (teller, ended) = oneshot::channel();
        let mut server = host.jobs.run_server(call, sender);
        let (closing, token) = (host.tasks.shutdown_token().clone(), stop.clone());
        // The task ends and removes the sandbox, also if the caller stops waiting.
        host.tasks.spawn_task(async move {
            let reason = tokio::select! {
                reason = &mut server => reason,
                () = closing.cancelled() => {
                    token.cancel();
                    server.await
                }
            };
            let _ = teller.send(reason);
            drop(place);
        });
        let stop = stop.drop_guard();
        let Ok(stream) = connected.await else {
            return Err(unreachable(&ended.await.unwrap_or_default()));
        };
        Ok(ServerProgram { stream, received: BytesMut::new(), ended, _stop: stop })
    }

    fn read_credentials(&self) -> Result<BTreeMap<String, SecretString>, McpServerError> {
        let read = |(name, source): &(String, CredentialSource)| {
            let value = source.read_value().map_err(McpServerError::Credential)?;
            if value.expose_secret().contains('\0') {
                return Err(McpServerError::Credential("it has a zero byte".to_owned()));
            }
            Ok((name.clone(), value))
        };
        let values: BTreeMap<_, _> =
            self.credentials.iter().map(read).collect::<Result<_, McpServerError>>()?;
        self.secrets.add_latest(&self.name, &values.values().collect::<Vec<_>>());
        Ok(values)
    }
}

impl ServerProgram {
    async fn write_line(&mut self, line: &str) -> Result<(), McpServerError> {
        match self.stream.write_all(line.as_bytes()).await {
            Ok(()) => Ok(()),
            // A program that ends closes its side.
            Err(_) => Err(self.end_error().await),
        }
    }

    /// Reads lines up to the answer to a request, and no more than `max_bytes`. Lines that are no answer are skipped: the
    /// server's notifications, and what a program prints beside its messages.
    async fn read_answer(
        &mut self,
        id: u64,
        max_bytes: usize,
    ) -> Result<AnswerMessage, McpServerError> {
        let (mut left, mut searched) = (max_bytes, 0);
        loop {
            let end = memchr::memchr(b'\n', &self.received[searched..]).map(|at| searched + at + 1);
            let Some(end) = end else {
                searched = self.received.len();
                if searched > left {
                    return Err(McpServerError::TooLarge);
                }
                self.received.reserve(READ_BYTES);
                if matches!(self.stream.read_buf(&mut self.received).await, Ok(0) | Err(_)) {
                    return Err(self.end_error().await);
                }
                continue;
            };
            let line = self.received.split_to(end);
            searched = 0;
            left = left.checked_sub(line.len()).ok_or(McpServerError::TooLarge)?;
            match parse_message(line.trim_ascii(), id) {
                Ok(message) => return Ok(message),
                // The server waits for an answer of its own, which does not come.
                Err(McpServerError::AsksForInput) => return Err(McpServerError::AsksForInput),
                Err(_) => {
                    if let Some(answer) = answer_ping(&line) {
                        self.write_line(&answer).await?;
                    }
                }
            }
        }
    }

    /// Returns the error of a program that has closed its side.
    async fn end_error(&mut self) -> McpServerError {
        let reason = tokio::time::timeout(END_PATIENCE, &mut self.ended).await;
        let silent = || "it has closed its standard input or output".to_owned();
        McpServerError::ProgramEnded(reason.ok().and_then(Result::ok).unwrap_or_else(silent))
    }
}

/// Returns a message as one line. The arguments of a call are the client's own text: a line end between two members would
/// let the client write a message of its own. Readers that know other line ends find none within a text either.
fn to_line(message: &str) -> String {
    let mut line = String::with_capacity(message.len() + 1);
    for letter in message.chars() {
        match letter {
            // In JSON these are blanks, because a text has them as escapes only.
            '\n' | '\r' => line.push(' '),
            '\u{85}' | '\u{2028}' | '\u{2029}' => {
                // Writing to a string cannot fail.
                let _ = write!(line, "\\u{:04x}", u32::from(letter));
            }
            letter => line.push(letter),
        }
    }
    line.push('\n');
    line
}

impl fmt::Debug for McpCommandClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("McpCommandClient").field("job", &self.job).finish_non_exhaustive()
    }
}

/// The size of one read, in bytes. Our choice.
const READ_BYTES: usize = 8 * 1024;

/// The longest wait for the answer to a request that an old server may not know. Our choice.
const MAX_SILENCE: Duration = Duration::from_secs(3);

/// The longest wait for the end of a program that has closed its side. Our choice.
const END_PATIENCE: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// A message is one line for every reader of lines, and says the same.
    #[test]
    fn a_message_is_one_line() {
        let message = "{\"a\":\r\n{\"b\":1}\n,\"c\":\"\u{2028}\u{85}\\n\"}";
        let line = to_line(message);
        assert_eq!(line, "{\"a\":  {\"b\":1} ,\"c\":\"\\u2028\\u0085\\n\"}\n");
        let read = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        assert_eq!(read(&line), read(message));
    }
}
