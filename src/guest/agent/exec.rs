//! The one tool: it runs a program of the sandbox with arguments and input, and captures the start and the end of the
//! output.
//!
//! The tool uses no shell: a model that wants a shell calls `["sh", "-c", …]`, if the image has one. The program runs
//! in its own process group, and the whole group is killed at the timeout. Background processes that the program leaves
//! keep running until the sandbox ends.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::time::Timespec;
use serde::Deserialize;
use serde_json::{Value, json};

/// The model's call of the tool.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExecRequest {
    /// The program and its arguments, passed on without interpretation.
    pub argv: Vec<String>,
    #[serde(default)]
    pub stdin: String,
    /// The timeout in seconds.
    #[serde(default = "default_timeout")]
    pub timeout_s: u32,
}

/// The result of a call. Its `Display` is the JSON that the model reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecResult {
    /// The exit code, or `None` if the program was not started or was killed.
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    pub timed_out: bool,
    /// The reason why the program was not started.
    pub error: Option<String>,
    pub stdout: String,
    pub stderr: String,
}

/// Returns the tool's description in the format of chat completions.
pub fn tool_description() -> Value {
    json!({
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": "Run a program in the workspace, without a shell, and return its exit code and output. \
                            For a shell, run [\"sh\", \"-c\", SCRIPT].",
            "parameters": {
                "type": "object",
                "properties": {
                    "argv": {
                        "type": "array",
                        "items": {"type": "string"},
                        "minItems": 1,
                        "description": "The program and its arguments.",
                    },
                    "stdin": {"type": "string", "description": "The program's standard input."},
                    "timeout_s": {
                        "type": "integer",
                        "minimum": 1,
                        "description": "The program is killed after this many seconds; 120 by default.",
                    },
                },
                "required": ["argv"],
                "additionalProperties": false,
            },
        },
    })
}

/// Parses a call.
///
/// # Errors
/// Returns the problem as a result that the model can read.
pub fn parse_call(name: &str, arguments: &str) -> Result<ExecRequest, ExecResult> {
    let wrong = |why: String| ExecResult { error: Some(why), ..ExecResult::default() };
    if name != TOOL_NAME {
        return Err(wrong(format!("there is no tool `{name}`; there is `{TOOL_NAME}`")));
    }
    let request: ExecRequest = serde_json::from_str(arguments)
        .map_err(|error| wrong(format!("the arguments are invalid: {error}")))?;
    match request.argv.first() {
        Some(program) if !program.is_empty() => Ok(request),
        _ => Err(wrong("`argv` names no program".to_owned())),
    }
}

/// Runs the program until it exits, its timeout passes, or the agent's deadline passes.
pub fn run_tool(request: &ExecRequest, deadline: Instant) -> ExecResult {
    let deadline =
        deadline.min(Instant::now() + Duration::from_secs(u64::from(request.timeout_s.max(1))));
    let child = Command::new(&request.argv[0])
        .args(&request.argv[1..])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // The kill at the timeout must reach the children too, and must not reach this agent.
        .process_group(0)
        .spawn();
    let ended = child.and_then(|child| ToolProcessIo::new(child, &request.stdin)?.run(deadline));
    ended.unwrap_or_else(|error| {
        let error = format!("`{}` cannot be run: {error}", request.argv[0]);
        ExecResult { error: Some(error), ..ExecResult::default() }
    })
}

impl fmt::Display for ExecResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(error) = &self.error {
            return json!({"error": error}).fmt(f);
        }
        let mut result = json!({
            "exit_code": self.exit_code,
            "stdout": self.stdout,
            "stderr": self.stderr,
        });
        if let Some(signal) = self.signal {
            result["signal"] = json!(signal);
        }
        if self.timed_out {
            result["timed_out"] = json!(true);
        }
        result.fmt(f)
    }
}

/// A running program, and the input that is still to be written to the program.
struct ToolProcessIo<'a> {
    child: Child,
    input: Option<ChildStdin>,
    rest: &'a [u8],
    stdout: ToolOutputStream,
    stderr: ToolOutputStream,
}

/// One output of the program. `source` is `None` after the end of the output.
struct ToolOutputStream {
    source: Option<Box<dyn PollableSource>>,
    capture: ToolOutputBuffer,
}

trait PollableSource: Read + AsFd {}
impl<T: Read + AsFd> PollableSource for T {}

impl<'a> ToolProcessIo<'a> {
    fn new(mut child: Child, input: &'a str) -> io::Result<Self> {
        let stdin = child.stdin.take();
        let stdout = ToolOutputStream::new(child.stdout.take().expect("it is piped"))?;
        let stderr = ToolOutputStream::new(child.stderr.take().expect("it is piped"))?;
        if let Some(stdin) = &stdin {
            fcntl_setfl(stdin, OFlags::NONBLOCK)?;
        }
        Ok(Self { child, input: stdin, rest: input.as_bytes(), stdout, stderr })
    }

    fn run(mut self, deadline: Instant) -> io::Result<ExecResult> {
        // `until` is the time of the next forced step: the kill while the program runs, the end of reading after its
        // exit.
        let (mut status, mut until) = (None, deadline);
        let mut timed_out = false;
        loop {
            self.move_bytes();
            if status.is_none() {
                status = self.child.try_wait()?;
                if status.is_some() {
                    // A background process may hold the output open: it gets a short time to write the rest.
                    until = deadline.min(Instant::now() + OUTPUT_DRAIN_TIMEOUT);
                }
            }
            // Both outputs have ended, so that no process holds them any more.
            let is_read = self.stdout.source.is_none() && self.stderr.source.is_none();
            match status {
                Some(status) if is_read || Instant::now() >= until => {
                    return Ok(self.into_result(status, timed_out));
                }
                None if Instant::now() >= deadline => {
                    // SIGKILL ends the program, so that the wait is short. Its exit still leaves time for the buffered
                    // output.
                    timed_out = true;
                    let group = Pid::from_child(&self.child);
                    let _ = kill_process_group(group, Signal::KILL);
                    status = Some(self.child.wait()?);
                    until = Instant::now() + OUTPUT_DRAIN_TIMEOUT;
                }
                _ => self.wait_for_io(until),
            }
        }
    }

    fn into_result(self, status: ExitStatus, timed_out: bool) -> ExecResult {
        ExecResult {
            exit_code: status.code(),
            signal: status.signal(),
            timed_out,
            error: None,
            stdout: self.stdout.capture.finish(),
            stderr: self.stderr.capture.finish(),
        }
    }

    /// Waits until an input or output is ready, at most [`POLL_INTERVAL`]: `poll` does not report the program's exit.
    fn wait_for_io(&self, until: Instant) {
        let sources = [&self.stdout, &self.stderr].into_iter().filter_map(|s| s.source.as_ref());
        let readable =
            sources.map(|source| PollFd::from_borrowed_fd(source.as_fd(), PollFlags::IN));
        let writable = self.input.iter().map(|input| PollFd::new(input, PollFlags::OUT));
        let mut fds: Vec<_> = readable.chain(writable).collect();
        let left = until.saturating_duration_since(Instant::now()).min(POLL_INTERVAL);
        let left = Timespec::try_from(left).expect("a look is some milliseconds");
        // A signal ends the wait early, which only means an earlier check.
        let _ = poll(&mut fds, Some(&left));
    }

    fn move_bytes(&mut self) {
        if let Some(input) = &mut self.input {
            let written = if self.rest.is_empty() { Ok(0) } else { input.write(self.rest) };
            match written {
                Ok(length) => self.rest = &self.rest[length..],
                Err(error) if is_retryable(&error) => {}
                // The program has closed its input. The rest of the input is dropped, and that is not an error.
                Err(_) => self.rest = &[],
            }
            // Closing the pipe is the end of the program's input.
            if self.rest.is_empty() {
                self.input = None;
            }
        }
        self.stdout.read_available();
        self.stderr.read_available();
    }
}

impl ToolOutputStream {
    fn new(source: impl PollableSource + 'static) -> io::Result<Self> {
        fcntl_setfl(&source, OFlags::NONBLOCK)?;
        Ok(Self { source: Some(Box::new(source)), capture: ToolOutputBuffer::default() })
    }

    /// Reads the available output, at most [`MAX_READS_PER_TURN`] buffers so that endless output cannot block the loop.
    fn read_available(&mut self) {
        let mut buffer = [0; READ_BUFFER_BYTES];
        for _ in 0..MAX_READS_PER_TURN {
            let Some(source) = &mut self.source else { return };
            match source.read(&mut buffer) {
                Ok(0) => self.source = None,
                Ok(length) => self.capture.push(&buffer[..length]),
                Err(error) if is_retryable(&error) => return,
                Err(_) => self.source = None,
            }
        }
    }
}

/// Returns true for errors after which the same read or write can be repeated.
fn is_retryable(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// The start and the end of a stream. The middle is counted and dropped.
#[derive(Clone, Debug, Default)]
pub struct ToolOutputBuffer {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    left_out: u64,
}

impl ToolOutputBuffer {
    pub fn push(&mut self, chunk: &[u8]) {
        // The first bytes fill `head`; everything after them goes through `tail`, which drops its oldest bytes.
        let (head, rest) = chunk.split_at(chunk.len().min(KEEP_BYTES - self.head.len()));
        self.head.extend_from_slice(head);
        self.tail.extend(rest);
        let too_many = self.tail.len().saturating_sub(KEEP_BYTES);
        self.tail.drain(..too_many);
        self.left_out += too_many as u64;
    }

    /// Returns the captured text. A line in the middle states the number of dropped bytes. Invalid UTF-8 is replaced.
    pub fn finish(self) -> String {
        let Self { head: mut output, tail, left_out } = self;
        if left_out > 0 {
            output.extend_from_slice(format!("\n[{left_out} bytes left out]\n").as_bytes());
        }
        output.extend(tail);
        String::from_utf8_lossy(&output).into_owned()
    }
}

const TOOL_NAME: &str = "exec";

fn default_timeout() -> u32 {
    120
}

/// The number of bytes stored of each stream's start, and again of its end. Our choice: some thousand tokens.
pub const KEEP_BYTES: usize = 16 << 10;

const READ_BUFFER_BYTES: usize = 16 << 10;
const MAX_READS_PER_TURN: usize = 16;

/// The interval at which the program's exit is checked, because `poll` cannot wait for it together with the output.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The time to read the remaining output after the program's exit, while other processes hold it open. Our choice.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_millis(500);
